"""Grading of programs: a program is run on tests, in the sandbox."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import attrs

from kvpolicy.files import parse_json
from kvpolicy.lab.sandbox.run import Finished, run_program

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


def passes(program: str | None, tests: Sequence[Test], *, time_s: float) -> bool:
    """Whether a program passes all tests; stops at the first failure.

    Args:
        program: Source of the program; ``None`` fails.
        tests: The tests, at least one.
        time_s: Time limit of each test, in seconds.

    Raises:
        TaskError: There is no sandbox, or it did not start the program.
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


def _passes(program: str, test: Test, time_s: float) -> bool:
    if test.function is None:
        finished = run_program(program, test.input, time_s=time_s)
        return finished.ending == "done" and same_output(finished.stdout, test.output)
    method = re.search(r"^class Solution\b", program, re.M)
    call = f"Solution().{test.function}" if method else test.function
    source = _PRELUDE + program + _CALL.format(call=call, mark=_MARK)
    return _has_returned(run_program(source, test.input, time_s=time_s), test.output)


def _has_returned(finished: Finished, expected: str) -> bool:
    _, mark, answer = finished.stdout.rpartition(_MARK)
    if finished.ending != "done" or not mark:
        return False
    try:
        found: Any = parse_json(answer)
    except ValueError:  # a program may print anything
        return False
    return bool(found == parse_json(expected))


def _same_line(found: str, expected: str) -> bool:
    if found.strip() == expected.strip():
        return True
    return (numbers := _numbers(found)) is not None and numbers == _numbers(expected)


def _numbers(line: str) -> list[Decimal] | None:
    try:
        numbers = [Decimal(word) for word in line.split()]
    except InvalidOperation:
        return None
    return None if any(map(Decimal.is_snan, numbers)) else numbers  # comparing it raises
