"""Objects that hooks receive besides tensors: memory, registers, parts, weights, requests.

All state of a policy belongs to a sequence. A policy object holds its knobs only, so nothing
can leak from one sequence to another. State is looked up by the identity of the policy object:
policies have no equality, and the stack that holds them outlives every sequence, so an id is
never reused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.errors import PolicyLoadError
from kvpolicy.plugin_code import declared_by


@attrs.frozen
class WaitingRequest:
    """A request that waits for a slot, as `schedule` sees it.

    Attributes:
        id: Number of the request in its run, in order of arrival.
        prompt_len: Tokens in the prompt.
        max_new_tokens: The most tokens it may generate.
        priority: Higher ones are meant to go first.
    """

    id: int
    prompt_len: int
    max_new_tokens: int
    priority: int = 0


@attrs.frozen(eq=False, kw_only=True)
class LayerWeights:
    """The projections of one layer's attention by head, as `bind` sees them. Read only.

    Tensors are views of the model's weights where it has such, in its dtype. With a state ``x``
    that enters the attention and head ``h``, the query before norm and RoPE is
    ``q[h] @ x + q_bias[h]``, keys and values likewise; the layer adds ``o[h] @ z`` to its output
    for the output ``z`` of query head ``h``, and ``o_bias`` once.

    Attributes:
        q: ``[H_q, D, M]``; query head ``h`` belongs to KV head ``h // (H_q / H_kv)``.
        k: ``[H_kv, D, M]``.
        v: ``[H_kv, D, M]``.
        o: ``[H_q, M, D]``.
        q_bias: ``[H_q, D]``, or ``None``.
        k_bias: ``[H_kv, D]``, or ``None``.
        v_bias: ``[H_kv, D]``, or ``None``.
        o_bias: ``[M]``, or ``None``.
        q_norm: Norm of all queries of tokens, ``[N, H_q, D]``, before RoPE; ``None``: the model
            has none.
        k_norm: Norm of all keys of tokens, ``[N, H_kv, D]``, likewise.
        rotary_scale: What the rotary embedding multiplies queries and keys with at every position,
            beside rotating them: 1 in most models.
        scaling: Factor on the logits. The argument `queries` of `score` includes what it is beside
            ``D ** -0.5``.
        rotate: Moves queries or keys ``[B, H, K, D]`` by some positions ``[B, H, K]``, int64, with
            the model's rotary embedding, and without ``rotary_scale``: `queries` and `keys` are at
            position 0. Raises `ModelError` if the model has none, or one that changes with the
            length.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Callable[[Tensor], Tensor] | None = None
    k_norm: Callable[[Tensor], Tensor] | None = None
    rotary_scale: float = 1.0
    scaling: float
    rotate: Callable[[Tensor, Tensor], Tensor]

    def queries(self, states: Tensor) -> Tensor:
        """Queries of tokens as at position 0, ``[N, H_q, D]``, from what enters the attention."""
        return self._scaled(_projected(states, self.q, self.q_bias, self.q_norm))

    def keys(self, states: Tensor) -> Tensor:
        """Keys of tokens as at position 0, ``[N, H_kv, D]``, from what enters the attention."""
        return self._scaled(_projected(states, self.k, self.k_bias, self.k_norm))

    def values(self, states: Tensor) -> Tensor:
        """Values of tokens, ``[N, H_kv, D]``, from what enters the attention."""
        return _projected(states, self.v, self.v_bias, None)

    def _scaled(self, heads: Tensor) -> Tensor:
        return heads if self.rotary_scale == 1 else heads * self.rotary_scale

    @property
    def head_dim(self) -> int:
        """Size of one head, ``D``."""
        return self.q.shape[1]

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.q.device

    @property
    def tensors(self) -> list[Tensor]:
        """All weights and biases."""
        return [value for value in attrs.astuple(self, recurse=False) if isinstance(value, Tensor)]


def _projected(
    states: Tensor, weight: Tensor, bias: Tensor | None, norm: Callable[[Tensor], Tensor] | None
) -> Tensor:
    heads = torch.einsum("nm,hdm->nhd", states.to(weight.dtype), weight)
    heads = heads if bias is None else heads + bias
    return heads if norm is None else norm(heads)


class Bound:
    """What the policies of one layer have made of its weights in `bind`."""

    def __init__(self, values: Mapping[int, Any] | None = None) -> None:
        self._values = values or {}

    def of(self, policy: object) -> Any:
        """What one policy has made; ``None`` if it does not implement `bind`."""
        return self._values.get(id(policy))


def _tuple_of(token_ids: Any) -> tuple[int, ...] | None:
    if isinstance(token_ids, Tensor):
        token_ids = token_ids.tolist()
    return None if token_ids is None else tuple(token_ids)


@attrs.frozen
class Lookahead:
    """Tokens whose queries a policy wants before a compaction: given ones, or greedy ones.

    Attributes:
        token_ids: The tokens, as if they followed the sequence; ``None``: greedy ones.
        num_greedy: So many tokens of the rest of the prompt, or else as the model would go on, up
            to a stop token.
    """

    token_ids: tuple[int, ...] | None = attrs.field(default=None, converter=_tuple_of)
    num_greedy: int = 0

    @property
    def num_tokens(self) -> int:
        """Its tokens, at most."""
        return self.num_greedy if self.token_ids is None else len(self.token_ids)


@attrs.define(eq=False)
class SequenceMemory:
    """The memory of one sequence: a dict for each policy object."""

    _dicts: dict[int, dict[str, Any]] = attrs.field(factory=dict, init=False)

    def of(self, policy: object) -> dict[str, Any]:
        """The dict of one policy, empty when the sequence was admitted."""
        return self._dicts.setdefault(id(policy), {})

    def put(self, policy: object, notes: dict[str, Any]) -> None:
        """Replace the dict of one policy."""
        self._dicts[id(policy)] = notes

    def has(self, policy: object) -> bool:
        """Whether one policy has remembered anything."""
        return bool(self._dicts.get(id(policy)))


@attrs.frozen
class Memory:
    """The memory of the sequences in one hook call, in the order of the batch axis."""

    sequences: Sequence[SequenceMemory]

    def of(self, policy: object) -> list[dict[str, Any]]:
        """One dict per sequence: ``memory.of(self)[b]`` belongs to this policy and sequence b."""
        return [sequence.of(policy) for sequence in self.sequences]


class RegisterFile:
    """The registers of all policies of a run, for every slot.

    A register holds one number per sequence in a tensor on the device. `observe` writes it and
    `steer` reads it in every decode step, without a copy from the host.

    Attributes:
        tensors: By policy id and register name, ``[S]``, fp32.
    """

    def __init__(self, policies: Sequence[object], num_slots: int, device: torch.device) -> None:
        self.tensors: dict[int, dict[str, Tensor]] = {}
        for policy in policies:
            names = declared_by(policy, "registers", ())
            self.tensors[id(policy)] = {
                name: torch.zeros(num_slots, dtype=torch.float32, device=device) for name in names
            }

    @property
    def all(self) -> list[Tensor]:
        """Every tensor, ``[S]``."""
        return [tensor for named in self.tensors.values() for tensor in named.values()]

    def of_policy(self, policy: object) -> Mapping[str, Tensor]:
        """The registers of one policy by name, ``[S]`` each."""
        return self.tensors[id(policy)]

    def of_slots(self, first: int, last: int) -> "Registers":
        """The registers of the sequences in slots ``[first, last)``."""
        return Registers(self.tensors, slice(first, last))


class Registers:
    """The registers of the sequences in one hook call, in the order of the batch axis."""

    def __init__(self, tensors: Mapping[int, Mapping[str, Tensor]], slots: slice) -> None:
        self._tensors = tensors
        self._slots = slots

    @contextmanager
    def on(self, device: torch.device) -> Iterator["Registers"]:
        """The same registers on another device; changes are copied back at the end.

        A model may be spread over several devices; a hook gets its registers on the device of
        its hidden states.
        """
        tensors = [tensor for named in self._tensors.values() for tensor in named.values()]
        if all(tensor.device == device for tensor in tensors):
            yield self
            return
        copies = {
            policy: {name: tensor[self._slots].to(device) for name, tensor in named.items()}
            for policy, named in self._tensors.items()
        }
        yield Registers(copies, slice(None))
        for policy, named in self._tensors.items():
            for name, tensor in named.items():
                tensor[self._slots] = copies[policy][name].to(tensor.device)

    def of(self, policy: object) -> dict[str, Tensor]:
        """The registers of one policy by name, ``[B]``, fp32: views, to be changed in place.

        Raises:
            PolicyLoadError: The policy declares none in its class attribute ``registers``.
        """
        named = self._tensors.get(id(policy))
        if not named:
            msg = (
                f"{type(policy).__name__} asks for registers and declares none; write "
                'registers: ClassVar[tuple[str, ...]] = ("NAME",)'
            )
            raise PolicyLoadError(msg)
        return {name: tensor[self._slots] for name, tensor in named.items()}


class Parts:
    """The scores of a policy's parts, for the rows of one compaction.

    A policy that combines other policies declares them in its attribute ``parts``, a list of
    pairs of name and policy. Their scores go to that policy only.
    """

    def __init__(self, callers: Mapping[int, Sequence[Callable[[], Tensor]]]) -> None:
        self._callers = callers

    def of(self, policy: object) -> list[Tensor]:
        """Call `score` of each part of a policy, in order; ``[B, H_kv, T]``, fp32.

        Every call computes the scores again. They are checked like the scores of a stack.

        Raises:
            PolicyLoadError: The policy declares no ``parts``.
            HookError: A part raises; the message names it and the policy it is a part of.
            HookResultError: The scores of a part violate the contract.
        """
        callers = self._callers.get(id(policy))
        if not callers:
            msg = (
                f"{type(policy).__name__} asks its parts and declares none; give it an "
                'attribute parts, as in parts = [("NAME", policy)]'
            )
            raise PolicyLoadError(msg)
        return [call() for call in callers]
