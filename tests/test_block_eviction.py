"""What a store asks when a block must leave: built by name, checked on both sides."""

from importlib.metadata import EntryPoint
from random import Random

import pytest

from kvpolicy import BlockEviction, block_eviction, installed_block_evictions, load_block_eviction
from kvpolicy.block_eviction import CheckedBlockEviction
from kvpolicy.errors import (
    CacheError,
    HookError,
    HookResultError,
    KnobError,
    PolicyLoadError,
    UnknownPolicyError,
)


class Newest:
    """Chooses the newest block, or what it is told to."""

    def __init__(self, answer: object = None, *, fails: bool = False) -> None:
        self.answer, self.fails, self.told = answer, fails, []

    def hit(self, block: object) -> None:
        self.told.append(("hit", block))

    def insert(self, block: object) -> None:
        self.told.append(("insert", block))

    def choose(self, wanted: object, evictable: object) -> object:
        if self.fails:
            msg = "no idea"
            raise RuntimeError(msg)
        return self.answer

    def evict(self, block: object) -> None:
        self.told.append(("evict", block))


def stored(inner: BlockEviction, *blocks: str) -> CheckedBlockEviction:
    checked = CheckedBlockEviction("newest", inner)
    for block in blocks:
        checked.insert(block)
    return checked


def test_calls_are_passed_on_in_order() -> None:
    inner = Newest("b")
    checked = stored(inner, "a", "b")
    checked.hit("a")
    checked.evict(checked.choose("c", {"a", "b"}))
    checked.insert("c")
    calls = [("insert", "a"), ("insert", "b"), ("hit", "a"), ("evict", "b"), ("insert", "c")]
    assert inner.told == calls


@pytest.mark.parametrize("answer", ["z", "b", None, ["a"]])
def test_an_answer_that_may_not_leave_is_refused(answer: object) -> None:
    with pytest.raises(HookResultError, match=r"'newest'.* 1 "):
        stored(Newest(answer), "a", "b").choose("c", {"a"})


def test_a_failure_names_the_eviction_and_the_call() -> None:
    with pytest.raises(HookError, match=r"'newest'.*choose.*RuntimeError"):
        stored(Newest(fails=True), "a").choose("c", {"a"})


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("hit", ("z",)),
        ("evict", ("z",)),
        ("insert", ("a",)),
        ("choose", ("a", {"a"})),
        ("choose", ("z", set())),
    ],
)
def test_a_store_that_tells_what_cannot_be_is_refused(call: str, arguments: tuple) -> None:
    with pytest.raises(CacheError, match="newest"):
        getattr(stored(Newest("a"), "a"), call)(*arguments)


def test_unknown_names_and_knobs_are_answered_with_the_nearest() -> None:
    with pytest.raises(UnknownPolicyError, match=" guard"):
        load_block_eviction("gaurd", capacity=2, rng=Random(0))
    with pytest.raises(KnobError, match=" predictor"):
        load_block_eviction("guard", capacity=2, rng=Random(0), predictr="popu")


@pytest.mark.parametrize("capacity", [0, -1, True, 2.5])
def test_a_capacity_is_a_count(capacity: int) -> None:
    with pytest.raises(KnobError, match=r"'lru'.*capacity="):
        load_block_eviction("lru", capacity=capacity, rng=Random(0))


def test_every_installed_one_is_built_and_described() -> None:
    found = installed_block_evictions()
    assert {"guard", "lru"} <= {info.name for info in found}
    for info in found:
        assert info.problem is None
        assert info.summary.endswith(".")
        built = load_block_eviction(info.name, capacity=2, rng=Random(0))
        assert {"capacity", "rng"}.isdisjoint(knob.name for knob in info.knobs)
        for block in "ab":
            built.insert(block)
        assert built.choose("c", {"a", "b"}) in ("a", "b")


class Half:
    """Lacks three methods."""

    def __init__(self, capacity: int, rng: Random) -> None:
        pass

    def hit(self, block: object) -> None:
        pass


def test_a_class_without_the_methods_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("half", "nowhere:Half", block_eviction.GROUP)
    monkeypatch.setattr(block_eviction, "installed", lambda _: {"half": point})
    monkeypatch.setattr(block_eviction, "load_installed", lambda *_, **__: Half)
    with pytest.raises(PolicyLoadError, match=r"insert.*choose.*evict"):
        load_block_eviction("half", capacity=1, rng=Random(0))
