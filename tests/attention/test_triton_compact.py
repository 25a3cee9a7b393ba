"""Compaction in place in Triton against lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from triton_device import DEVICE

from kvpolicy.attention.triton_backend.compact import compact, drop_oldest

# Rows in integers are bytes, of an even number.
KINDS = st.tuples(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    st.sampled_from([None, 1, 5, 40, 128]),
) | st.tuples(st.just(torch.uint8), st.sampled_from([6, 68, 80]))


def a_slab(rng: torch.Generator, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.randn(size, generator=rng) * 100
    return (numbers.abs().clamp(max=255) if dtype == torch.uint8 else numbers).to(dtype)


@given(KINDS, st.integers(1, 200), st.integers(1, 3), st.booleans(), seeds, st.data())
def test_kept_rows_come_first_and_nothing_else_changes(
    kind, capacity, layers, by_slot, seed, data
) -> None:
    """Several layers are compacted by one call; heads may keep different numbers of rows."""
    dtype, dim = kind
    rng = torch.Generator().manual_seed(seed)
    slots, heads = 3, 2
    size = (heads, capacity) if dim is None else (heads, capacity, dim)
    # Layers lie in another order than slots: the folded first axis is a view either way.
    stack = a_slab(rng, (slots, layers, *size) if by_slot else (layers, slots, *size), dtype)
    wanted = stack.clone().flatten(0, 1)
    entries = torch.randperm(layers * slots, generator=rng)[: data.draw(st.integers(1, 3))]
    absent = torch.rand(len(entries), generator=rng) < 0.2
    num_rows = torch.randint(1, capacity + 1, (len(entries), heads), generator=rng)
    most = data.draw(st.integers(1, capacity))
    num_kept = torch.minimum(num_rows, torch.randint(1, most + 1, num_rows.shape, generator=rng))
    keep = torch.full((len(entries), heads, most), 10**9)  # what does not count is not read
    fill = -1 if dtype == torch.int64 else 0
    for b, entry in enumerate(entries.tolist()):
        for head in range(heads):
            num, kept = int(num_rows[b, head]), int(num_kept[b, head])
            newest = data.draw(st.booleans())  # a shift is the hardest case
            chosen = torch.arange(num)[-kept:] if newest else torch.randperm(num, generator=rng)
            chosen = chosen[:kept].sort().values
            keep[b, head, :kept] = chosen
            if not absent[b]:
                before = [row.clone() for row in wanted[entry, head]]
                for row in range(num):
                    into = before[int(chosen[row])] if row < kept else fill
                    wanted[entry, head, row] = into
    stack = stack.to(DEVICE)
    named = entries.masked_fill(absent, -1)
    arguments = (each.to(DEVICE) for each in (keep, named, num_kept, num_rows))
    compact(stack.flatten(0, 1), *arguments, fill=fill)
    assert torch.equal(stack.cpu().flatten(0, 1), wanted)


@given(KINDS, st.integers(1, 100), st.integers(0, 80), seeds)
def test_rows_before_those_of_an_entry_stay(kind, num, most_before, seed) -> None:
    """Each entry is compacted as if its slab began behind them."""
    dtype, dim = kind
    rng = torch.Generator().manual_seed(seed)
    entries, heads = 3, 2
    capacity = most_before + num + 3
    size = (entries, heads, capacity) if dim is None else (entries, heads, capacity, dim)
    slab = a_slab(rng, size, dtype)
    start = torch.randint(0, most_before + 1, (entries,), generator=rng)
    num_kept = int(torch.randint(1, num + 1, (), generator=rng))
    of_head = [torch.randperm(num, generator=rng)[:num_kept].sort().values for _ in range(heads)]
    keep = torch.stack(of_head).expand(entries, -1, -1)
    counts = torch.full((entries, heads), num_kept), torch.full((entries, heads), num)
    wanted = slab.clone()
    for entry, first in enumerate(start.tolist()):
        one = wanted[entry : entry + 1, :, first:].clone().to(DEVICE)
        kept, held = (count[:1].to(DEVICE) for count in counts)
        only = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        compact(one, keep[:1].to(DEVICE), only, kept, held, fill=-1)
        wanted[entry, :, first:] = one[0].cpu()
    slab = slab.to(DEVICE)
    arguments = (each.to(DEVICE) for each in (keep, torch.arange(entries), *counts))
    compact(slab, *arguments, fill=-1, start=start.to(DEVICE))
    assert torch.equal(slab.cpu(), wanted)


@given(KINDS, st.integers(1, 90), st.integers(1, 90), seeds, st.data())
def test_rows_beside_a_slab_are_moved_into_it(kind, capacity, more, seed, data) -> None:
    """Those of a staging area, which stays as it is; slots and lanes are in any order."""
    dtype, dim = kind
    rng = torch.Generator().manual_seed(seed)
    heads, held = 2, capacity + data.draw(st.integers(1, more))
    slab, beside = (
        a_slab(rng, (4, heads, rows) if dim is None else (4, heads, rows, dim), dtype)
        for rows in (capacity, more)
    )
    slots, lanes = (torch.randperm(4, generator=rng)[:3] for _ in range(2))
    num_kept = data.draw(st.integers(1, capacity))
    keep = torch.rand(3, heads, held, generator=rng).topk(num_kept).indices.sort().values
    wanted = slab.clone()
    for b, (slot, lane) in enumerate(zip(slots.tolist(), lanes.tolist(), strict=True)):
        for head in range(heads):
            rows = [*slab[slot, head], *beside[lane, head]]
            for row in range(capacity):
                into = rows[int(keep[b, head, row])] if row < num_kept else 0
                wanted[slot, head, row] = into
    slab, area = slab.to(DEVICE), beside.to(DEVICE)
    counts = torch.full((3, heads), num_kept), torch.full((3, heads), held)
    arguments = [one.to(DEVICE) for one in (keep, slots, *counts)]
    compact(slab, *arguments, beside=area, lanes=lanes.to(DEVICE))
    assert torch.equal(slab.cpu(), wanted)
    assert torch.equal(area.cpu(), beside)


@given(KINDS, st.integers(1, 200), seeds)
def test_full_slabs_of_live_slots_drop_their_first_row(kind, capacity, seed) -> None:
    dtype, dim = kind
    rng = torch.Generator().manual_seed(seed)
    size = (3, 2, capacity) if dim is None else (3, 2, capacity, dim)
    slab = a_slab(rng, size, dtype)
    rows = torch.where(torch.rand(3, 2, generator=rng) < 0.7, capacity, capacity - 1)
    live = torch.rand(3, generator=rng) < 0.7
    wanted, empty = slab.clone(), 0 if dtype == torch.uint8 else -1
    for slot in range(3):
        for head in range(2):
            if live[slot] and rows[slot, head] == capacity:
                remaining = [row.clone() for row in slab[slot, head]][1:]
                for row, content in enumerate([*remaining, empty]):
                    wanted[slot, head, row] = content
    slab = slab.to(DEVICE)
    drop_oldest(slab, rows.to(DEVICE), live.to(DEVICE), fill=empty)
    assert torch.equal(slab.cpu(), wanted)
