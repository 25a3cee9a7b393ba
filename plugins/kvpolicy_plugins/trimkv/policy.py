"""TRIM-KV: what a token is worth is said once, when it is created, and fades with its age."""

from typing import Any, ClassVar

import attrs
import torch
from attrs.validators import ge, in_, instance_of, le, lt, optional
from torch import Tensor

from kvpolicy import KVPolicyError, Tracks, hookimpl
from kvpolicy_plugins.trimkv.budgets import rows_over_heads
from kvpolicy_plugins.trimkv.gates import FILES, FORMS, Form, Gate, Gates, load_gates, new_gate
from kvpolicy_plugins.trimkv.retention import log_utility

LOG_BETA = "trimkv_log_beta"
UNTRAINED = "untrained"

_UNTRAINED_BIAS = 8.0
_UNTRAINED_SIZE = 32
_LEAST_NORM = 1e-12  # as in the authors' code


def _hashed(value: Any) -> Any:
    return value if value == UNTRAINED else FILES.with_hash(value)


def _as_float(value: object) -> object:
    return float(value) if type(value) is int else value


@attrs.define(eq=False, kw_only=True)
class TrimKV:
    """TRIM-KV: keep the rows whose learned retention has faded least.

    Bui et al., "Cache What Lasts: Token Retention for Memory-Bounded KV Cache in LLMs", 2025
    (arXiv 2512.03324); code at ngocbh/trimkv 0456bc4, ``TrimKVCache.compress_layer`` and
    ``RetentionGate`` to ``RetentionGate3``. A gate of each layer reads a token when it is created
    and gives each KV head a retention ``beta_i`` between 0 and 1. At time t its row is worth
    ``alpha_ti = beta_i^(t-i)``, and the rows of lowest worth leave: scores are
    ``(t - i) log beta_i``. Attention itself is unchanged.

    Gates are trained by ``kvpolicy trimkv train`` for one model; files with the authors' tensors
    are read as well. Without a file, gates are what training begins with: almost equal retention
    for all tokens, so that almost only the newest rows stay.

    In a plan with ``heads = "shared"``, the best ``budget * H_kv`` rows of all heads of a layer
    stay, as in the authors' strategies ``layer_wise_*`` of ``DynamicBudgetTrimKVCache``. With
    ``horizon`` above 1, a row is worth what it is to the next queries together, as in DBTrimKV
    (arXiv 2605.09649).

    Deviations: the newest row has age 1, as at the next query, and stays (in the paper it has
    age 0, in the code 2; see ``newest_age`` and ``n_recent``); of equal scores the newer row
    stays; gates are computed in fp32; prompts are compacted in chunks (see ``whole_prompt``);
    where heads share a budget, each keeps at least a row, and ``threshold`` is no way around
    the budget (in the code it replaces it); a budget over all layers is `rows_over_model`, a
    function: an engine that compacts layer by layer cannot keep it. The gate ``rg10`` of later
    code, whose last layer all layers have in common, is not read.

    Attributes:
        gates: Name of an installed file of gates, or path of one for the model; a hash of the
            contents is added to it. ``"untrained"`` fits every model.
        retention_gate: Form of the gates, ``"rg"``, ``"rg2"`` or ``"rg3"``, if the file does not
            say it: what `Gate` reads.
        hidden_act: Their activation, if it is not that of the file; ``"silu"`` if none is named.
        newest_age: Age of the newest row, in tokens: 0 as in the paper, 2 as in the code.
        n_recent: Newest rows that always stay, the authors' ``sliding_window_size``.
        horizon: Queries to come to which a row is worth something; 1: the next one.
        key_norms: Whether the norm of the key multiplies a row's worth (``knorm_alpha``).
        whole_prompt: Whether a prompt is compacted once, when it is in, as in the code. Peak memory
            then grows with its length, and the slab with that of the sequence.
        floor_ratio: Where heads share a budget, the share of it that each has for itself.
        threshold: Where heads share a budget, rows worth less leave though there is room; 0: none.
        seed: Draws the weights of untrained gates.
    """

    ragged: ClassVar[bool] = True
    annotates_in_step: ClassVar[bool] = True
    tracks: ClassVar[tuple[str, ...]] = (LOG_BETA,)

    gates: str = attrs.field(default="untrained", converter=_hashed, validator=instance_of(str))
    retention_gate: Form | None = attrs.field(default=None, validator=optional(in_(FORMS)))
    hidden_act: str | None = attrs.field(default=None, validator=optional(instance_of(str)))
    newest_age: int = attrs.field(default=1, validator=[instance_of(int), ge(0)])
    n_recent: int = attrs.field(default=1, validator=[instance_of(int), ge(0)])
    horizon: int = attrs.field(default=1, validator=[instance_of(int), ge(1)])
    key_norms: bool = attrs.field(default=False, validator=instance_of(bool))
    whole_prompt: bool = attrs.field(default=False, validator=instance_of(bool))
    floor_ratio: float = attrs.field(
        default=0.0, converter=_as_float, validator=[instance_of(float), ge(0), le(1)]
    )
    threshold: float = attrs.field(
        default=0.0, converter=_as_float, validator=[instance_of(float), ge(0), lt(1)]
    )
    seed: int = attrs.field(default=0, validator=[instance_of(int), ge(0)])
    _gates: Gates | None = attrs.field(init=False, repr=False)
    _placed: dict[Any, Gate] = attrs.field(factory=dict, init=False, repr=False)

    @_gates.default
    def _load(self) -> Gates | None:
        if self.gates == UNTRAINED:
            return None
        return load_gates(self.gates, form=self.retention_gate, hidden_act=self.hidden_act)

    @property
    def protects(self) -> tuple[int, int]:
        """The recent rows."""
        return 0, self.n_recent

    @property
    def no_effect(self) -> str | None:
        """What it does without trained gates is what no policy does."""
        if self.gates != UNTRAINED:
            return None
        return (
            "its gates are untrained, so that almost only the newest rows stay; give it those of "
            '`kvpolicy trimkv train`, gates = "FILE"'
        )

    @property
    def bounded(self) -> bool:
        """Whether the slab has a fixed size: not if a prompt must fit into it."""
        return not self.whole_prompt

    @hookimpl(when="whole_prompt")
    def due(self, num_rows: Tensor, budget: int, buffer: int) -> Tensor:
        """Compact when memory and buffer are full."""
        return num_rows >= budget + buffer

    @hookimpl
    def annotate(
        self, layer_idx: int, states: Tensor, keys: Tensor, values: Tensor
    ) -> dict[str, Tensor]:
        """Ask the layer's gate how much of new rows is retained from a token to the next."""
        gate = self._gate(layer_idx, states, keys, values)
        return {LOG_BETA: gate.log_beta(states, keys, values)}

    @hookimpl
    def score(self, keys: Tensor, positions: Tensor, seq_len: Tensor, tracks: Tracks) -> Tensor:
        """Score rows by the logarithm of what is left of them."""
        newest = seq_len.to(positions.device, non_blocking=True)[:, None, None] - 1
        age = newest - positions + self.newest_age
        worth = log_utility(tracks[LOG_BETA], age, self.horizon)
        if self.key_norms:
            worth = worth + keys.float().norm(dim=-1).clamp(min=_LEAST_NORM).log()
        return worth

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor | None:
        """Let the heads of a layer compete, where they share a budget."""
        if heads == "own":
            return None
        least = torch.tensor(self.threshold).log().item()
        return rows_over_heads(
            scores,
            positions >= 0,
            rows=budget * scores.shape[1],
            floor=max(1, int(budget * self.floor_ratio)),
            least=least,
        )

    def _gate(self, layer_idx: int, states: Tensor, keys: Tensor, values: Tensor) -> Gate:
        """The gate of a layer, on the device of the tokens that it is asked about."""
        num_heads = keys.shape[1]
        num_read = num_heads * (keys.shape[2] + values.shape[2])
        sizes = (layer_idx, num_heads, states.shape[1], num_read, states.device)
        if sizes not in self._placed:
            gate = self._made(layer_idx, num_heads, states.shape[1], num_read)
            self._placed[sizes] = gate.to(states.device)
        return self._placed[sizes]

    def _made(self, layer_idx: int, num_heads: int, num_states: int, num_read: int) -> Gate:
        if self._gates is None:
            form = self.retention_gate or "rg"
            return new_gate(
                form,
                num_inputs=num_states if form == "rg" else num_read,
                num_heads=num_heads,
                intermediate_size=_UNTRAINED_SIZE,
                hidden_act=self.hidden_act or "silu",
                bias=_UNTRAINED_BIAS,
                generator=torch.Generator().manual_seed(self.seed + layer_idx),
            )
        gate, name = self._gates.of_layer(layer_idx), self.gates.partition("#")[0]
        remedy = "train gates for this model with `kvpolicy trimkv train`"
        if gate is None:
            known = ", ".join(map(str, self._gates.by_layer))
            msg = f"the gates '{name}' are of layers {known}, not of layer {layer_idx}; {remedy}"
            raise KVPolicyError(msg)
        given = num_states if gate.reads_states else num_read
        if (gate.num_inputs, gate.num_heads) != (given, num_heads):
            msg = (
                f"the gates '{name}' read {gate.num_inputs} numbers of a token and rate "
                f"{gate.num_heads} KV heads, and layer {layer_idx} of the model has {given} and "
                f"{num_heads}; {remedy}"
            )
            raise KVPolicyError(msg)
        return gate
