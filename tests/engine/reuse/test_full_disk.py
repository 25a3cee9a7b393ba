"""On a disk that is really full, requests are served on, and nothing half written is ever read."""

import logging
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from reuse_cases import BLOCK_BYTES, PLANS, asked, assert_same, llama, random_prompts, results_of
from small_disk import fill, on_small_disk

from kvpolicy import Engine, Plan, PrefixStore
from kvpolicy.engine.reuse import spill

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its children")

DISK = 8 << 20
MEMORY = 6 * BLOCK_BYTES  # so small that blocks leave it all the time


class Clock:
    """Takes the place of time in `Spill`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spill, "time", clock)
    return clock


@contextmanager
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    """The warnings of a block."""
    caplog.clear()
    found: list[str] = []
    with caplog.at_level(logging.WARNING):
        yield found
    found.extend(record.getMessage() for record in caplog.records)


def opened(folder: Path, capacity: int = MEMORY) -> PrefixStore:
    return PrefixStore(capacity, block_tokens=4, spill=folder, spill_bytes=1 << 30)


def check(store: PrefixStore, plan: Plan, prompts: list[list[int]]) -> None:
    """Prompts are answered with a store as without one."""
    expected = Engine(llama(), plan=plan).generate(asked(prompts)).results()
    for ours, theirs in zip(results_of(store, plan, prompts), expected, strict=True):
        assert_same(ours, theirs)


def check_files(store: PrefixStore, folder: Path) -> None:
    """The files are those that the store knows, and none is unfinished."""
    names = [path for path in folder.iterdir() if path.name not in (".lock", "of somebody else")]
    assert {path.suffix for path in names} <= {".safetensors"}
    assert len(names) == store.stats.spilled_blocks
    assert sum(path.stat().st_size for path in names) == store.stats.spilled_bytes


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_disk_that_becomes_full_ends_the_writing_until_there_is_room(
    plan: Plan, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    on_small_disk(tmp_path, DISK, partial(_becomes_full, plan, tmp_path, clock, caplog))


def _becomes_full(plan: Plan, folder: Path, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    store, other = opened(folder), folder / "of somebody else"
    other.write_bytes(bytes(DISK - (64 << 10)))
    with logged(caplog) as warnings:
        for seed in range(2):
            check(store, plan, random_prompts(seed, 10))
            clock.now += 1.0
        fill(folder)  # what is smaller would have fitted
        store.flush()
    assert warnings == [
        f"the prefix store writes no more blocks to {folder}: No space left on device; "
        "it goes on in memory, and tries again later"
    ]
    stats = store.stats
    assert stats.spill_problem == f"{folder}: No space left on device"
    assert stats.problem is None
    assert stats.spilled_blocks > 0
    assert stats.spill_loads > 0
    check_files(store, folder)
    # It stays full, for as long as it may.
    with logged(caplog) as warnings:
        clock.now += 1e4
        check(store, plan, random_prompts(2, 10))
    assert warnings == []
    check_files(store, folder)
    # There is room, which is used at the next try, and not before.
    other.unlink()
    with logged(caplog) as warnings:
        check(store, plan, random_prompts(5, 10))
        assert store.stats.spill_problem is not None
        clock.now += 1e4
        check(store, plan, random_prompts(5, 10))
    assert warnings == [f"the prefix store writes blocks to {folder} again"]
    assert store.stats.spill_problem is None
    assert store.stats.spilled_blocks > stats.spilled_blocks
    check_files(store, folder)


@pytest.mark.slow
def test_a_restart_on_a_full_disk_finds_whole_files_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_small_disk(tmp_path, DISK, partial(_restarts, tmp_path, caplog))


def _restarts(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan, prompts = PLANS["full"], [[*range(20), number] for number in range(3)]
    store = opened(folder, 1 << 20)
    check(store, plan, prompts)
    store.flush()
    # A process that was killed in the middle of a write, a file that was cut, no byte of room.
    (folder / ".kvpolicy-0123abcd.new").write_bytes(bytes(5000))
    cut = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime_ns)
    cut.write_bytes(cut.read_bytes()[:1000])
    other = fill(folder)
    assert shutil.disk_usage(folder).free == 0
    with logged(caplog) as warnings:
        again = opened(folder)
    assert [cut.name in one for one in warnings] == [True]
    assert not list(folder.glob("*.new"))
    before = again.stats.spilled_blocks
    assert before > 0
    fill(folder)
    with logged(caplog) as warnings:
        (result,) = results_of(again, plan, prompts[:1])
        check(again, plan, prompts)
        check(again, plan, random_prompts(0, 10))
    assert result.reused_tokens > 0
    assert again.stats.spill_loads > 0
    (warning,) = warnings
    assert "No space left on device; it goes on in memory" in warning
    # At the end of a server or a command, what is in memory is written if there is room by then.
    other.unlink()
    with logged(caplog) as warnings:
        again.flush()
    assert warnings == [f"the prefix store writes blocks to {folder} again"]
    assert again.stats.spill_problem is None
    assert again.stats.spilled_blocks > before


@pytest.mark.slow
def test_a_folder_on_a_disk_without_room_for_anything_is_used_when_there_is(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def body() -> None:
        other = fill(tmp_path)
        store = opened(tmp_path)
        with logged(caplog) as warnings:
            check(store, PLANS["compacts"], random_prompts(0, 6))
        assert len(warnings) == 1
        assert (store.stats.spilled_blocks, store.stats.spilled_bytes) == (0, 0)
        other.unlink()
        clock.now += 30.0
        check(store, PLANS["compacts"], random_prompts(0, 6))
        assert store.stats.spill_problem is None
        assert store.stats.spilled_blocks > 0

    on_small_disk(tmp_path, DISK, body)
