"""The student: a model whose attention fades by its gates, as soft eviction.

Queries attend with the weights ``a_ti ~ exp(q_t k_i / sqrt(D) + (t - i) log beta_i)``. The authors'
eager function multiplies the logits by ``beta_i^(t-i)`` instead; their training kernel, and the
paper's text, add the bias. With retention 1 everywhere, it is the model itself.

The model is left as it is: its code calls an attention function by name, and ours looks up the
gates of the pass under way. Without a pass, it is plain causal attention.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from kvpolicy import KVPolicyError
from kvpolicy_plugins.trimkv.gates import Gate, Gates
from kvpolicy_plugins.trimkv.retention import decay_bias

ATTENTION = "kvpolicy_trimkv"

BLOCK = 512  # queries whose weights are in memory at once


@attrs.define(eq=False)
class _Pass:
    """A forward under way: the gates, and what they have said so far, ``[B, H_kv, T]`` each."""

    gates: Gates
    states: dict[int, Tensor] = attrs.field(factory=dict)
    log_beta: dict[int, Tensor] = attrs.field(factory=dict)


_UNDER_WAY: ContextVar[_Pass | None] = ContextVar("trimkv_pass", default=None)


class Student:
    """A frozen model, with and without gates.

    A context manager: within it, the model calls our attention function.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model; its parameters are to be frozen by the caller.

        Raises:
            KVPolicyError: It has no decoder layers with an attention of their own, or its rows are
                latents, of which the attention that is trained with knows nothing.
        """
        self.model = model
        if getattr(model.config.get_text_config(decoder=True), "kv_lora_rank", None):
            msg = (
                f"gates cannot be trained for {type(model).__name__}: its rows are latents that "
                "all heads share, and gates are trained on keys and values of heads; choose a "
                "model without latent attention, such as Llama or Qwen"
            )
            raise KVPolicyError(msg)
        layers = getattr(model.get_decoder(), "layers", None)
        found = [getattr(layer, "self_attn", None) for layer in layers or ()]
        self._attention = [module for module in found if isinstance(module, nn.Module)]
        if not found or len(self._attention) < len(found):
            msg = (
                f"gates cannot be trained for {type(model).__name__}: its decoder has no layers "
                "with self_attn; choose a decoder-only model such as Llama, Qwen or Phi-3"
            )
            raise KVPolicyError(msg)
        self._stack = ExitStack()

    def __enter__(self) -> "Student":
        """Put our attention function into the model's place."""
        AttentionInterface.register(ATTENTION, _attention)
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        self._stack.callback(self.model.set_attn_implementation, before)
        for layer_idx, module in enumerate(self._attention):
            handle = module.register_forward_pre_hook(_recorder(layer_idx), with_kwargs=True)
            self._stack.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the model as it was."""
        self._stack.close()

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self._attention)

    def teach(self, token_ids: Tensor) -> Tensor:
        """Last hidden states without gates, ``[B, T, M]``, and without gradients."""
        with torch.no_grad():
            return self._states(token_ids)

    def learn(self, token_ids: Tensor, gates: Gates) -> tuple[Tensor, Tensor]:
        """Last hidden states under soft eviction, and what the gates said.

        Args:
            token_ids: ``[B, T]``; padding, if any, on the right.
            gates: A gate for each layer.

        Returns:
            ``[B, T, M]``, and ``log beta``, ``[L, B, H_kv, T]``.
        """
        with _passing(gates) as under_way:
            states = self._states(token_ids)
        said = [under_way.log_beta[layer] for layer in range(self.num_layers)]
        return states, torch.stack(said)

    def logits(self, states: Tensor) -> Tensor:
        """Logits of last hidden states, fp32."""
        logits = self.model.get_output_embeddings()(states).float()
        cap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _states(self, token_ids: Tensor) -> Tensor:
        output = self.model.get_decoder()(input_ids=token_ids, use_cache=False)
        return output.last_hidden_state


@contextmanager
def _passing(gates: Gates) -> Iterator[_Pass]:
    under_way = _Pass(gates)
    token = _UNDER_WAY.set(under_way)
    try:
        yield under_way
    finally:
        _UNDER_WAY.reset(token)


def _recorder(layer_idx: int) -> Any:
    """Notes what enters the attention of a layer."""

    def record(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        under_way = _UNDER_WAY.get()
        if under_way is not None:
            under_way.states[layer_idx] = args[0] if args else kwargs["hidden_states"]

    return record


def _attention(
    module: nn.Module,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention, with the bias of the gates if a pass is under way."""
    under_way = _UNDER_WAY.get()
    log_beta = None
    if under_way is not None:
        log_beta = _ask(under_way, int(module.layer_idx), keys, values)  # type: ignore[arg-type]
    scale = keys.shape[-1] ** -0.5 if scaling is None else scaling
    options = (scale, sliding_window, softcap, s_aux)
    num_tokens = queries.shape[2]
    blocks = []
    for start in range(0, num_tokens, BLOCK):
        block = queries[:, :, start : start + BLOCK]
        given = (block, keys, values, log_beta, start, *options)
        if num_tokens > BLOCK and torch.is_grad_enabled():
            blocks.append(checkpoint(_attend, *given, use_reentrant=False))
        else:
            blocks.append(_attend(*given))
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None


def _ask(under_way: _Pass, layer_idx: int, keys: Tensor, values: Tensor) -> Tensor:
    """What the gate of a layer says, ``[B, H_kv, T]``."""
    gate = under_way.gates.of_layer(layer_idx)
    assert gate is not None, "there is a gate for each layer"
    said = gate.rate(_inputs(gate, under_way.states[layer_idx], keys, values)).transpose(1, 2)
    under_way.log_beta[layer_idx] = said
    return said


def _inputs(gate: Gate, states: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """What a gate reads, ``[B, T, I]``, from ``[B, T, M]`` and ``[B, H_kv, T, D]``."""
    if gate.reads_states:
        return states
    return torch.cat([keys, values], dim=-1).transpose(1, 2).flatten(2)


def _attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    log_beta: Tensor | None,
    start: int,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Output of the queries from ``start`` on, ``[B, H_q, L, D]``."""
    stop = start + queries.shape[2]
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # [B, H_kv, G, L, D]
    logits = (grouped @ keys[:, :, None, :stop].mT).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if log_beta is not None:
        logits = logits + decay_bias(log_beta, start, stop)[:, :, None]
    logits = logits.masked_fill(~_visible(start, stop, sliding_window, keys.device), -torch.inf)
    if sinks is not None:
        beside = sinks.float().reshape(1, keys.shape[1], -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, beside], dim=-1)
    weights = logits.softmax(dim=-1)[..., :stop].to(values.dtype)
    return (weights @ values[:, :, None, :stop]).flatten(1, 2)


def _visible(start: int, stop: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys a query may see, ``[stop - start, stop]``."""
    t = torch.arange(start, stop, device=device)[:, None]
    i = torch.arange(stop, device=device)
    return (i <= t) if window is None else (i <= t) & (i > t - window)
