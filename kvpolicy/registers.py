"""Registers: a policy's own numbers, one per sequence, in tensors that stay on the device.

What `observe` finds out about a sequence, `steer` may have to know in every decode step. A
Python object would have to be gathered and copied to the device each time; a register is
there already, and may be changed in place inside the step. Where a model is spread over
several devices, hooks get copies beside their states, which are brought back when they are done.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from kvpolicy.errors import PolicyLoadError


class RegisterFile:
    """The registers of all policies of a run, for every slot.

    Attributes:
        tensors: By policy and name, ``[S]``, fp32.
    """

    def __init__(self, policies: Sequence[object], num_slots: int, device: torch.device) -> None:
        # Keyed by identity, as memory is.
        self.tensors: dict[int, dict[str, Tensor]] = {}
        for policy in policies:
            names = getattr(policy, "registers", ())
            self.tensors[id(policy)] = {
                name: torch.zeros(num_slots, dtype=torch.float32, device=device) for name in names
            }

    @property
    def all(self) -> list[Tensor]:
        """Every tensor; the axis is the slot."""
        return [tensor for mine in self.tensors.values() for tensor in mine.values()]

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
        """The same registers on the device of a hook's states; changes are brought back."""
        mine = [tensor for tensors in self._tensors.values() for tensor in tensors.values()]
        if all(tensor.device == device for tensor in mine):
            yield self
            return
        copies = {
            policy: {name: tensor[self._slots].to(device) for name, tensor in tensors.items()}
            for policy, tensors in self._tensors.items()
        }
        yield Registers(copies, slice(None))
        for policy, tensors in self._tensors.items():
            for name, tensor in tensors.items():
                tensor[self._slots] = copies[policy][name].to(tensor.device)

    def of(self, policy: object) -> dict[str, Tensor]:
        """One policy's own, by name, ``[B]``, fp32; views, to be changed in place.

        Raises:
            PolicyLoadError: If the policy declares none in its class attribute ``registers``.
        """
        mine = self._tensors.get(id(policy))
        if not mine:
            msg = (
                f"{type(policy).__name__} asks for registers and declares none; write "
                'registers: ClassVar[tuple[str, ...]] = ("NAME",)'
            )
            raise PolicyLoadError(msg)
        return {name: tensor[self._slots] for name, tensor in mine.items()}
