"""Rows in segments against lists of rows: stored, kept by masks, moved, copied, grown, cleared.

A slot is moved to a free one, or exchanged with another that is taken.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds
from torch import Tensor

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab

BUDGET, BUFFER, DIM, NUM_LAYERS = 4, 3, 2, 2
CAPACITY = BUDGET + BUFFER


def new_cache(heads: int, slots: int, capacity: int = CAPACITY) -> KVCache:
    shape = LayerShape(heads, heads, DIM, torch.float32, torch.device("cpu"))
    slab = Slab(capacity, tracks=("mark",), ragged=True)
    return KVCache([shape] * NUM_LAYERS, [slab] * NUM_LAYERS, slots)


def number(layer: int, sequence: int, head: int, position: int) -> float:
    """A key that says whose row it is."""
    return float(((layer * 7 + sequence) * 11 + head) * 1000 + position)


class Sequences:
    """Rows as lists: ``rows[layer][head]`` are positions, of one sequence for each slot."""

    def __init__(self, cache: KVCache, heads: int) -> None:
        self.cache, self.heads = cache, heads
        self.rows: dict[int, list[list[list[int]]]] = {}
        self.names: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.num_admitted = 0

    def admit(self, slot: int) -> None:
        self.rows[slot] = [[[] for _ in range(self.heads)] for _ in range(NUM_LAYERS)]
        self.names[slot], self.seen[slot] = self.num_admitted, 0
        self.num_admitted += 1

    def store(self, slots: list[int], lengths: list[int]) -> None:
        """Store new tokens as a prefill does; checks the rows that attention gets."""
        step = EagerStep(self.cache, slots, lengths)
        for layer in range(NUM_LAYERS):
            new = torch.full((len(slots), self.heads, step.width, DIM), float("nan"))
            for b, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
                for head in range(self.heads):
                    for n in range(length):
                        position = self.seen[slot] + n
                        column = step.width - length + n
                        new[b, head, column] = number(layer, self.names[slot], head, position)
                        self.rows[slot][layer][head].append(position)
            keys, values = step.store(layer, new, -new)
            assert torch.equal(values, -keys)
            every = slice(0, step.width), slice(0, keys.shape[2])
            mask = step.layers[layer].visible.mask(*every)
            assert mask is not None
            for b, slot in enumerate(slots):
                for head in range(self.heads):
                    last = keys[b, head][mask[b, head, -1]][:, 0].tolist()
                    assert last == self.keys(slot, layer, head)
        step.commit()
        for slot, length in zip(slots, lengths, strict=True):
            self.seen[slot] += length

    def keys(self, slot: int, layer: int, head: int) -> list[float]:
        rows = self.rows[slot][layer][head]
        return [number(layer, self.names[slot], head, position) for position in rows]

    def check(self) -> None:
        for slot, layers in self.rows.items():
            for layer, heads in enumerate(layers):
                part = self.cache.layers[layer]
                arena = part.arena
                num_rows = int(self.cache.rows[layer, slot])
                found = [
                    part.held(slot, slab)
                    for slab in (arena.positions, arena.keys, arena.tracks["mark"])
                ]
                for head, positions in enumerate(heads):
                    assert found[0][head].tolist() == positions
                    assert found[1][head][:, 0].tolist() == self.keys(slot, layer, head)
                    assert len(found[2][head]) == len(positions)
                counts = list(map(len, heads))
                assert int(self.cache.fullest(layer, [slot])[0]) == max(counts)
                # All heads have equally many free rows, and they lie in the pool.
                assert part.bounds is not None
                free = part.slab.capacity - num_rows
                sizes = part.bounds[slot].diff().tolist()
                assert sizes == [count + free for count in counts]
                assert sum(sizes) <= self.heads * part.slab.capacity
                stored = int((part.positions[slot] >= 0).sum())
                assert stored == sum(counts)


def masks(draw: st.DrawFn, rows: LayerRows) -> Tensor:
    """Any valid mask: at least one row of each head, and no more than the budget of all."""
    assert rows.absent is not None
    present = ~rows.absent
    num, heads, num_rows = present.shape
    mask = torch.zeros(num, heads, num_rows, dtype=torch.bool)
    for b in range(num):
        mine = [present[b, head].nonzero()[:, 0].tolist() for head in range(heads)]
        chosen = {(head, draw(st.sampled_from(columns))) for head, columns in enumerate(mine)}
        others = [(head, row) for head, columns in enumerate(mine) for row in columns]
        order = draw(st.permutations(others))
        most = draw(st.integers(len(chosen), BUDGET * heads))
        for pair in order:
            if len(chosen) < most:
                chosen.add(pair)
        for head, row in chosen:
            mask[b, head, row] = True
    return mask


@given(st.data())
def test_rows_in_segments_are_those_of_lists(data: st.DataObject) -> None:
    draw = data.draw
    heads, slots = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    cache = new_cache(heads, slots)
    sequences = Sequences(cache, heads)
    for slot in range(slots):
        sequences.admit(slot)
    sequences.store(list(range(slots)), [CAPACITY] * slots)
    for _ in range(16):
        free = [slot for slot in range(slots) if slot not in sequences.rows]
        held = sorted(sequences.rows)
        can_store = [slot for slot in held if cache.num_free_rows([slot])[0] > 0]
        full = [
            (layer, slot)
            for slot in held
            for layer in range(NUM_LAYERS)
            if cache.rows[layer, slot] > BUDGET
        ]
        often = ["compact"] * bool(full) + ["store"] * bool(can_store) + ["admit"] * bool(free)
        seldom = ["clear", "grow", "mark"] * bool(held) + ["move"] * bool(free and held)
        seldom += ["swap"] * (len(held) > 1)
        action = draw(st.sampled_from(4 * often + seldom))
        if action == "admit":
            sequences.admit(free[0])
        elif action == "store":
            chosen = sorted(draw(st.sets(st.sampled_from(can_store), min_size=1)))
            room = cache.num_free_rows(chosen).tolist()
            sequences.store(chosen, [draw(st.integers(1, most)) for most in room])
        elif action == "compact":
            layer, slot = draw(st.sampled_from(full))
            rows = LayerRows(cache, [layer], [slot])
            rows.budget = BUDGET
            mask = masks(draw, rows)
            before = rows.positions[0].clone()
            rows.keep(mask)
            for head in range(heads):
                sequences.rows[slot][layer][head] = before[head][mask[0, head]].tolist()
        elif action == "clear":
            slot = draw(st.sampled_from(held))
            cache.clear(slot)
            del sequences.rows[slot]
        elif action == "move":
            slot = draw(st.sampled_from(held))
            cache.move(slot, free[0])
            for kept in (sequences.rows, sequences.names, sequences.seen):
                kept[free[0]] = kept.pop(slot)  # type: ignore[index]
        elif action == "swap":
            one, other = draw(st.permutations(held))[:2]
            cache.swap(one, other)
            for kept in (sequences.rows, sequences.names, sequences.seen):
                kept[one], kept[other] = kept[other], kept[one]  # type: ignore[index]
        elif action == "grow":
            more = int(cache.capacity[0]) + draw(st.integers(0, 3))
            cache.grow([Slab(more, tracks=("mark",), ragged=True)] * NUM_LAYERS)
        else:
            slot = draw(st.sampled_from(held))
            if cache.rows[0, slot]:
                rows = LayerRows(cache, 0, [slot])
                rows.set_track("mark", rows.positions.float() + 1)
                assert torch.equal(rows.track("mark"), rows.positions.float() + 1)
        sequences.check()


def filled(heads: int, counts: Any, seed: int) -> KVCache:
    """A cache of two slots, of which each head holds so many rows in layer 0."""
    cache, sequences = (built := new_cache(heads, 2)), Sequences(built, heads)
    for slot in (0, 1):
        sequences.admit(slot)
    sequences.store([0, 1], [CAPACITY] * 2)
    rows = LayerRows(cache, 0, [0, 1])
    rows.budget = BUDGET
    rng = torch.Generator().manual_seed(seed)
    mask = torch.zeros(2, heads, CAPACITY, dtype=torch.bool)
    for b in (0, 1):
        for head, count in enumerate(counts):
            mask[b, head, torch.randperm(CAPACITY, generator=rng)[:count]] = True
    rows.keep(mask)
    return cache


def test_the_rows_of_the_fullest_head_follow_their_slot() -> None:
    """The host learns how many a compaction has left when it needs to know."""
    for happens in ("nothing", "moves", "is exchanged", "is cleared"):
        cache, sequences = (built := new_cache(2, 3)), Sequences(built, 2)
        sequences.admit(0)
        sequences.store([0], [CAPACITY])
        rows = LayerRows(cache, 0, [0])
        rows.budget = BUDGET
        mask = torch.ones(1, 2, CAPACITY, dtype=torch.bool)
        mask[0, 1, 1:] = False
        rows.keep(mask)
        if happens == "moves":
            cache.move(0, 2)
        elif happens == "is exchanged":
            cache.swap(1, 0)
        elif happens == "is cleared":
            cache.clear(0)
        expected = {
            "nothing": [7, 0, 0],
            "moves": [0, 0, 7],
            "is exchanged": [0, 7, 0],
            "is cleared": [0, 0, 0],
        }
        assert cache.fullest(0, [0, 1, 2]).tolist() == expected[happens]


@given(seeds, st.integers(1, 5))
def test_a_larger_slab_has_the_rows_of_the_smaller_one(seed: int, by: int) -> None:
    cache = filled(3, (1, 7, 3), seed)
    cache.layers[0].tracks["mark"].copy_(cache.layers[0].positions)

    def held() -> list[Tensor]:
        layer = cache.layers[0]
        arena = layer.arena
        slabs = (*arena.store.slabs, arena.positions, *arena.tracks.values())
        return [rows for slab in slabs for rows in layer.held(1, slab)]

    before = [rows.clone() for rows in held()]
    cache.grow([Slab(CAPACITY + by, tracks=("mark",), ragged=True)] * NUM_LAYERS)
    assert cache.capacity.tolist() == [CAPACITY + by] * NUM_LAYERS
    assert all(torch.equal(one, other) for one, other in zip(before, held(), strict=True))
    assert sum(map(len, before[:3])) == 11


@given(seeds)
def test_rows_are_aligned_on_the_right(seed: int) -> None:
    rows = LayerRows(filled(3, (1, 7, 3), seed), 0, [0, 1])
    assert rows.num_rows == 7
    assert rows.absent is not None
    assert (~rows.absent).sum(dim=2).tolist() == [[1, 7, 3]] * 2
    assert not rows.absent[:, :, -1].any()
    assert (rows.positions == -1).equal(rows.absent)
    for tensor in (rows.keys, rows.values):
        assert not tensor[rows.absent].any()
        assert tensor[~rows.absent].abs().min() >= 0
    assert (rows.positions.diff(dim=2)[:, :, :-1] >= 0).all()


@pytest.mark.parametrize("wrong", ["too many", "none of a head"])
@given(seed=seeds)
def test_a_mask_that_does_not_fit_reaches_no_other_slot(wrong: str, seed: int) -> None:
    cache = filled(3, (2, 7, 3), seed)
    other = [tensor[1].clone() for tensor in cache.layers[0].tensors]
    rows = LayerRows(cache, 0, [0])
    rows.budget = BUDGET - 1
    mask = torch.ones(1, 3, 7, dtype=torch.bool)
    if wrong != "too many":
        mask[:, :, :-1] = mask[:, 0] = False
    rows.keep(mask)  # what is wrong is found later, and ends the sequence
    bounds = cache.layers[0].bounds
    assert bounds is not None
    assert bounds[0, -1] <= 3 * CAPACITY
    assert all(
        torch.equal(before, now[1])
        for before, now in zip(other, cache.layers[0].tensors, strict=True)
    )


@given(seeds, st.booleans())
def test_replaced_keys_go_where_their_rows_are(seed: int, by_mask: bool) -> None:
    cache = filled(2, (3, 5), seed)
    rows = LayerRows(cache, 0, [0, 1])
    rows.budget = BUDGET
    positions = rows.positions
    if by_mask:
        keep = rows.positions >= positions.amax(dim=2, keepdim=True) - 2
        keep[:, 1] = positions[:, 1] >= 0
        new = positions[..., None].expand(-1, -1, -1, DIM).float() * 10
    else:
        keep = torch.tensor([[[3, 4], [1, 4]]] * 2)
        new = positions.gather(2, keep)[..., None].expand(-1, -1, -1, DIM).float() * 10
    rows.keep(keep, keys=new)
    after = LayerRows(cache, 0, [0, 1])
    present = after.positions >= 0
    assert torch.equal(after.keys[present][:, 0], after.positions[present].float() * 10)
    assert (after.values[present] <= 0).all()  # those of the rows


def test_weights_of_rows_that_a_head_has_not_are_zero() -> None:
    shape = LayerShape(4, 2, DIM, torch.float32, torch.device("cpu"))
    cache = KVCache([shape], [Slab(CAPACITY, window_size=2, ragged=True)], 1)
    step = EagerStep(cache, [0], [CAPACITY])
    new = torch.randn(1, 2, CAPACITY, DIM, generator=torch.Generator().manual_seed(0))
    step.store(0, new, new)
    step.layers[0].remember(new.repeat_interleave(2, dim=1))
    step.commit()
    rows = LayerRows(cache, 0, [0])
    rows.budget = BUDGET
    mask = torch.ones(1, 2, CAPACITY, dtype=torch.bool)
    mask[0, 0, :-1] = False
    rows.keep(mask)
    weights = rows.attn_weights
    assert not weights[:, :2, :, :-1].any()
    torch.testing.assert_close(weights[:, 2:].sum(dim=3), torch.ones(1, 2, 2))
    assert weights[:, :2, -1, -1].eq(1).all()  # the newest query sees its own row only


def test_other_layers_have_no_table() -> None:
    shape = LayerShape(2, 2, DIM, torch.float32, torch.device("cpu"))
    own, shared = (KVCache([shape], [Slab(9, ragged=one)], 3) for one in (False, True))
    assert own.layers[0].bounds is None
    assert shared.num_bytes == own.num_bytes + 3 * (2 + 1) * 8
    assert LayerRows(own, 0, [0]).absent is None
    assert np.array_equal(shared.fullest(0, [0, 1]), [0, 0])
