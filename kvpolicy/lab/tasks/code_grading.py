"""Grading of programs: the last code block of a text is run on tests, in confined processes."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, Literal

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks import sandbox_child

MEMORY_BYTES = 4 * 2**30
MAX_OUTPUT_BYTES = 16 * 2**20

Ending = Literal["done", "failed", "timeout"]

# Imports that contest sites prepend to solutions with starter code.
_PRELUDE = """\
from typing import *
from collections import *
from functools import *
from itertools import *
from heapq import *
from bisect import *
from math import *
import collections, functools, itertools, heapq, bisect, math, re, string, operator, random, sys
"""

# Reads the arguments from standard input, one JSON value per line, and prints the answer as JSON
# after a mark, which separates it from other output of the solution.
_CALL = """

if True:
    import json as _json, sys as _sys
    _answer = {call}(*[_json.loads(_line) for _line in _sys.stdin.read().split("\\n") if _line])
    print("\\n{mark}" + _json.dumps(_answer))
"""
_MARK = "<<answer>>"


@attrs.frozen
class Test:
    """One test of a program.

    Attributes:
        input: Standard input; for a function, its arguments as JSON, one per line.
        output: The expected output; for a function, the expected return value as JSON.
        function: Name of the function, or of the method of the class ``Solution``; ``None`` for
            a whole program.
    """

    __test__ = False  # pytest would collect the class by its name

    input: str
    output: str
    function: str | None = None


@attrs.frozen
class Finished:
    """How a program ended.

    Attributes:
        ending: ``"done"`` (by itself, with status 0), ``"failed"`` or ``"timeout"``.
        stdout: Its output, truncated at `MAX_OUTPUT_BYTES`.
        stderr: The end of its standard error.
    """

    ending: Ending
    stdout: str
    stderr: str


def passes(program: str | None, tests: Sequence[Test], *, time_s: float) -> bool:
    """Whether a program passes all tests; stops at the first failure.

    Args:
        program: Source of the program; ``None`` fails.
        tests: The tests, at least one.
        time_s: Time limit of each test, in seconds.
    """
    return program is not None and all(_passes(program, test, time_s) for test in tests)


def same_output(found: str, expected: str) -> bool:
    """Whether two outputs have equal lines.

    White space at the ends of lines and of the output is ignored. Numbers are compared as decimals:
    ``1.0`` equals ``1``, ``0.1`` does not equal ``0.10000001``.

    Args:
        found: Output of a program.
        expected: The expected output.
    """
    lines, expected_lines = (text.strip().split("\n") for text in (found, expected))
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def check_confinement() -> None:
    """Check that programs can be confined on this machine.

    Raises:
        TaskError: The machine does not run Linux on x86-64 or ARM64.
    """
    if not sandbox_child.can_confine():
        msg = (
            "programs written by a model are run on Linux (x86-64, ARM64) only, where their "
            "network access can be blocked"
        )
        raise TaskError(msg)


def run_program(
    source: str, stdin: str, *, time_s: float, memory_bytes: int = MEMORY_BYTES
) -> Finished:
    """Run a Python program in a confined process and a temporary folder.

    Args:
        source: Its source.
        stdin: Its standard input.
        time_s: Limit of wall time and of processor time, in seconds.
        memory_bytes: Memory limit.

    Returns:
        How it ended; the process and its folder no longer exist.
    """
    with tempfile.TemporaryDirectory(prefix="kvpolicy-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        program, output, errors = (folder / part for part in ("program.py", "out", "err"))
        program.write_text(source, encoding="utf-8", errors="replace")
        command = [
            *(sys.executable, "-I", "-B", sandbox_child.__file__),
            *(str(program), str(int(time_s) + 1), str(memory_bytes)),
        ]
        with output.open("wb") as out, errors.open("wb") as err:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
                cwd=folder / "home",
                env=_environment(folder / "home"),
                start_new_session=True,
            )
            is_late = _communicate(process, stdin, time_s)
        ending: Ending = "done" if process.returncode == 0 else "failed"
        # The kernel kills a program that exceeds its processor time.
        if is_late or process.returncode == -signal.SIGXCPU:
            ending = "timeout"
        return Finished(ending, _read(output, MAX_OUTPUT_BYTES), _read(errors, 4096, last=True))


def _passes(program: str, test: Test, time_s: float) -> bool:
    if test.function is None:
        finished = run_program(program, test.input, time_s=time_s)
        return finished.ending == "done" and same_output(finished.stdout, test.output)
    method = re.search(r"^class Solution\b", program, re.M)
    call = f"Solution().{test.function}" if method else test.function
    source = _PRELUDE + program + _CALL.format(call=call, mark=_MARK)
    return _returned(run_program(source, test.input, time_s=time_s), test.output)


def _returned(finished: Finished, expected: str) -> bool:
    _, mark, answer = finished.stdout.rpartition(_MARK)
    if finished.ending != "done" or not mark:
        return False
    try:
        found: Any = json.loads(answer)
    except ValueError:
        return False
    return bool(found == json.loads(expected))


def _same_line(found: str, expected: str) -> bool:
    if found.strip() == expected.strip():
        return True
    return (numbers := _numbers(found)) is not None and numbers == _numbers(expected)


def _numbers(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None


def _communicate(process: "subprocess.Popen[bytes]", stdin: str, time_s: float) -> bool:
    """Write the input and wait for the end; returns whether it was killed after ``time_s``."""
    try:
        process.communicate(stdin.encode(errors="replace"), timeout=time_s)
    except subprocess.TimeoutExpired:
        return True
    finally:
        # Also after Ctrl-C, which does not reach the session of the program.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdin is not None:
            with suppress(BrokenPipeError):  # the program ended before it read all input
                process.stdin.close()
    return False


def _environment(home: Path) -> dict[str, str]:
    """Environment variables without the user's keys, tokens and proxies."""
    folder = str(home)
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": folder, "TMPDIR": folder, "PATH": "", "LANG": "C.UTF-8", **one}


def _read(path: Path, most: int, *, last: bool = False) -> str:
    with path.open("rb") as file:
        if last:
            file.seek(max(path.stat().st_size - most, 0))
        return file.read(most).decode(errors="replace")
