"""Newest rows that are exact beside integers, against loops over rows and queries."""

import itertools
from collections import defaultdict

import attrs
import integer_reference
import pytest
import slab_reference as reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import seeds
from torch import Tensor

from kvpolicy.attention.softmax import PLAIN
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import UNLIMITED, LayerShape, Slab, Staging
from kvpolicy.model.attention import attend

HEADS, GROUP, DIM = 2, 2, 8
SHAPE = LayerShape(HEADS * GROUP, HEADS, DIM, torch.float32, torch.device("cpu"))
SLAB = Slab(16, tracks=("attn_sums",), key_bits=4, value_bits=4)
WINDOW = 7

LAYOUTS = {
    "even": (SHAPE, SLAB),
    "ragged": (SHAPE, attrs.evolve(SLAB, ragged=True)),
    "staged": (SHAPE, attrs.evolve(SLAB, capacity=6, staging=Staging(10, 2))),
    "prompt kept": (SHAPE, attrs.evolve(SLAB, room=UNLIMITED)),
    "window": (attrs.evolve(SHAPE, sliding_window=WINDOW), attrs.evolve(SLAB, capacity=6)),
    "a whole window": (attrs.evolve(SHAPE, sliding_window=WINDOW), attrs.evolve(SLAB, capacity=7)),
}
SIDES = [(4, 4), (8, 4), (4, 0)]


@attrs.define(eq=False)
class Row:
    """A row of a head, as it was stored."""

    position: int
    key: list[float]
    value: list[float]
    received: float = 0.0

    def read(self, query: int, exact: int, bits: tuple[int, int]) -> tuple[list[float], ...]:
        """Key and value as a query at some position reads them."""
        return tuple(
            row if not own or (own == 4 and self.position > query - exact) else rounded(row, own)
            for row, own in zip((self.key, self.value), bits, strict=True)
        )


def rounded(row: list[float], bits: int) -> list[float]:
    return integer_reference.numbers(integer_reference.stored(row, bits), len(row), bits)


class Loops:
    """Some slots, as lists of the rows of each head, which queries attend to one after another."""

    def __init__(self, exact: int, bits: tuple[int, int], window: int | None) -> None:
        self.exact, self.bits, self.window = exact, bits, window
        self.heads: dict[tuple[int, int], list[Row]] = defaultdict(list)
        self.seq_len: dict[int, int] = defaultdict(int)

    def attend(self, slot: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from new tokens, ``[H_q, L, D]``, one after another."""
        output = torch.zeros(queries.shape)
        for token in range(queries.shape[1]):
            position = self.seq_len[slot]
            for head in range(HEADS):
                rows = self.heads[slot, head]
                rows.append(Row(position, keys[head, token].tolist(), values[head, token].tolist()))
                read = [row.read(position, self.exact, self.bits) for row in rows]
                oldest = -1 if self.window is None else position - self.window
                seen = [row.position > oldest for row in rows]
                for q in range(head * GROUP, (head + 1) * GROUP):
                    query = queries[q, token].tolist()
                    found, weights, _ = reference.attention(
                        query, *zip(*read, strict=True), seen, DIM**-0.5
                    )
                    output[q, token] = torch.tensor(found)
                    for row, weight in zip(rows, weights, strict=True):
                        row.received += weight
            self.seq_len[slot] += 1
        return output

    def keep(self, slot: int, keep: Tensor, values: Tensor | None) -> None:
        """Keep rows ``[H_kv, K]``; their values become others."""
        for head in range(HEADS):
            kept = [self.heads[slot, head][index] for index in keep[head].tolist()]
            self.heads[slot, head] = kept
            for row, value in zip(kept, () if values is None else values[head], strict=False):
                row.value = value.tolist()


def new_cache(kind: str, exact: int, bits: tuple[int, int]) -> KVCache:
    shape, slab = LAYOUTS[kind]
    slab = attrs.evolve(slab, exact=exact, key_bits=bits[0], value_bits=bits[1])
    cache = KVCache([shape], [slab], 2)
    cache.num_prompt[:] = 99  # prompts go on, so that there may be rows beside slabs
    cache.prompt_len[:] = 2 if kind == "prompt kept" else 0
    return cache


def forward(cache: KVCache, lengths: dict[int, int], *new: Tensor) -> Tensor:
    """Attention of new tokens, padded on the left, ``[B, H, L, D]`` each."""
    step = EagerStep(cache, list(lengths), list(lengths.values()))
    queries, keys, values = new
    output = attend(step, 0, queries, *step.store(0, keys, values), DIM**-0.5, PLAIN)
    step.commit()
    return output


def compact(cache: KVCache, loops: Loops, slot: int, num: int, rng: torch.Generator) -> None:
    """Keep some of the rows of a slot, whose values become twice as large now and then."""
    rows, prompt = LayerRows(cache, 0, [slot]), int(cache.prompt_rows[0, slot])
    drawn = torch.rand(1, HEADS, rows.num_rows, generator=rng)
    keep = drawn.topk(num, dim=2).indices.sort(dim=2).values
    values = None
    if torch.rand(1, generator=rng) < 0.5:
        values = 2 * rows.values.gather(2, keep[..., None].expand(-1, -1, -1, DIM))
    rows.budget = num
    rows.keep(keep, values=values)
    staying = torch.arange(prompt).expand(HEADS, -1)
    old = [loops.heads[slot, head][:prompt] for head in range(HEADS)]
    of_prompt = torch.tensor([[row.value for row in one] for one in old]).view(HEADS, -1, DIM)
    every = None if values is None else torch.cat([of_prompt, values[0]], dim=1)
    loops.keep(slot, torch.cat([staying, keep[0] + prompt], dim=1), every)


def assert_seen_alike(cache: KVCache, loops: Loops, slot: int) -> None:
    """What a policy sees of the rows of a slot is what its newest query has read."""
    rows, newest = LayerRows(cache, 0, [slot]), loops.seq_len[slot] - 1
    before = int(cache.prompt_rows[0, slot])
    for head in range(HEADS):
        wanted = loops.heads[slot, head][before:]
        read = [row.read(newest, loops.exact, loops.bits) for row in wanted]
        assert rows.positions[0, head].tolist() == [row.position for row in wanted]
        for found, side in ((rows.keys, 0), (rows.values, 1)):
            numbers = torch.tensor([one[side] for one in read]).view(-1, DIM)
            torch.testing.assert_close(found[0, head], numbers, rtol=1e-5, atol=1e-6)
        received = torch.tensor([row.received for row in wanted])
        torch.testing.assert_close(rows.track("attn_sums")[0, head], received, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", LAYOUTS)
@example([(0, 4), (3, 3)], 1, (4, 4), 0)  # prompts with different numbers of rows beside slabs
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=8),
    st.integers(1, 9),
    st.sampled_from(SIDES),
    seeds,
)
def test_forwards_read_rows_as_loops_do(kind, steps, exact, bits, seed) -> None:
    cache, rng = new_cache(kind, exact, bits), torch.Generator().manual_seed(seed)
    loops = Loops(exact, bits, LAYOUTS[kind][0].sliding_window)
    for step in steps:
        lengths = {slot: num for slot, num in enumerate(step) if num}
        for slot in lengths if "window" not in kind else ():
            if cache.num_free_rows([slot])[0] < lengths[slot]:
                compact(cache, loops, slot, 3, rng)
        room = dict(zip(lengths, cache.num_free_rows(list(lengths)), strict=True))
        lengths = {slot: int(min(num, room[slot])) for slot, num in lengths.items() if room[slot]}
        if not lengths:
            continue
        size = len(lengths), max(lengths.values()), DIM
        new = [
            torch.randn(size[0], heads, *size[1:], generator=rng)
            for heads in (HEADS * GROUP, HEADS, HEADS)
        ]
        output = forward(cache, lengths, *new)
        for number, (slot, num) in enumerate(lengths.items()):
            wanted = loops.attend(slot, *(one[number, :, -num:] for one in new))
            torch.testing.assert_close(output[number, :, -num:], wanted, rtol=0, atol=2e-5)
        for slot in lengths if "window" not in kind else ():
            assert_seen_alike(cache, loops, slot)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_forward_that_is_discarded_leaves_the_rings_as_they_were(kind: str) -> None:
    cache = new_cache(kind, 4, (4, 4))
    rng = torch.Generator().manual_seed(0)
    new = [torch.randn(1, heads, 5, DIM, generator=rng) for heads in (HEADS * GROUP, HEADS, HEADS)]
    forward(cache, {1: 5}, *new)
    before = [ring.clone() for ring in cache.layers[0].store.exact.values()]
    step = EagerStep(cache, [1], [1])
    step.store(0, new[1][:, :, :1] + 1, new[2][:, :, :1] + 1)
    step.discard()
    pairs = zip(before, cache.layers[0].store.exact.values(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_rings_move_and_end_with_their_slots() -> None:
    cache = new_cache("even", 3, (4, 4))
    rng = torch.Generator().manual_seed(0)
    new = [torch.randn(1, heads, 5, DIM, generator=rng) for heads in (HEADS * GROUP, HEADS, HEADS)]
    forward(cache, {0: 5}, *new)
    held = LayerRows(cache, 0, [0]).keys.clone()
    assert torch.equal(held[0, :, 2:], new[1][0, :, 2:])
    cache.move(0, 1)
    assert torch.equal(LayerRows(cache, 0, [1]).keys, held)
    assert not any(ring[0].any() for ring in cache.layers[0].store.exact.values())
    cache.swap(0, 1)
    cache.grow([attrs.evolve(cache.layers[0].slab, capacity=30)])
    assert torch.equal(LayerRows(cache, 0, [0]).keys, held)
    assert not cache.can_take_back


def test_only_what_has_four_bits_is_kept_exactly() -> None:
    for bits in itertools.product((0, 8, 4), repeat=2):
        store = new_cache("even", 3, bits).layers[0].store
        assert list(store.exact) == [
            name for name, own in zip(("keys", "values"), bits, strict=True) if own == 4
        ]
