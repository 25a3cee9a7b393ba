"""Where the bytes of keys and values are, and in which form.

Layouts say which row is whose; they move rows as they are stored, and never look into one. Rows
take another form on two ways only: `RowStore.encode` when a forward or a policy writes them, and
`RowStore.decode` when attention or a policy reads them. A store in fewer bits overrides these and
`RowStore.allocate`, and serves every layout.
"""

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from kvpolicy.cache.shape import LayerShape


class RowStore:
    """Keys and values of the slots of some layers, in the model's precision.

    Attributes:
        keys: What is stored of keys: tensors ``[N, H_kv, R, ...]`` of ``N`` slots of ``R`` rows,
            one or several. All of a row lies in the same place of each.
        values: What is stored of values, likewise.
    """

    # Whether what is stored is what is read, so that kernels may read the tensors themselves.
    is_plain = True

    def __init__(self, shape: LayerShape, keys: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        self.shape = shape
        self.keys, self.values = tuple(keys), tuple(values)

    @classmethod
    def allocate(cls, shape: LayerShape, num_slots: int, capacity: int) -> Self:
        """Empty rows of some slots; all bytes are 0."""
        size = (num_slots, shape.num_kv_heads, capacity, shape.head_dim)
        return cls(shape, [shape.zeros(*size)], [shape.zeros(*size)])

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        """What is stored of keys or values ``[..., D]``: one tensor for each of `keys`."""
        return (rows.to(self.shape.dtype),)

    def decode(self, stored: Sequence[Tensor]) -> Tensor:
        """Keys or values ``[..., D]``, in the model's precision, from what is stored of them."""
        return stored[0]

    @property
    def tensors(self) -> list[Tensor]:
        """All that is stored."""
        return [*self.keys, *self.values]

    def of_slots(self, slots: slice) -> Self:
        """The rows of some of its slots, in the same memory."""
        keys, values = ([one[slots] for one in side] for side in (self.keys, self.values))
        return type(self)(self.shape, keys, values)
