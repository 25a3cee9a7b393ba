"""Programs in the sandbox: what works there, its limits, its end, and when it is refused."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvpolicy.errors import TaskError
from kvpolicy.lab.sandbox import run
from kvpolicy.lab.sandbox.run import MAX_FILE_BYTES, MAX_FILES, MAX_FOLDER_BYTES, run_program
from kvpolicy.lab.sandbox.system_calls import filter_code
from kvpolicy.lab.sandbox.walls import Wall, bubblewrap

WORKING = {
    "a print": ("print(1)", "", "1\n"),
    "input()": ("print(sum(map(int, input().split())), input())", "1 2\nx\n", "3 x\n"),
    "sys.stdin": ("import sys\nprint(sys.stdin.readline(), sys.stdin.read())", "a\nb", "a\n b\n"),
    "open(0)": ("print(len(open(0).read()))", "x" * 10**6, "1000000\n"),
    "/dev/stdin": ("print(open('/dev/stdin').read())", "a", "a\n"),
    "os.read": ("import os\nos.write(1, os.read(0, 10))", "a", "a"),
    "modules": (
        "import array, bisect, calendar, cmath, collections, contextlib, copy, csv, ctypes\n"
        "import dataclasses, datetime, decimal, enum, fractions, functools, hashlib, heapq, io\n"
        "import itertools, json, math, operator, os, pathlib, pprint, queue, random, re, secrets\n"
        "import statistics, string, struct, sys, textwrap, threading, time, traceback, types\n"
        "import typing, unicodedata, uuid, zlib, bz2, lzma, sqlite3, asyncio, multiprocessing\n"
        "import concurrent.futures, logging, unittest, inspect, subprocess, socket, tempfile\n"
        "print(datetime.datetime.strptime('2024-02-29', '%Y-%m-%d').date(),\n"
        "    decimal.Decimal('0.1') + 1, fractions.Fraction(1, 3), math.comb(5, 2))",
        "",
        "2024-02-29 1.1 1/3 10\n",
    ),
    "recursion in a thread": (
        "import sys, threading\n"
        "sys.setrecursionlimit(10**6)\n"
        "threading.stack_size(2**27)\n"
        "def deep(n): return 0 if n == 0 else 1 + deep(n - 1)\n"
        "thread = threading.Thread(target=lambda: print(deep(20000)))\n"
        "thread.start(); thread.join()",
        "",
        "20000\n",
    ),
    "a pool of threads": (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "with ThreadPoolExecutor(8) as pool: print(sum(pool.map(int, '123')))",
        "",
        "6\n",
    ),
    "a stack without limit": (
        "import resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_STACK)\n"
        "resource.setrlimit(resource.RLIMIT_STACK, (hard, hard))\nprint(1)",
        "",
        "1\n",
    ),
    "numpy": (
        "import numpy as np\n"
        "rng = np.random.default_rng(0)\n"
        "print(np.linalg.inv(np.eye(3)).sum(), (rng.normal(size=(99, 99)) @ np.ones(99)).shape)",
        "",
        "3.0 (99,)\n",
    ),
    "exit()": ("print(1)\nexit()\nprint(2)", "", "1\n"),
    "sys.exit(0)": ("import sys\nprint(1)\nsys.exit(0)", "", "1\n"),
    "__main__": (
        "import dataclasses, sys\n"
        "@dataclasses.dataclass\n"
        "class A:\n    x: int\n"
        "if __name__ == '__main__': print(A(1), sys.modules['__main__'].A is A, sys.argv)",
        "",
        "A(x=1) True ['program.py']\n",
    ),
    "time": (
        "import signal, time\nsignal.alarm(0)\ntime.sleep(0.01)\nprint(time.time() > 1e9)",
        "",
        "True\n",
    ),
    "other letters": ("# -*- coding: utf-8 -*-\nprint(input() + 'ß')", "ä\n", "äß\n"),
    "half a letter": ("print(1)  # \ud800", "", "1\n"),
}


@pytest.mark.few(6)
@pytest.mark.parametrize("what", WORKING)
def test_programs_of_contests_work(wall: Wall, what: str) -> None:
    if what == "/dev/stdin" and "without /proc" in wall.name:
        pytest.skip("a link into /proc")
    source, stdin, output = WORKING[what]
    finished = run_program(source, stdin, time_s=20)
    assert (finished.ending, finished.stdout) == ("done", output), finished


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("exit(3)", ""),
        ("def broken(:", "SyntaxError"),
        ("import torch", "No module named 'torch'"),
        ("import os; os.abort()", ""),
        ("input()", "EOFError"),
    ],
)
def test_programs_fail_as_elsewhere(wall: Wall, source: str, reason: str) -> None:
    finished = run_program(source, "", time_s=20)
    assert finished.ending == "failed"
    assert reason in finished.stderr


STUBBORN = (
    "import signal, threading\n"
    "for number in range(1, 65):\n"
    "    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\n"
    "def spin():\n    while True: pass\n"
    "for _ in range(4): threading.Thread(target=spin).start()\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["while True: pass", "import time; time.sleep(300)", STUBBORN])
def test_a_program_that_does_not_end_is_ended(wall: Wall, source: str) -> None:
    # Half a second is too short on no machine: none of them ends.
    assert run_program(source, "", time_s=0.5).ending == "timeout"
    assert confined_below(os.getpid()) == []


def test_processor_time_is_limited_by_the_kernel(wall: Wall) -> None:
    source = "import resource; print(resource.getrlimit(resource.RLIMIT_CPU))"
    assert run_program(source, "", time_s=59.5).stdout == "(60, 60)\n"


def test_what_is_written_is_limited_as_a_whole(wall: Wall) -> None:
    source = (
        "total = count = 0\n"
        "try:\n"
        "    for number in range(100):\n"
        "        with open(str(number), 'wb', 0) as file:\n"
        "            count += 1\n"
        "            while file.tell() < 15 * 2**20: total += file.write(bytes(2**20))\n"
        "except OSError as error: print(total, count, error.errno)\n"
    )
    finished = run_program(source, "", time_s=20)
    total, count, _ = map(int, finished.stdout.split())
    assert (count > 0) is wall.has_folder
    assert total <= MAX_FOLDER_BYTES
    assert total > MAX_FOLDER_BYTES / 2 or not wall.has_folder


def test_files_are_limited_in_number(wall: Wall) -> None:
    source = (
        "import os\n"
        "count = 0\n"
        "try:\n"
        "    while True:\n"
        "        os.close(os.open(str(count), os.O_CREAT | os.O_WRONLY))\n"
        "        count += 1\n"
        "except OSError: print(count)\n"
    )
    count = int(run_program(source, "", time_s=20).stdout)
    assert 0 <= count <= MAX_FILES
    assert (count > 0) is wall.has_folder


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_is_limited(wall: Wall, stream: str) -> None:
    source = f"import sys\nwhile True: sys.{stream}.write('x' * 2**20)"
    finished = run_program(source, "", time_s=20)
    assert finished.ending == "failed"
    assert len(finished.stdout) <= MAX_FILE_BYTES
    assert len(finished.stderr) <= 4096


def test_the_folder_is_empty_for_every_program(wall: Wall) -> None:
    if not wall.has_folder:
        pytest.skip("this way has no folder to write to")
    source = "import os; print(os.getcwd(), os.listdir()); open('x', 'w').close()"
    for _ in range(2):
        assert run_program(source, "", time_s=20).stdout == "/home []\n"


def test_bubblewrap_works_with_an_empty_proc(wall: Wall) -> None:
    if not wall.has_folder:
        pytest.skip("this way has no file system of its own")
    emptied = bubblewrap(proc=False)
    run.check_wall(emptied)
    assert "without /proc" in emptied.name


def test_programs_get_none_of_our_variables(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    finished = run_program("import os; print(sorted(os.environ))", "", time_s=20)
    assert "HF_TOKEN" not in finished.stdout
    assert "'HOME'" in finished.stdout


def test_programs_are_not_root(wall: Wall) -> None:
    source = "import os; print(0 in (*os.getresuid(), *os.getresgid(), *os.getgroups()))"
    assert run_program(source, "", time_s=20).stdout == "False\n"


@pytest.mark.nightly
def test_programs_may_run_side_by_side(wall: Wall) -> None:
    source = "import threading, time\nthreading.Thread(target=time.sleep, args=(0.2,)).start()"
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda _: run_program(source, "", time_s=20).ending, range(6)))
    assert found == ["done"] * 6


GRADER = """
from kvpolicy.lab.sandbox.run import run_program
run_program("import time\\ntime.sleep(300)", "", time_s=300)
"""


@pytest.mark.slow
def test_a_program_ends_with_its_grader(
    wall: Wall, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    if not wall.has_folder:
        monkeypatch.setenv("PATH", "/nonexistent")
    with subprocess.Popen([sys.executable, "-c", GRADER]) as grader:
        try:
            # After the sandbox's trial, which lasts moments, the program that sleeps.
            started = wait_for(lambda: confined_below(grader.pid, asleep=True))
        finally:
            grader.kill()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    assert list(tmp_path.iterdir()) == []


def wait_for(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (result := found()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return result


def confined_below(process: int, *, asleep: bool = False) -> list[int]:
    """Processes with a filter of system calls that a process has started, directly or not."""
    status = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended
            if folder.name.isdigit():
                text = (folder / "status").read_text()
                status[int(folder.name)] = dict(re.findall(r"^(\w+):\t(.*)", text, re.M))
    below = {process}
    for _ in range(4):
        below |= {pid for pid, one in status.items() if int(one["PPid"]) in below}
    return [
        pid
        for pid in below - {process}
        if status[pid].get("Seccomp") == "2"
        if not asleep or status[pid]["State"].startswith("S")
    ]


def test_a_wall_with_a_hole_is_not_used(wall: Wall) -> None:
    allow_all = bytes.fromhex("060000000000ff7f")
    with pytest.raises(TaskError, match=re.escape(wall.name)):
        run.check_wall(attrs.evolve(wall, filter=allow_all))


def test_a_wall_that_does_not_stand_starts_no_program(wall: Wall) -> None:
    with pytest.raises(TaskError, match=re.escape(wall.name)):
        run_program("print(1)", "", time_s=9, wall=attrs.evolve(wall, filter=b""))
    broken = attrs.evolve(wall, command=["/nonexistent/program"])
    with pytest.raises(TaskError, match="nonexistent"):
        run_program("print(1)", "", time_s=9, wall=broken)


@pytest.fixture
def _choice() -> Iterator[None]:
    """The choice of a way is made anew in this test."""
    run.find_wall.cache_clear()
    filter_code.cache_clear()
    yield
    run.find_wall.cache_clear()
    filter_code.cache_clear()


@pytest.mark.usefixtures("_choice")
def test_without_bubblewrap_and_pyseccomp_programs_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setitem(sys.modules, "pyseccomp", None)
    with pytest.raises(TaskError, match="bubblewrap") as why:
        run.find_wall()
    assert "[tasks]" in str(why.value)
    assert "apt-get install bubblewrap" in str(why.value)


@pytest.mark.usefixtures("_choice")
@pytest.mark.parametrize("error", [RuntimeError("Unable to find libseccomp"), OSError("broken")])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Broken:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "pyseccomp":
                raise error

    monkeypatch.delitem(sys.modules, "pyseccomp", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(TaskError, match="libseccomp"):
        run.find_wall()


@pytest.mark.usefixtures("_choice")
def test_other_systems_have_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(TaskError, match="Linux"):
        run.find_wall()


@pytest.mark.usefixtures("_choice")
def test_a_bubblewrap_that_the_kernel_refuses_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match="No permissions to create new namespace"):
        run.check_wall(run.bubblewrap())
