"""Checks of values that are read later: on a GPU a check that reads an answer is a wait.

Type, shape, dtype and device of an answer are known to the host and checked at once. Whether its
values are valid becomes a flag on the device. Flags are read together, at a point where results
are read anyway; only where one is raised are the answers checked one by one, so that an error
names what it would have named at once.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import islice

import attrs
import torch
from torch import Tensor

from kvpolicy.devices import Download

# Checks the values of some entries of the batch axis of a kept answer, which are those of a layer.
Recheck = Callable[[int, slice], None]


@attrs.frozen(eq=False)
class Concerned:
    """The entries of one layer in a hook call.

    Attributes:
        layer_idx: The layer.
        entries: Its part of the batch axis.
        scope: Makes the block in which an error about them is raised.
    """

    layer_idx: int
    entries: slice
    scope: Callable[[], AbstractContextManager[None]]


@attrs.define(eq=False)
class LateChecks:
    """The answers of one compaction that wait for their check.

    Attributes:
        concerned: Tells which layers were asked; called only to blame.
    """

    concerned: Callable[[], Iterable[Concerned]]
    _flags: list[Tensor] = attrs.field(factory=list, init=False)
    _rechecks: list[Recheck] = attrs.field(factory=list, init=False)

    def add(self, flag: Tensor, recheck: Recheck) -> None:
        """Keep an answer.

        Args:
            flag: Whether a value is invalid, a bool on the device of the answer.
            recheck: Raises `HookResultError` for the invalid ones.
        """
        self._flags.append(flag)
        self._rechecks.append(recheck)

    @property
    def flags(self) -> list[Tensor]:
        """The flags of all answers."""
        return self._flags

    def blame(self) -> None:
        """Check the answers one by one, layer by layer as if each had been asked alone.

        Raises:
            HookResultError: Values are invalid; raised in the scope of their sequences.
        """
        for one in self.concerned():
            with one.scope():
                for recheck in self._rechecks:
                    recheck(one.layer_idx, one.entries)


class Unsettled:
    """Kept answers whose flags are on their way to the host, in one copy."""

    def __init__(self, kept: Sequence[LateChecks]) -> None:
        """Begin to copy the flags."""
        flags = [flag for one in kept for flag in one.flags]
        self._kept, self._flags = kept, None
        if flags:
            together = torch.stack([flag.to(flags[0].device) for flag in flags])
            self._flags = Download(together)

    def settle(self) -> None:
        """Blame where a flag is raised.

        Raises:
            HookResultError: As for `LateChecks.blame`.
        """
        if self._flags is None:
            return
        values = iter(self._flags.read().tolist())
        for one in self._kept:
            if any(list(islice(values, len(one.flags)))):
                one.blame()
