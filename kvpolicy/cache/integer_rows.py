"""Rows that are stored in integers of 8 or 4 bits, for every layout."""

from typing import Self

import torch
from torch import Tensor

from kvpolicy.attention.integers import bytes_of_row, dequantize, quantize
from kvpolicy.cache.shape import LayerShape
from kvpolicy.cache.store import StoredRows


class Int8Rows(StoredRows):
    """Keys, or values, as bytes ``[N, H_kv, R, bytes]``, see `kvpolicy.attention.integers`."""

    bits = 8

    @classmethod
    def allocate(cls, shape: LayerShape, num_slots: int, capacity: int, dim: int) -> Self:
        """Empty rows of some slots."""
        size = (num_slots, shape.num_kv_heads, capacity, bytes_of_row(dim, cls.bits))
        return cls(shape, torch.zeros(size, dtype=torch.uint8, device=shape.device), dim)

    def encode(self, rows: Tensor) -> Tensor:
        """The bytes of rows."""
        return quantize(rows.to(self.shape.dtype), self.bits)

    def decode(self, stored: Tensor) -> Tensor:
        """What the bytes of rows stand for, a copy."""
        return dequantize(stored, self.dim, self.bits, self.shape.dtype)


class Int4Rows(Int8Rows):
    """The same with 4 bits."""

    bits = 4
