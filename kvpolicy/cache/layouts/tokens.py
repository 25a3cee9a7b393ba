"""The new tokens of one forward, in columns.

A forward serves some slots. Each has some new tokens; if the numbers differ, token columns are
padded on the left, so that the last column is always the newest token. Pads are computed and
dropped: they are never stored or attended to.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.arena import index_on, slot_index
from kvpolicy.devices import upload

_T = TypeVar("_T")


@attrs.frozen(eq=False)
class Tokens:
    """The new tokens of a forward one by one, without pads, on a device.

    Attributes:
        sequences: Which sequence of the forward each token belongs to, ``[N]``.
        columns: Its column, ``[N]``.
        slots: Its slot, ``[N]``.
        positions: Its position in its sequence, ``[N]``.
    """

    sequences: Tensor
    columns: Tensor
    slots: Tensor
    positions: Tensor


class NewTokens:
    """The new tokens of a forward.

    Attributes:
        slots: Slots of the forward, ``[B]``.
        served: Index of these slots, for arrays; see `served_on`.
        lengths: New tokens of each slot, ``[B]``.
        seq_len: Tokens seen by each slot before, ``[B]``.
        width: Token columns, ``L``.
        token: Number of each column's token among the new ones of its slot, ``[B, L]``; negative
            for pads.
        is_real: Which columns are no pads, bool ``[B, L]``.
        has_pads: Whether some column is a pad.
        sequences: Which sequence each token belongs to, ``[N]``, without pads.
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
        self.sequences, self._columns = np.nonzero(self.is_real)
        self._shared: dict[object, object] = {}
        self._of_positions: list[tuple[Tensor, Callable[[], np.ndarray]]] = []

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
        ones = self.on(columns.device)
        return by_token[ones.sequences, ones.columns]

    def on(self, device: torch.device) -> Tokens:
        """The tokens one by one."""
        key = "tokens", device
        return self.shared(key, lambda: Tokens(*self._of_their_positions(self._ones, device)))

    def _ones(self) -> np.ndarray:
        positions = self.position_ids[self.is_real]
        return np.stack([self.sequences, self._columns, self.slots[self.sequences], positions])

    def served_on(self, device: torch.device) -> slice | Tensor:
        """Index of the slots, for tensors of a device."""
        return self.shared(("served", device), lambda: index_on(device, self.slots))

    def slots_on(self, device: torch.device) -> Tensor:
        """The slots, on a device."""
        return self.shared(("slots", device), lambda: upload(self.slots, device))

    def positions_on(self, device: torch.device) -> Tensor:
        """Position of every column's token in its sequence, ``[B, 1, L]``, 0 for pads."""
        key = "positions", device
        return self.shared(
            key, lambda: self._of_their_positions(lambda: self.position_ids[:, None], device)
        )

    def rows(self, before: np.ndarray) -> np.ndarray:
        """Row of each token, ``[N]``, in slabs that hold so many rows before them, ``[B]``."""
        rows: np.ndarray = before[self.sequences] + self.token[self.is_real]
        return rows

    def newest(self, size: int, device: torch.device) -> tuple[Tensor, ...]:
        """The newest tokens that a ring of queries takes, and where.

        Returns:
            Sequence, column, slot and place in the ring of each, ``[M]``.
        """
        key = "newest", size, device
        newest = partial(self._newest, size)
        return self.shared(key, lambda: tuple(self._of_their_positions(newest, device)))

    def _newest(self, size: int) -> np.ndarray:
        recent = self.is_real & (self.token >= self.lengths[:, None] - size)
        sequences, columns = np.nonzero(recent)
        place = self.position_ids[recent] % size
        return np.stack([sequences, columns, self.slots[sequences], place])

    def _of_their_positions(self, make: Callable[[], np.ndarray], device: torch.device) -> Tensor:
        """Numbers that follow from positions, on a device."""
        tensor = upload(make(), device)
        self._of_positions.append((tensor, make))
        return tensor

    def move_on(self, seq_len: np.ndarray) -> None:
        """Become as many tokens of the same slots that have seen others: positions change only.

        Tensors stay where they are, so that what was captured with them goes on reading them.
        """
        self.position_ids += np.where(self.is_real, (seq_len - self.seq_len)[:, None], 0)
        self.seq_len = seq_len
        for tensor, make in self._of_positions:
            tensor.copy_(upload(make(), tensor.device))
