"""New rows of a forward are written where a loop over tokens writes them."""

import numpy as np
import pytest
import torch

from kvpolicy.cache.layouts.places import new_places
from kvpolicy.cache.layouts.tokens import NewTokens

CPU = torch.device("cpu")
FIRST, END = 3, 7  # of the rows that an area holds


def written(
    slots: list[int],
    lengths: list[int],
    before: list[int],
    new: torch.Tensor | int,
    first: int,
    end: int | None,
) -> torch.Tensor:
    """A slab after new rows of each token, ``[B, H, L, D]``, were written one by one."""
    slab = torch.full((8, 2, 20, 3), -1.0)
    for place, (slot, length, held) in enumerate(zip(slots, lengths, before, strict=True)):
        for token in range(length):
            row = held + token
            if row >= first and (end is None or row < end):
                column = max(lengths) - length + token
                slab[slot, :, row - first] = new if isinstance(new, int) else new[place, :, column]
    return slab


@pytest.mark.parametrize(
    ("slots", "lengths", "before"),
    [
        ([2], [5], [1]),  # in a block
        ([2], [4], [3]),  # all of them in the area
        ([0], [2], [7]),  # behind it
        ([1, 3, 5], [4, 4, 4], [2, 2, 2]),
        ([4, 1], [4, 4], [2, 2]),  # not in equal steps
        ([1, 2], [4, 4], [2, 5]),  # behind unequally many
        ([1, 2, 3], [5, 1, 3], [2, 2, 2]),  # with pads
        ([0, 1], [3, 3], [8, 9]),
    ],
)
@pytest.mark.parametrize(("first", "end"), [(0, None), (0, END), (FIRST, END), (FIRST, None)])
def test_new_rows_are_where_a_loop_writes_them(
    slots: list[int], lengths: list[int], before: list[int], first: int, end: int | None
) -> None:
    tokens = NewTokens(slots, lengths, np.array(before))
    places = new_places(tokens, np.array(slots), np.array(before), CPU, first, end)
    new = torch.randn(len(slots), 2, max(lengths), 3, generator=torch.Generator().manual_seed(0))
    expected = written(slots, lengths, before, new, first, end)
    slab = torch.full_like(expected, -1.0)
    places.put(slab, new)
    assert torch.equal(slab, expected)
    slab = torch.full_like(expected, -1.0)
    places.put_each(slab, tokens.real(new))
    assert torch.equal(slab, expected)
    of_all_heads = new[:, :1]
    places.put(slab, of_all_heads)
    expected = written(slots, lengths, before, of_all_heads, first, end)
    assert torch.equal(slab, expected)
    places.put(slab, 9)
    assert torch.equal(slab, written(slots, lengths, before, 9, first, end))
