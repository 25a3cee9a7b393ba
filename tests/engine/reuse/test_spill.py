"""Blocks that leave memory are found again in files, and files that are wrong do no harm."""

import errno
import gc
import logging
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from reuse_cases import (
    BLOCK_BYTES,
    PLANS,
    asked,
    assert_same,
    llama,
    random_prompts,
    results_of,
)
from safetensors.torch import save_file
from strategies import costly

from kvpolicy import Engine, Plan, PrefixStore, hookimpl
from kvpolicy.engine.reuse import spill
from kvpolicy.engine.reuse.spill import FORMAT
from kvpolicy.errors import KVPolicyError, OutputError

FULL = Plan.uniform("full")


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.mark.slow
@costly
@given(
    st.sampled_from(list(PLANS)),
    st.sampled_from(["lru", "guard"]),
    st.integers(1, 30_000),
    st.integers(1, 200_000),
    st.integers(0, 2**16),
)
def test_what_is_read_again_equals_what_was_computed(
    tmp_path_factory: pytest.TempPathFactory,
    plan: str,
    eviction: str,
    capacity: int,
    spill_bytes: int,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("spill")
    prompts = random_prompts(seed, 6)
    expected = Engine(llama(), plan=PLANS[plan]).generate(asked(prompts)).results()
    for _ in range(2):  # with what was left there, too
        store = PrefixStore(
            capacity, block_tokens=4, eviction=eviction, spill=folder, spill_bytes=spill_bytes
        )
        for ours, theirs in zip(results_of(store, PLANS[plan], prompts), expected, strict=True):
            assert_same(ours, theirs)
        store.flush()
        stats = store.stats
        assert stats.num_bytes <= capacity
        assert sum(path.stat().st_size for path in files(folder)) == stats.spilled_bytes
        assert len(files(folder)) == stats.spilled_blocks
        assert stats.spilled_bytes <= stats.spill_capacity == spill_bytes
        assert (stats.problem, stats.spill_problem) == (None, None)


def test_blocks_that_have_left_memory_are_read_again(tmp_path: Path) -> None:
    store = PrefixStore(7 * BLOCK_BYTES, block_tokens=4, conversations=False, spill=tmp_path)
    prompts = [list(range(begin, begin + 13)) for begin in (0, 20, 40)]
    results_of(store, FULL, prompts)
    assert store.stats.evictions > 0
    again = results_of(store, FULL, prompts)
    assert [one.reused_tokens for one in again] == [12, 12, 12]
    assert store.stats.spill_loads > 0
    assert store.stats.misses == 9


def test_a_folder_stays_within_its_limit_if_a_prompt_does_not_fit(tmp_path: Path) -> None:
    def kept(spill: Path, **options: int) -> list[int]:
        store = PrefixStore(2**20, block_tokens=4, conversations=False, spill=spill, **options)
        results_of(store, FULL, [list(range(13))])
        store.flush()
        return [path.stat().st_size for path in files(spill)]

    sizes = kept(tmp_path / "roomy")
    assert len(sizes) == 3
    # The last block would fit in place of the first ones, which it needs.
    assert len(kept(tmp_path / "small", spill_bytes=sum(sizes) - 1)) == 2


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_conversations_and_prompts_survive_a_restart(plan: Plan, tmp_path: Path) -> None:
    prompts = [[*range(20), question] for question in range(3)]
    store = PrefixStore(2**20, block_tokens=4, spill=tmp_path)
    first = results_of(store, plan, prompts)
    store.flush()
    turns = [[*prompt, *one.tokens, 7] for prompt, one in zip(prompts, first, strict=True)]
    expected = results_of(store, plan, turns)
    restarted = PrefixStore(2**20, block_tokens=4, spill=tmp_path)
    assert restarted.stats.spilled_blocks == len(files(tmp_path)) > 3
    for ours, theirs in zip(results_of(restarted, plan, turns), expected, strict=True):
        assert_same(ours, theirs)
        assert ours.reused_tokens == theirs.reused_tokens == 26
    again = results_of(restarted, plan, prompts)
    assert [one.reused_tokens for one in again] == [20 if plan is not PLANS["compacts"] else 16] * 3


@pytest.mark.nightly
def test_a_process_that_is_killed_leaves_what_another_can_use(tmp_path: Path) -> None:
    program = f"""
import sys
for folder in {sys.path!r}:
    sys.path.append(folder)
from pathlib import Path
import os, signal
from random import Random
from kvpolicy import Plan, PrefixStore
from reuse_cases import BLOCK_BYTES, results_of
FULL = Plan.uniform("full")
store = PrefixStore(4 * BLOCK_BYTES, block_tokens=4, spill={str(tmp_path)!r})
rng = Random(0)
results_of(store, FULL, [[*range(20), rng.randrange(61), 1] for _ in range(6)])
results_of(store, FULL, [list(range(30, 52))])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    store = PrefixStore(2**20, block_tokens=4, spill=tmp_path)
    assert store.stats.spilled_blocks > 0
    prompt = [*range(20), 60, 1]
    (ours,) = results_of(store, FULL, [prompt])
    (theirs,) = Engine(llama(), plan=FULL).generate(asked([prompt])).results()
    assert_same(ours, theirs)
    assert ours.reused_tokens > 0


# Files that are wrong


def flipped(path: Path) -> None:
    """One bit of the last tensor is another."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def renamed(path: Path) -> None:
    """The contents of another file under its name."""
    path.write_bytes(files(path.parent)[-1].read_bytes())


def removed(path: Path) -> None:
    path.unlink()


def rewritten(path: Path) -> None:
    """Tensors of another shape, with a checksum that fits."""
    tensors, header = FORMAT.read(path)
    tensors["layer.0.keys"] = tensors["layer.0.keys"][:, :1].contiguous()
    path.write_bytes(FORMAT.to_bytes(tensors, header))


@pytest.mark.few(4)
@pytest.mark.parametrize("damage", [flipped, cut, emptied, renamed, removed, rewritten])
@pytest.mark.parametrize("when", ["before a restart", "while it runs"])
def test_a_damaged_file_is_left_out_with_a_warning(
    damage: Any, when: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = list(range(21))
    store = PrefixStore(2**20, block_tokens=4, conversations=False, spill=tmp_path)
    (theirs,) = results_of(store, FULL, [prompt])
    store.flush()
    if when == "while it runs":
        store = PrefixStore(2**20, block_tokens=4, conversations=False, spill=tmp_path)
    assert len(files(tmp_path)) == 5
    parents = {FORMAT.read_header(path)["parent"] for path in files(tmp_path)}
    inner = next(path for path in files(tmp_path) if path.stem in parents)
    damage(inner)
    with caplog.at_level(logging.WARNING):
        if when == "before a restart":
            store = PrefixStore(2**20, block_tokens=4, conversations=False, spill=tmp_path)
        (ours,) = results_of(store, FULL, [prompt])
        (again,) = results_of(store, FULL, [prompt])
    assert_same(ours, theirs)
    assert_same(again, theirs)
    assert again.reused_tokens == 20
    if (damage, when) != (removed, "before a restart"):
        assert any(
            "left out" in one.getMessage() or "leaves out" in one.getMessage()
            for one in caplog.records
        )


def test_files_of_others_stay_where_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    (tmp_path / ".kvpolicy-0123abcd.new").write_bytes(b"of a write that was killed")
    with caplog.at_level(logging.WARNING):
        store = PrefixStore(2**20, block_tokens=4, spill=tmp_path)
    warned = [record.getMessage() for record in caplog.records]
    assert len(warned) == 3
    assert any("model.safetensors" in one for one in warned)
    theirs = {"model.safetensors", "notes.txt", "folder.safetensors", "fifo.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {".lock", *theirs}
    assert store.stats.spilled_blocks == 0


def test_prompts_on_disk_are_for_this_user_only(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    umask = os.umask(0)
    try:
        store = PrefixStore(2**20, block_tokens=4, spill=folder)
        results_of(store, FULL, [list(range(21))])
        store.flush()
    finally:
        os.umask(umask)
    assert files(folder)
    modes = {path.stat().st_mode & 0o777 for path in files(folder)}
    assert (folder.stat().st_mode & 0o777, modes) == (0o700, {0o600})


def test_a_folder_for_fewer_bytes_lets_the_oldest_leave(tmp_path: Path) -> None:
    store = PrefixStore(2**20, block_tokens=4, conversations=False, spill=tmp_path)
    for begin in (0, 20):
        results_of(store, FULL, [list(range(begin, begin + 9))])
        store.flush()
    for path in files(tmp_path):
        old = 0 in FORMAT.read_header(path)["token_ids"]
        os.utime(path, (1, 1) if old else (2, 2))
    size = sum(path.stat().st_size for path in files(tmp_path)) - 1
    smaller = PrefixStore(
        2**20, block_tokens=4, conversations=False, spill=tmp_path, spill_bytes=size
    )
    assert smaller.stats.spilled_blocks == len(files(tmp_path)) == 3


# What cannot be written


def test_a_full_disk_ends_the_writing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, left = spill.atomic_write, [3]

    def until_full(path: Path, content: bytes, **options: bool) -> None:
        left[0] -= 1
        if left[0] < 0:
            msg = f"{path} cannot be written: No space left on device; choose another place"
            raise OutputError(msg)
        write(path, content, **options)

    monkeypatch.setattr(spill, "atomic_write", until_full)
    store = PrefixStore(4 * BLOCK_BYTES, block_tokens=4, spill=tmp_path)
    prompts = random_prompts(2, 12)
    expected = Engine(llama(), plan=FULL).generate(asked(prompts)).results()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for ours, theirs in zip(results_of(store, FULL, prompts), expected, strict=True):
                assert_same(ours, theirs)
        store.flush()
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith(f"the prefix store writes no more blocks to {tmp_path}: ")
    assert message.endswith("; it goes on in memory, and tries again later")
    assert "No space left on device" in message
    assert len(files(tmp_path)) == store.stats.spilled_blocks == 3
    assert store.stats.spill_problem is not None
    assert store.stats.hits > 0


class Remembers:
    """Remembers something that is no plain data."""

    @hookimpl
    def observe(self, memory: Any) -> None:
        memory.of(self)[0]["random"] = Random(0)


def test_what_is_no_plain_data_stays_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan.uniform("full", Remembers())
    store = PrefixStore(2**20, block_tokens=4, spill=tmp_path)
    with caplog.at_level(logging.WARNING):
        results_of(store, plan, [list(range(9))])
        store.flush()
    (record,) = caplog.records
    assert "an object of Random" in record.getMessage()
    assert files(tmp_path) == []
    assert results_of(store, plan, [list(range(9))])[0].reused_tokens == 8


HOLDER = """
import sys
from filelock import FileLock, Timeout
lock = FileLock(sys.argv[1])
try:
    lock.acquire(blocking=False)
except Timeout:
    sys.exit("refused")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_is_used_by_one_process_at_a_time(tmp_path: Path) -> None:
    words = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(OutputError, match="store"):
            PrefixStore(1000, spill=tmp_path)
        other.communicate()
    stores = [PrefixStore(1000, spill=tmp_path) for _ in range(2)]  # here, one may follow another
    del stores[0]
    gc.collect()
    assert subprocess.run(words, input="", capture_output=True, text=True).stderr == "refused\n"
    stores.clear()
    gc.collect()
    assert subprocess.run(words, input="", capture_output=True, text=True).stdout == "held\n"


def test_a_folder_that_cannot_be_written_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = list(range(21))
    store = PrefixStore(2**20, block_tokens=4, conversations=False, spill=tmp_path)
    results_of(store, FULL, [prompt])
    store.flush()
    (tmp_path / ".kvpolicy-0123abcd.new").write_bytes(b"of a write that was killed")
    del store
    gc.collect()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    # For root, no folder is read-only.
    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(FileLock, "acquire", refuse)
    again = PrefixStore(2**20, block_tokens=4, conversations=False, spill=tmp_path)
    assert results_of(again, FULL, [prompt])[0].reused_tokens == 20
    assert again.stats.spill_loads > 0


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="File exists"):
        PrefixStore(1000, spill=tmp_path / "file")
    with pytest.raises(KVPolicyError, match="spill_bytes=10"):
        PrefixStore(1000, spill_bytes=10)
    with pytest.raises(KVPolicyError, match="spill_bytes=0"):
        PrefixStore(1000, spill=tmp_path, spill_bytes=0)
    assert PrefixStore(1000, spill=tmp_path / "a" / "b").stats.spill_capacity == 16_000
