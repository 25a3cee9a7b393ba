"""Grading programs: the last block of code of a text, run on tests."""

import json
import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import attrs

from kvpolicy.lab.tasks.sandbox import Finished, run_program

# What contest sites import for their users before a solution with a starter begins.
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

# Reads the arguments from standard input, one JSON value a line, and prints the answer as JSON
# after a mark, so that what a solution prints by itself is told apart from it.
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
        input: What it reads; the arguments as JSON, one a line, if a function is called.
        output: What it has to print, or to answer, as JSON.
        function: Name of the function, or of the method of the class ``Solution``; ``None`` for
            a whole program.
    """

    # Not a test of ours, whatever pytest thinks of its name.
    __test__ = False

    input: str
    output: str
    function: str | None = None


def passes(program: str | None, tests: Sequence[Test], *, time_s: float) -> bool:
    """Run a program on tests, each in a confined process, up to the first that fails.

    Args:
        program: Its text; ``None`` passes nothing.
        tests: The tests, at least one.
        time_s: Seconds for each.
    """
    return program is not None and all(_passes(program, test, time_s) for test in tests)


def _passes(program: str, test: Test, time_s: float) -> bool:
    if test.function is None:
        finished = run_program(program, test.input, time_s=time_s)
        return finished.ending == "done" and same_output(finished.stdout, test.output)
    method = re.search(r"^class Solution\b", program, re.M)
    call = f"Solution().{test.function}" if method else test.function
    source = _PRELUDE + program + _CALL.format(call=call, mark=_MARK)
    return _answers(run_program(source, test.input, time_s=time_s), test.output)


def _answers(finished: Finished, expected: str) -> bool:
    _, mark, answer = finished.stdout.rpartition(_MARK)
    if finished.ending != "done" or not mark:
        return False
    try:
        found: Any = json.loads(answer)
    except ValueError:
        return False
    return bool(found == json.loads(expected))


def same_output(found: str, expected: str) -> bool:
    """Tell whether two outputs are the same, line by line.

    White space around lines and around the whole does not count, and numbers are compared as
    decimals: ``1.0`` is ``1``, ``0.1`` is not ``0.10000001``.

    Args:
        found: What a program printed.
        expected: What it had to print.
    """
    ours, theirs = (text.strip().split("\n") for text in (found, expected))
    return len(ours) == len(theirs) and all(map(_same_line, ours, theirs))


def _same_line(ours: str, theirs: str) -> bool:
    if ours.strip() == theirs.strip():
        return True
    return (numbers := _numbers(ours)) is not None and numbers == _numbers(theirs)


def _numbers(line: str) -> list[Decimal] | None:
    try:
        return [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None
