"""Objects that hooks receive besides tensors: memory, registers, parts, waiting requests.

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


@attrs.frozen
class WaitingRequest:
    """A request that waits for a slot, as `schedule` sees it.

    Attributes:
        id: Number of the request in its run, in order of arrival.
        prompt_len: Tokens in the prompt.
        max_new_tokens: The most tokens it may generate.
    """

    id: int
    prompt_len: int
    max_new_tokens: int


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
            names = getattr(policy, "registers", ())
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
