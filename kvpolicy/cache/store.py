"""Where the bytes of keys and values are, and in which form.

Layouts say which row is whose; they move rows as they are stored, and never look into one. Rows
take another form on two ways only: `StoredRows.encode` when a forward or a policy writes them, and
`StoredRows.decode` when attention or a policy reads them. A form in fewer bits overrides these and
`StoredRows.allocate`, and serves every layout.
"""

from collections.abc import Callable
from typing import Self

import attrs
from torch import Tensor

from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.features import feature


class StoredRows:
    """Keys, or values, of the slots of some layers, in the model's precision.

    Attributes:
        shape: Shape of each layer.
        slab: What is stored, ``[N, H_kv, R, ...]`` of ``N`` slots of ``R`` rows.
        dim: Size of a row, ``D``: that of keys, or of values.
        exact: Exact copies of the newest rows, ``[N, H_kv, E, D]``, see `kvpolicy.attention.exact`;
            ``None``: there are none.
        bits: Bits of a number; 0: as many as the model's precision has, and what is stored is what
            is read.
    """

    bits = 0

    def __init__(
        self, shape: LayerShape, slab: Tensor, dim: int, exact: Tensor | None = None
    ) -> None:
        self.shape, self.slab, self.dim, self.exact = shape, slab, dim, exact

    @classmethod
    def allocate(cls, shape: LayerShape, num_slots: int, capacity: int, dim: int) -> Self:
        """Empty rows of some slots, each of size ``dim``; all bytes are 0."""
        return cls(shape, shape.zeros(num_slots, shape.num_kv_heads, capacity, dim), dim)

    def encode(self, rows: Tensor) -> Tensor:
        """What is stored of rows ``[..., D]``."""
        return rows.to(self.shape.dtype)

    def decode(self, stored: Tensor) -> Tensor:
        """Rows ``[..., D]``, in the model's precision, from what is stored of them."""
        return stored

    def as_read(self, rows: Tensor) -> Tensor:
        """What rows ``[..., D]`` are once they are stored."""
        return self.decode(self.encode(rows))

    def read(self, read: Callable[[Tensor], Tensor]) -> Tensor:
        """Some of the rows, ``[..., D]``: those that a function takes of a slab."""
        return self.decode(read(self.slab))

    def of_slots(self, slots: slice) -> Self:
        """The rows of some of its slots, in the same memory."""
        exact = None if self.exact is None else self.exact[slots]
        return type(self)(self.shape, self.slab[slots], self.dim, exact)


@attrs.frozen(eq=False)
class RowStore:
    """Keys and values of the slots of some layers."""

    keys: StoredRows
    values: StoredRows

    @classmethod
    def allocate(cls, shape: LayerShape, slab: Slab, num_slots: int) -> Self:
        """Empty rows of some slots, in the form that is wanted of a slab."""
        sides = []
        for bits, dim in ((slab.key_bits, shape.head_dim), (slab.value_bits, shape.value_dim)):
            side = form_of(bits).allocate(shape, num_slots, slab.capacity, dim)
            if slab.exact and bits == 4:  # more bits are as good as exact ones
                side.exact = shape.zeros(num_slots, shape.num_kv_heads, slab.exact, dim)
            sides.append(side)
        return cls(*sides)

    @property
    def is_plain(self) -> bool:
        """Whether what is stored is what is read."""
        return not (self.keys.bits or self.values.bits)

    @property
    def slabs(self) -> list[Tensor]:
        """What is stored of every row."""
        return [self.keys.slab, self.values.slab]

    @property
    def exact(self) -> dict[str, Tensor]:
        """The exact copies of the newest keys or values, by name, as far as there are any."""
        sides = {"keys": self.keys.exact, "values": self.values.exact}
        return {name: ring for name, ring in sides.items() if ring is not None}

    def read(self, read: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values of some of the rows, see `StoredRows.read`."""
        return self.keys.read(read), self.values.read(read)

    def of_slots(self, slots: slice) -> Self:
        """The rows of some of its slots, in the same memory."""
        return type(self)(self.keys.of_slots(slots), self.values.of_slots(slots))


def form_of(bits: int) -> type[StoredRows]:
    """The form of rows whose numbers have so many bits; 0: those of the model's precision."""
    if not bits:
        return StoredRows
    form: type[StoredRows] = feature(
        "kvpolicy.cache.integer_rows", f"Int{bits}Rows", f'plans with rows = "int{bits}"'
    )
    return form
