"""Evictions of blocks in a prefix store, which holds blocks back, and what a choice costs."""

from collections.abc import Callable, Iterator, Set
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.guard.bases import LRB, LRU, BlindOracle
from kvpolicy_plugins.guard.eviction import Guard
from kvpolicy_plugins.guard.predictors import Given
from kvpolicy_plugins.guard.simulation import simulate
from kvpolicy_plugins.guard.slots import Slots, SlotSet
from pages import blocks_of

from kvpolicy import Block, installed_block_evictions, load_block_eviction

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "guard.md"
NAMES = [info.name for info in installed_block_evictions()]
seeds = st.integers(0, 2**20)


def test_the_evictions_that_are_tested_here_are_all_that_are_ours() -> None:
    ours = {"lru", "marker", "lmarker", "predictive_marker", "blind_oracle", "guard"}
    assert ours <= set(NAMES)


# The prefix store of the how-to


@pytest.fixture(scope="module")
def prefix_store() -> Callable[..., Any]:
    """The class that the page shows."""
    names: dict[str, Any] = {"__name__": "prefix_store"}
    (block,) = (one for one in blocks_of(HOW_TO) if "class PrefixStore" in one.text)
    exec(compile(block.text, str(HOW_TO), "exec"), names)
    return names["PrefixStore"]


@attrs.define
class Checking:
    """An eviction that is told and asked by a store: checks the store, and what is chosen.

    Blocks are prefixes, so that what a block continues can be read from its name.
    """

    capacity: int
    inner: Any
    stored: set[tuple[int, ...]] = attrs.field(factory=set)
    requests: list[tuple[int, ...]] = attrs.field(factory=list)
    victims: list[tuple[int, ...]] = attrs.field(factory=list)
    in_use: list[list[tuple[int, ...]]] = attrs.field(factory=list)

    def hit(self, block: tuple[int, ...]) -> None:
        assert block in self.stored
        self.requests.append(block)
        self.inner.hit(block)

    def insert(self, block: tuple[int, ...]) -> None:
        self.stored.add(block)
        self.requests.append(block)
        assert len(self.stored) <= self.capacity
        assert block[:-1] == () or block[:-1] in self.stored
        self.inner.insert(block)

    def choose(self, wanted: tuple[int, ...], evictable: Set[Any]) -> tuple[int, ...]:
        assert len(self.stored) == self.capacity
        continued = {one[:-1] for one in self.stored}
        pinned = {block for blocks in self.in_use for block in blocks}
        pinned |= {wanted[:end] for end in range(1, len(wanted))}
        assert set(evictable) == self.stored - continued - pinned
        victim = self.inner.choose(wanted, evictable)
        assert victim in evictable
        self.victims.append(victim)
        return victim

    def evict(self, block: tuple[int, ...]) -> None:
        self.stored.remove(block)
        self.inner.evict(block)


def checking(name: str, capacity: int, seed: int) -> Checking:
    return Checking(capacity, load_block_eviction(name, capacity=capacity, rng=Random(seed)))


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
steps = st.lists(st.tuples(prompts, st.booleans()), max_size=25)


@pytest.mark.parametrize("name", NAMES)
@given(steps=steps, capacity=st.integers(1, 8), seed=seeds)
def test_only_leaves_out_of_use_leave_a_prefix_store_and_the_seed_decides_which(
    prefix_store: Callable[..., Any],
    name: str,
    steps: list[tuple[tuple[int, ...], bool]],
    capacity: int,
    seed: int,
) -> None:
    runs = []
    for _ in range(2):
        eviction = checking(name, capacity, seed)
        store = prefix_store(capacity=capacity, block_size=1, eviction=eviction)
        for prompt, finishes_first in steps:
            if finishes_first and eviction.in_use:
                store.finish(eviction.in_use.pop(0))
            asked = len(eviction.requests)
            before = set(eviction.stored)
            num_hits, blocks = store.begin(prompt)
            prefixes = [prompt[:end] for end in range(1, len(prompt) + 1)]
            assert num_hits == sum(prefix in before for prefix in prefixes)
            # Each block in the order of the prefix, until one finds no room.
            assert eviction.requests[asked:] == blocks == prefixes[: len(blocks)]
            assert len(blocks) == len(prompt) or len(eviction.stored) == capacity
            eviction.in_use.append(blocks)
        runs.append(eviction.victims)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("name", NAMES)
@given(
    trace=st.lists(st.integers(0, 9), min_size=1, max_size=80),
    capacity=st.integers(1, 8),
    seed=seeds,
)
def test_a_prefix_store_of_single_blocks_misses_as_the_simulation_does(
    prefix_store: Callable[..., Any], name: str, trace: list[int], capacity: int, seed: int
) -> None:
    store = prefix_store(
        capacity=capacity,
        block_size=1,
        eviction=load_block_eviction(name, capacity=capacity, rng=Random(seed)),
    )
    hits = []
    for block in trace:
        num_hits, blocks = store.begin((block,))
        store.finish(blocks)
        assert blocks == [(block,)]
        hits.append(bool(num_hits))
    flat = load_block_eviction(name, capacity=capacity, rng=Random(seed))
    assert hits == list(simulate(trace, capacity, flat).hits)


# Choices where blocks are held back, by looking at every block


@given(data=st.data(), seed=seeds)
def test_the_ranking_equals_a_search_of_all_blocks(data: st.DataObject, seed: int) -> None:
    """Whatever may leave, and whatever is protected."""
    values = data.draw(st.lists(st.integers(0, 3), min_size=60, max_size=60))
    eviction = BlindOracle(predictor=Given(values), capacity=6, rng=Random(0))
    lru = LRU(capacity=6, rng=Random(0))
    rng, places = Random(seed), dict[int, int]()
    protected, newest = set[int](), dict[int, int]()
    for now, value in enumerate(values):
        block = rng.randrange(9)
        if rng.random() < 0.2:
            eviction.unprotect_all()
            protected.clear()
        if block in places:
            eviction.hit(block)
            lru.hit(block)
        else:
            if len(places) == 6:
                evictable = set(rng.sample(sorted(places), rng.randint(1, 6)))
                allowed = evictable - protected or evictable
                best = min(allowed, key=lambda one: (-values[newest[one]], places[one]))
                assert eviction.choose(block, evictable) == best
                assert lru.choose(block, evictable) == min(evictable, key=newest.__getitem__)
                eviction.evict(best)
                lru.evict(best)
                del places[best]
                protected.discard(best)
            places[block] = min(set(range(6)) - set(places.values()))
            eviction.insert(block)
            lru.insert(block)
        newest[block] = now
        assert values[now] == value
        if rng.random() < 0.3:
            eviction.protect(block)
            protected.add(block)


def test_protected_blocks_leave_last_where_few_may_leave() -> None:
    eviction = BlindOracle(predictor=Given(range(9, -1, -1)), capacity=10, rng=Random(0))
    for block in range(10):
        eviction.insert(block)
    assert eviction.choose(10, {8, 9}) == 8
    eviction.protect(8)
    assert eviction.choose(10, {8, 9}) == 9
    eviction.protect(9)
    assert eviction.choose(10, {8, 9}) == 8


def test_labels_are_followed_among_what_is_not_protected() -> None:
    eviction = LRB(predictor=Given([1, 1, 0, 0, 0], gives_labels=True), capacity=4, rng=Random(0))
    for block in range(4):
        eviction.insert(block)
    everything = set(range(4))

    def victims(evictable: set[int]) -> set[Block]:
        return {eviction.choose(9, evictable) for _ in range(60)}

    assert victims(everything) == {0, 1}
    eviction.protect(0)
    assert victims(everything) == {1}
    assert victims({0, 2, 3}) == {2, 3}
    eviction.hit(1)  # now of label 0
    assert victims(everything) == {1, 2, 3}
    for block in (1, 2, 3):
        eviction.protect(block)
    assert victims(everything) == {0}
    assert victims({1, 2}) == {1, 2}
    eviction.unprotect_all()
    assert victims(everything) == {0}


@given(data=st.data(), seed=seeds)
def test_a_draw_is_one_from_the_list_in_slot_order(data: st.DataObject, seed: int) -> None:
    slots, rng = Slots(), Random(seed)
    members, chosen = SlotSet(slots), set[int]()
    for _ in range(data.draw(st.integers(1, 40))):
        block = rng.randrange(20)
        if block not in slots.stored():
            slots.insert(block)
        elif block in chosen and rng.random() < 0.5:
            members.remove(block)
            chosen.discard(block)
            if rng.random() < 0.5:
                slots.evict(block)
        else:
            members.add(block)
            chosen.add(block)
        if rng.random() < 0.1:
            chosen = slots.stored()
            members.fill()
        assert len(members) == len(chosen)
        drawn = members.draw(Random(seed), slots.stored())
        expected = Random(seed).choice(slots.sorted(chosen)) if chosen else None
        assert (drawn[0] if drawn else None) == expected


@pytest.mark.parametrize("num_evictable", [1, 5, 40])
def test_each_member_that_may_leave_is_drawn_as_often(num_evictable: int) -> None:
    slots, rng = Slots(), Random(3)
    for block in range(80):
        slots.insert(block)
    members = SlotSet(slots)
    members.fill(set(range(0, 80, 2)))
    evictable = set(range(0, 2 * num_evictable, 2)) | {1, 3}
    counts = dict.fromkeys(range(0, 2 * num_evictable, 2), 0)
    for _ in range(300 * num_evictable):
        drawn = members.draw(rng, evictable)
        assert drawn is not None
        counts[int(str(drawn[0]))] += 1
    assert all(200 < count < 400 for count in counts.values())
    assert members.draw(rng, {1, 3}) is None


# Cost


@attrs.define
class Counting(Set[Block]):
    """A set that counts how many of its elements are looked at."""

    inner: Set[Block]
    num_looks: int = 0

    def __contains__(self, block: object) -> bool:
        self.num_looks += 1
        return block in self.inner

    def __iter__(self) -> Iterator[Block]:
        for block in self.inner:
            self.num_looks += 1
            yield block

    def __len__(self) -> int:
        return len(self.inner)


@pytest.mark.parametrize("knobs", [{}, {"protection": False}, {"follow_if_guarded": True}], ids=str)
def test_guard_looks_at_one_block_for_each_miss_however_wrong_predictions_are(
    knobs: dict[str, Any],
) -> None:
    rng = Random(0)
    values = [rng.random() for _ in range(20_000)]
    eviction = Guard(predictor=Given(values), capacity=400, rng=rng, **knobs)
    assert looks_per_miss(eviction, 400, rng) == 1
    assert knobs.get("protection", True) is bool(eviction.num_guards > 1000)


@pytest.mark.parametrize("name", NAMES)
def test_a_choice_looks_at_one_block_where_all_may_leave(name: str) -> None:
    eviction = load_block_eviction(name, capacity=400, rng=Random(0))
    # The checked eviction looks once more, at the answer.
    assert looks_per_miss(eviction, 400, Random(1)) == 2


def looks_per_miss(eviction: Any, capacity: int, rng: Random) -> float:
    """Blocks looked at for each choice, in a store with requests for twice its blocks."""
    stored: dict[Block, None] = {}
    num_choices, num_looks = 0, 0
    for _ in range(20 * capacity):
        block = rng.randrange(2 * capacity)
        if block in stored:
            eviction.hit(block)
            continue
        if len(stored) == capacity:
            evictable = Counting(stored.keys())
            victim = eviction.choose(block, evictable)
            num_choices += 1
            num_looks += evictable.num_looks
            del stored[victim]
            eviction.evict(victim)
        stored[block] = None
        eviction.insert(block)
    return num_looks / num_choices


@pytest.mark.parametrize("name", ["lru", "blind_oracle"])
def test_a_choice_looks_at_few_blocks_where_few_may_leave(name: str) -> None:
    """The blocks that are held back are not walked past one by one."""
    knobs = {} if name == "lru" else {"predictor": "recency"}
    eviction = load_block_eviction(name, capacity=5000, rng=Random(0), **knobs).inner
    for block in range(5000):
        eviction.insert(block)
    evictable = Counting({4990, 4995, 4999})
    assert eviction.choose(5000, evictable) == 4990
    assert evictable.num_looks <= 7
