"""The new tokens of one forward, in columns.

A forward serves some slots. Each has some new tokens; if the numbers differ, token columns are
padded on the left, so that the last column is always the newest token. Pads are computed and
dropped: they are never stored or attended to.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.arena import slot_index

_T = TypeVar("_T")


@attrs.frozen(eq=False)
class Tokens:
    """The new tokens of a forward one by one, without pads, on a device.

    Attributes:
        sequences: Which sequence of the forward each token belongs to, ``[N]``.
        slots: Its slot, ``[N]``.
        positions: Its position in its sequence, ``[N]``.
    """

    sequences: Tensor
    slots: Tensor
    positions: Tensor


class NewTokens:
    """The new tokens of a forward.

    Attributes:
        slots: Slots of the forward, ``[B]``.
        served: Index of these slots.
        lengths: New tokens of each slot, ``[B]``.
        seq_len: Tokens seen by each slot before, ``[B]``.
        width: Token columns, ``L``.
        token: Number of each column's token among the new ones of its slot, ``[B, L]``; negative
            for pads.
        is_real: Which columns are no pads, bool ``[B, L]``.
        has_pads: Whether some column is a pad.
        position_ids: Position of every column's token in its sequence, ``[B, L]``, 0 for pads.
        ahead: How many of the tokens behind its own each column's token attends to, ``[B, L]``;
            ``None``: none does.
        beside_bytes: Bytes of the new rows that are held beside the slabs.
    """

    def __init__(
        self,
        slots: Sequence[int],
        lengths: Sequence[int],
        seq_len: np.ndarray,
        ahead: np.ndarray | None = None,
    ) -> None:
        """Serve slots, with so many new tokens each (at least 1)."""
        self.slots, self.served = np.asarray(slots), slot_index(slots)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.seq_len, self.ahead = seq_len, ahead
        self.width = int(self.lengths.max())
        self.token = np.arange(self.width) - (self.width - self.lengths[:, None])
        self.is_real = self.token >= 0
        self.has_pads = not self.is_real.all()
        self.position_ids: np.ndarray = np.maximum(self.seq_len[:, None] + self.token, 0)
        self.beside_bytes = 0
        self._sequences, _ = np.nonzero(self.is_real)  # of each token, without pads
        self._shared: dict[object, object] = {}

    def shared(self, key: object, make: Callable[[], _T]) -> _T:
        """What several layers need alike, made once for each key."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]  # type: ignore[return-value]

    def real(self, columns: Tensor) -> Tensor:
        """The entries of ``[B, H, L, D]`` that belong to tokens, ``[N, H, D]``."""
        by_token = columns.transpose(1, 2)
        if not self.has_pads:
            return by_token.flatten(0, 1)
        return by_token[torch.from_numpy(self.is_real).to(columns.device)]

    def on(self, device: torch.device) -> Tokens:
        """The tokens one by one."""
        return self.shared(("tokens", device), lambda: self._on(device))

    def _on(self, device: torch.device) -> Tokens:
        sequences = self._sequences
        positions = self.position_ids[self.is_real]
        arrays = (sequences, self.slots[sequences], positions)
        return Tokens(*(torch.from_numpy(array).to(device) for array in arrays))

    def rows(self, before: np.ndarray, device: torch.device) -> Tensor:
        """Row of each token, ``[N]``, in slabs that hold so many rows before them, ``[B]``."""
        rows = before[self._sequences] + self.token[self.is_real]
        return torch.from_numpy(rows).to(device)

    def newest(self, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """The newest tokens that a ring of queries takes, and where.

        Returns:
            Sequence, column, slot and place in the ring of each, ``[M]``.
        """
        return self.shared(("newest", size, device), lambda: self._newest(size, device))

    def _newest(self, size: int, device: torch.device) -> tuple[Tensor, ...]:
        recent = self.is_real & (self.token >= self.lengths[:, None] - size)
        sequences, columns = np.nonzero(recent)
        place = self.position_ids[recent] % size
        arrays = (sequences, columns, self.slots[sequences], place)
        return tuple(torch.from_numpy(array).to(device) for array in arrays)
