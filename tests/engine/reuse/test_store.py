"""A prefix store is bounded, and an eviction chosen by name decides what leaves."""

import gc
import logging
import threading
from array import array
from collections.abc import Hashable, Set
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import BLOCK_BYTES, PLANS, asked, assert_same, llama, random_prompts
from strategies import costly

from kvpolicy import Engine, Plan, PrefixStore, load_block_eviction
from kvpolicy.block_eviction import CheckedBlockEviction
from kvpolicy.engine.reuse import tier
from kvpolicy.engine.reuse.nodes import Node
from kvpolicy.engine.reuse.tier import EvictionChoice, Tier
from kvpolicy.errors import KnobError, KVPolicyError, UnknownPolicyError

EVICTIONS = ("lru", "marker", "guard", "predictive_marker")


class Watched(PrefixStore):
    """A store that tells which of the blocks that it was given it still has."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.added: dict[bytes, Node] = {}

    def add(self, *arguments: Any, **options: Any) -> Node | None:
        node = super().add(*arguments, **options)
        if node is not None:
            self.added[node.key] = node
        return node

    @property
    def held(self) -> list[Node]:
        return [node for key, node in self.added.items() if self.has(key)]


@costly
@given(
    st.sampled_from(list(PLANS)),
    st.sampled_from(EVICTIONS),
    st.integers(0, 60_000),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_it_is_never_over_capacity_and_answers_are_those_without_it(
    plan: str, eviction: str, capacity: int, seed: int, conversations: bool
) -> None:
    store = Watched(
        capacity + 1, block_tokens=4, eviction=eviction, conversations=conversations, seed=seed
    )
    engine = Engine(llama(), plan=PLANS[plan], slots=2, chunk=9, prefix_store=store)
    fresh = Engine(llama(), plan=PLANS[plan], slots=2)
    requests = asked(random_prompts(seed, 6))
    expected = fresh.generate(requests).results()
    run = engine.generate(requests)
    results = []
    while not run.done:
        results += run.step().results
        held = store.held
        of_tokens = sum(8 * len(node.token_ids) for node in held)
        in_all = sum(one.part.num_bytes for one in held if one.part is not None) + of_tokens
        assert in_all == store.stats.num_bytes <= store.stats.capacity
        for node in held:  # nothing is left without what it begins with
            assert all(one in held for one in node.chain)
    results.sort(key=lambda result: result.id)
    for ours, theirs in zip(results, expected, strict=True):
        assert_same(ours, theirs)
    stats = store.stats
    assert stats.num_blocks == len(store.held)
    assert stats.hit_rate == stats.hits / max(stats.hits + stats.misses, 1)


def test_the_least_recently_used_leaf_leaves_first() -> None:
    store = PrefixStore(8 * BLOCK_BYTES, block_tokens=4, conversations=False)
    engine = Engine(llama(), plan=Plan.uniform("full"), prefix_store=store)

    def reused(prompt: Any) -> int:
        (result,) = engine.generate(asked([[*prompt, 1]], 1)).results()
        return result.reused_tokens

    assert [reused(range(12)), reused(range(20, 32)), reused(range(12))] == [0, 0, 12]
    assert reused(range(40, 52)) == 0  # the end of the second one leaves: 9 blocks do not fit
    assert [reused(range(12)), reused(range(20, 32))] == [12, 4]
    assert store.stats.evictions > 0


def test_what_is_too_large_is_not_stored_and_pushes_nothing_out() -> None:
    plan = Plan.uniform("full")
    store = PrefixStore(3 * BLOCK_BYTES, block_tokens=4, conversations=True)
    engine = Engine(llama(), plan=plan, prefix_store=store)
    engine.generate(asked([list(range(5))], 1)).results()
    before = store.stats
    assert before.num_blocks == 2
    engine.generate(asked([list(range(30, 33))], 40)).results()  # its end has 42 rows
    assert store.stats.num_blocks == before.num_blocks
    assert (store.stats.refused, store.stats.evictions) == (1, 0)


def test_a_prompt_does_not_push_out_its_own_blocks() -> None:
    store = PrefixStore(3 * BLOCK_BYTES, block_tokens=4, conversations=False)
    engine = Engine(llama(), plan=Plan.uniform("full"), prefix_store=store)
    prompt = list(range(40))
    engine.generate(asked([prompt], 1)).results()
    (again,) = engine.generate(asked([prompt], 1)).results()
    assert again.reused_tokens == 8
    assert store.stats.evictions == 0


def test_what_a_run_uses_may_leave_once_the_run_is_gone() -> None:
    store = PrefixStore(3 * BLOCK_BYTES, block_tokens=4, conversations=False)
    engine = Engine(llama(), plan=Plan.uniform("full"), prefix_store=store)
    run = engine.generate(asked([list(range(12))], 30))
    run.step()
    engine.generate(asked([list(range(20, 32))], 1)).results()
    assert store.stats.evictions == 0
    del run  # in the middle of its answer
    gc.collect()
    engine.generate(asked([list(range(20, 32))], 1)).results()
    assert store.stats.evictions == 2


# Tiers against a model of themselves


@given(st.sampled_from(EVICTIONS), st.integers(0, 2**16))
def test_a_tier_lets_leaves_leave_and_knows_its_bytes(eviction: str, seed: int) -> None:
    rng = Random(seed)
    tree = Tier(1000, EvictionChoice(eviction, seed=seed))
    held: dict[bytes, tuple[Node, int]] = {}
    left: list[bytes] = []

    def leave(key: bytes) -> None:
        node, _ = held.pop(key)
        left.append(key)
        assert all(one.parent is not node for one, _ in held.values())
        assert key not in in_use
        tree.remove(node)

    for number in range(80):
        parents = [None, *(node for node, _ in held.values())]
        parent, size = rng.choice(parents), rng.randint(0, 300)
        node = Node(b"%d" % number, parent, array("q", [number]), None)
        in_use = {rng.choice(list(held)) for _ in range(rng.randint(0, 2)) if held}
        if parent is not None:
            in_use.add(parent.key)
        fits = tree.make_room(node.key, size, in_use, leave)
        if fits:
            tree.add(node, size)
            held[node.key] = node, size
        assert node in tree or not fits
        assert tree.num_bytes == sum(size for _, size in held.values()) <= 1000
        assert len(tree) == len(held)
        for one in rng.sample(list(held), min(2, len(held))):
            tree.hit(held[one][0])
    assert tree.num_evictions == len(left)


# Evictions of others


class Fails:
    """Fails at some call."""

    def __init__(self, calls: int, rng: Random) -> None:
        self.left = calls

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            msg = "no idea"
            raise ValueError(msg)

    def hit(self, block: Hashable) -> None:
        self._count()

    def insert(self, block: Hashable) -> None:
        self._count()

    def choose(self, wanted: Hashable, evictable: Set[Hashable]) -> Hashable:
        self._count()
        return min(evictable)  # type: ignore[type-var]

    def evict(self, block: Hashable) -> None:
        self._count()


@pytest.mark.few(1)
@pytest.mark.parametrize("calls", range(0, 30, 4))
def test_an_eviction_that_fails_ends_the_store_and_no_request(
    calls: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(name: str, *, capacity: int, rng: Random) -> CheckedBlockEviction:
        return CheckedBlockEviction(name, Fails(calls, rng))

    monkeypatch.setattr(tier, "load_block_eviction", failing)
    store = PrefixStore(6 * BLOCK_BYTES, block_tokens=4, eviction="fails")
    plan = PLANS["keeps prompts"]
    engine = Engine(llama(), plan=plan, slots=2, prefix_store=store)
    requests = asked(random_prompts(1, 12))
    expected = Engine(llama(), plan=plan, slots=2).generate(requests).results()
    with caplog.at_level(logging.WARNING):
        for ours, theirs in zip(engine.generate(requests).results(), expected, strict=True):
            assert_same(ours, theirs)
    (record,) = caplog.records
    assert "the prefix store is empty and stays so: block eviction 'fails' failed in" in (
        record.getMessage()
    )
    stats = store.stats
    assert (stats.num_bytes, stats.num_blocks) == (0, 0)
    assert stats.problem is not None


def test_knobs_and_names_of_evictions_are_checked_at_once() -> None:
    assert PrefixStore(1000, eviction="guard", knobs={"predictor": "learned"}).stats.problem is None
    with pytest.raises(KnobError, match="predicter"):
        PrefixStore(1000, eviction="guard", knobs={"predicter": "learned"})
    with pytest.raises(UnknownPolicyError, match="lro"):
        PrefixStore(1000, eviction="lro")
    with pytest.raises(KVPolicyError, match="capacity=0"):
        PrefixStore(0)
    with pytest.raises(KVPolicyError, match="device='gpu7'"):
        PrefixStore(1000, device="gpu7")
    with pytest.raises(KVPolicyError, match=r"block_tokens=2\.5"):
        PrefixStore(1000, block_tokens=2.5)  # type: ignore[arg-type]


def test_guard_counts_its_errors_in_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked as in the contract."""
    made: list[Any] = []

    def loaded(name: str, **options: Any) -> CheckedBlockEviction:
        made.append(load_block_eviction(name, **options))
        return made[-1]

    monkeypatch.setattr(tier, "load_block_eviction", loaded)
    store = PrefixStore(12 * BLOCK_BYTES, block_tokens=4, eviction="guard", conversations=False)
    engine = Engine(llama(), plan=Plan.uniform("full"), prefix_store=store)
    for prompt in random_prompts(3, 40):
        engine.generate(asked([prompt], 1)).results()
    assert made[-1].inner.num_phases > 0
    assert store.stats.evictions > 0
    assert store.stats.hits > 0


# Threads


@pytest.mark.nightly
def test_engines_in_several_threads_share_a_store() -> None:
    store = PrefixStore(40 * BLOCK_BYTES, block_tokens=4)
    requests = asked(random_prompts(5, 24))
    expected = Engine(llama(), plan=PLANS["keeps prompts"]).generate(requests).results()
    failed: list[BaseException] = []

    def serve() -> None:
        try:
            engine = Engine(llama(), plan=PLANS["keeps prompts"], slots=3, prefix_store=store)
            for ours, theirs in zip(engine.generate(requests).results(), expected, strict=True):
                assert_same(ours, theirs)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert store.stats.num_bytes <= store.stats.capacity


def test_stats_are_plain_data() -> None:
    stats = PrefixStore(1000).stats
    plain = stats.to_dict()
    assert plain["hit_rate"] == 0
    assert {field.name for field in attrs.fields(type(stats))} <= plain.keys()
