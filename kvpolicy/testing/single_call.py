"""Running a policy on given tensors, with the engine's own cache, attention and compaction.

Used to compare a policy with a reference implementation or an oracle.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape
from kvpolicy.engine.compaction import DueSlot
from kvpolicy.engine.eviction.select_rows import CacheView, select_rows
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.sequence import Sequence as ServedSequence
from kvpolicy.errors import BudgetError, KVPolicyError
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.attention import attend
from kvpolicy.model.rope import rotate_halves
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.state import Bound, LayerWeights, Memory, RegisterFile

_LAYER = 0


@attrs.frozen(eq=False)
class Shown:
    """Tokens and hidden states for policies that implement `observe`, of each sequence.

    Attributes:
        token_ids: ``[B, T]``, int64.
        hidden_states: Last hidden states after the final norm, ``[B, T, M]``.
        tokenizer: The tokenizer that policies receive.
    """

    token_ids: Tensor
    hidden_states: Tensor
    tokenizer: Any = None


def keep_rows(
    policy: str | object,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    *,
    budget: int,
    prompt: int | None = None,
    shown: Shown | None = None,
    states: Tensor | None = None,
    layer_weights: LayerWeights | None = None,
    lookahead_queries: Tensor | None = None,
    **knobs: Any,
) -> Tensor:
    """The rows that stay when a cache is compacted once.

    Args:
        policy: Name of a policy, a policy object, or a list of them, which is a stack;
            knobs apply to a single name.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``: row t is token t. A policy that moves
            keys to other positions assumes the RoPE of Llama.
        values: Values, ``[B, H_kv, T, D]``.
        queries: Queries of the last ``W`` tokens after RoPE, ``[B, H_q, W, D]``. Policies
            that accumulate attention see these queries only; the window of a policy is at
            most ``W``.
        budget: Rows that stay.
        prompt: Tokens of the prompt; all ``T`` if not given.
        shown: What policies that implement `observe` receive; by default nothing.
        states: What policies that implement `annotate` receive of all tokens, ``[B, T, M]``.
        layer_weights: What policies that implement `bind` receive; if not given, these can move
            queries and keys by the RoPE of Llama, and read no weights.
        lookahead_queries: Queries of tokens that might follow, ``[B, H_q, P, D]``: there is no
            model that `lookahead` could be asked for.
        knobs: Knobs of the policy.

    Returns:
        Rows that stay, ``[B, H_kv, K]``, int64, rising; all of them if ``T <= budget``.
    """
    num_rows, window = keys.shape[2], queries.shape[2]
    given = _Given(shown, states, layer_weights)
    layer = _Layer(policy, knobs, keys, queries, budget, prompt, given)
    if window < num_rows:
        old = slice(0, num_rows - window)
        layer.feed(keys[:, :, old], values[:, :, old], None)
    new = slice(num_rows - window, None)
    layer.feed(keys[:, :, new], values[:, :, new], queries)
    return layer.select_rows(lookahead_queries)


def replay(
    policy: str | object,
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    *,
    budget: int,
    prompt: int,
    compact_at: Sequence[int],
    buffer: int = 1,
    shown: Shown | None = None,
    states: Tensor | None = None,
    layer_weights: LayerWeights | None = None,
    **knobs: Any,
) -> list[Tensor]:
    """The positions that stay after each of several compactions of a growing cache.

    A prompt is fed at once, then token by token, through the engine's own cache, attention
    and compaction code.

    Args:
        policy: Name of a policy, a policy object, or a list of them, which is a stack;
            knobs apply to a single name.
        keys: Keys after RoPE of all tokens, ``[B, H_kv, T, D]``; see `keep_rows`.
        values: Values of all tokens, ``[B, H_kv, T, D]``.
        queries: Queries after RoPE of all tokens, ``[B, H_q, T, D]``.
        budget: Rows that stay.
        prompt: Tokens fed at once.
        compact_at: Numbers of tokens after which to compact, rising, none below ``prompt``.
        buffer: The argument `buffer` of `due`.
        shown: What policies that implement `observe` receive; by default nothing.
        states: What policies that implement `annotate` receive of all tokens, ``[B, T, M]``.
        layer_weights: What policies that implement `bind` receive; see `keep_rows`.
        knobs: Knobs of the policy.

    Returns:
        For each compaction the original positions that stay, ``[B, H_kv, K]``, int64.
    """
    given = _Given(shown, states, layer_weights)
    layer = _Layer(policy, knobs, keys, queries, budget, prompt, given, buffer)
    layer.feed(keys[:, :, :prompt], values[:, :, :prompt], queries[:, :, :prompt])
    kept = [layer.compact()] if prompt in compact_at else []
    for token in range(prompt, keys.shape[2]):
        one = slice(token, token + 1)
        layer.feed(keys[:, :, one], values[:, :, one], queries[:, :, one])
        if token + 1 in compact_at:
            kept.append(layer.compact())
    return kept


@attrs.frozen(eq=False)
class _Given:
    """What policies are given besides keys, values and queries."""

    shown: Shown | None
    states: Tensor | None
    layer_weights: LayerWeights | None


class _NoWeights:
    """Weights of a layer that nobody has given: without a model, the rotation is Llama's."""

    tensors: tuple[Tensor, ...] = ()

    def __init__(self, names: str, head_dim: int, device: torch.device) -> None:
        self._names, self.device = names, device
        self.head_dim, self.scaling, self.rotary_scale = head_dim, head_dim**-0.5, 1.0
        self.rotate = partial(rotate_halves, _LAYER)

    def __getattr__(self, name: str) -> Any:
        msg = f"policy '{self._names}' reads weights in bind(); give them as layer_weights"
        raise KVPolicyError(msg)


class _Layer:
    """One layer of the engine's cache; all sequences have equally many tokens."""

    def __init__(
        self,
        policy: str | object,
        knobs: dict[str, Any],
        keys: Tensor,
        queries: Tensor,
        budget: int,
        prompt_len: int | None,
        given: _Given,
        buffer: int = 1,
    ) -> None:
        listed = policy if isinstance(policy, (list, tuple)) else [policy]
        specs = [PolicySpec.of(one, knobs) for one in listed]
        self.stack = Stack([(spec.policy, spec.build()) for spec in specs])
        if self.stack.mass_problem is not None:
            raise KVPolicyError(self.stack.mass_problem)
        protected = self.stack.n_first + self.stack.n_last
        if budget < max(protected, 1):
            names = "+".join(self.stack.names)
            msg = f"policy '{names}' protects {protected} rows; a budget of {budget} is less"
            raise BudgetError(msg)
        num_sequences, num_kv_heads, num_rows, head_dim = keys.shape
        shape = LayerShape(queries.shape[1], num_kv_heads, head_dim, keys.dtype, keys.device)
        slab = self.stack.slab(num_rows)
        slab = attrs.evolve(slab, window_size=min(slab.window_size, queries.shape[2]))
        self.cache = KVCache([shape], [slab], num_sequences)
        self.cache.rotate = rotate_halves  # there is no model: assume Llama's
        self.budget, self.buffer = budget, buffer
        self.prompt_len = num_rows if prompt_len is None else prompt_len
        prompt = (0,) * self.prompt_len
        self.sequences = [
            ServedSequence(slot, Request(prompt), prompt, 1, frozenset(), slot=slot)
            for slot in range(num_sequences)
        ]
        self.shown, self.states, weights = given.shown, given.states, given.layer_weights
        self.bound = Bound()
        if self.stack.implements("bind"):
            given_or_none: Any = _NoWeights("+".join(self.stack.names), head_dim, keys.device)
            self.bound = self.stack.bind(_LAYER, weights or given_or_none)
        self.registers = RegisterFile(self.stack.policies, num_sequences, keys.device)
        self.num_observed = 0

    def feed(self, keys: Tensor, values: Tensor, queries: Tensor | None) -> None:
        """Store tokens, and let their queries, if any, attend."""
        step = EagerStep(self.cache, range(keys.shape[0]), [keys.shape[2]] * keys.shape[0])
        all_keys, all_values = step.store(_LAYER, keys, values)
        if self.stack.is_annotated:
            self._annotate(step, keys, values)
        if queries is not None:
            attend(step, _LAYER, queries, all_keys, all_values, keys.shape[-1] ** -0.5)
        step.commit()

    def _annotate(self, step: EagerStep, keys: Tensor, values: Tensor) -> None:
        """Annotate new rows."""
        num_seen, num_new = int(self.cache.seq_len[0]), keys.shape[2]
        if self.states is None:
            # Policies that read keys and values only need none.
            states = keys.new_zeros(len(keys), num_new, 0)
            if "states" in self.stack.annotates:
                names = "+".join(self.stack.names)
                msg = (
                    f"policy '{names}' reads states in annotate(); give them, [B, T, M], as states"
                )
                raise KVPolicyError(msg)
        else:
            states = self.states[:, num_seen : num_seen + num_new]
        states, keys, values, positions = step.new_rows(_LAYER, states, keys, values)
        annotations = self.stack.annotate(
            _LAYER,
            states=states,
            keys=keys,
            values=values,
            positions=positions,
            bound=self.bound,
        )
        step.annotate(_LAYER, annotations)

    def select_rows(self, lookahead_queries: Tensor | None) -> Tensor:
        """Rows that stay of each sequence, ``[B, H_kv, K]``; all if nothing is due."""
        rows = LayerRows(self.cache, _LAYER, range(self.cache.num_slots))
        numbers = {name: rows.track(name) for name in self.stack.tracks}
        given = CacheView(
            keys=rows.keys,
            values=rows.values,
            positions=rows.positions,
            queries=rows.queries if self.stack.window_size else None,
            lookahead_queries=lookahead_queries,
            tracks=numbers,
            seq_len=rows.seq_len,
            prompt_len=torch.full_like(rows.seq_len, self.prompt_len),
            num_new=rows.num_new,
            is_image=torch.zeros_like(rows.positions, dtype=torch.bool),
            bound=self.bound,
        )
        budget = self.budget if self._begin_compaction() else rows.num_rows
        memory = [sequence.memory for sequence in self.sequences]
        selection = select_rows(self.stack, given, budget=budget, memory=memory)
        return selection.keep

    def compact(self) -> Tensor:
        """Compact all sequences, unless the policy never does at this point."""
        if self._begin_compaction():
            evictor = Evictor(
                self.cache, (), (), PolicyTimings(), ErrorScope("raise"), bound=[self.bound]
            )
            evictor.compact(
                DueSlot(_LAYER, sequence, self.stack, self.budget) for sequence in self.sequences
            )
        num_rows = int(self.cache.rows[_LAYER, 0])
        return self.cache.layers[_LAYER].positions[:, :, :num_rows].clone()

    def _begin_compaction(self) -> bool:
        """Show what has not been observed; whether anything is due."""
        if self.shown is not None and self.stack.implements("observe"):
            for slot in range(self.cache.num_slots):
                self._observe(slot, self.shown)
            self.num_observed = int(self.cache.seq_len[0])
        return self.stack.bounded or self._is_due()

    def _observe(self, slot: int, shown: Shown) -> None:
        new = slice(self.num_observed, int(self.cache.seq_len[slot]))
        self.stack.observe(
            token_ids=shown.token_ids[slot, new],
            hidden_states=shown.hidden_states[slot, new],
            start=self.num_observed,
            prompt_len=self.prompt_len,
            tokenizer=shown.tokenizer,
            registers=self.registers.of_slots(slot, slot + 1),
            memory=Memory([self.sequences[slot].memory]),
        )

    def _is_due(self) -> bool:
        seq_len = self.cache.seq_len
        due = self.stack.due(
            _LAYER,
            num_rows=torch.from_numpy(self.cache.rows[_LAYER]),
            seq_len=torch.from_numpy(seq_len),
            prompt_len=torch.from_numpy(seq_len * 0 + self.prompt_len),
            budget=self.budget,
            buffer=self.buffer,
            memory=Memory([sequence.memory for sequence in self.sequences]),
        )
        return due is not None and bool(due.all())
