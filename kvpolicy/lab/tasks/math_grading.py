r"""Mathematical equivalence of answers, checked by math-verify in a worker process.

math-verify measures time with ``signal.alarm``, which works only in the main thread of a process,
and sympy can hang where it does not handle signals. So a worker process compares the answers. It is
used for all answers, and killed if it does not respond in time.

The worker reads JSON lines ``["box", "answer"]`` and writes one JSON line for each: ``true``,
``false``, or the reason why there is no verdict. Its first line is ``"ready"``.
"""

import atexit
import json
import logging
import os
import re
import select
import subprocess
import sys
from functools import lru_cache

from kvpolicy.extras import install_extra
from kvpolicy.lab.tasks.task import GradeError

WAIT_S = 20.0  # for one answer; math-verify itself gives up after 5 s for each of its steps
_START_S = 120.0  # importing sympy on a busy machine

# LaTeX also groups digits by thin spaces, 1\,000 or 10,\!000, which math-verify does not read.
_THIN_SPACE = re.compile(r"(?<=\d),?\\[,!] ?(?=\d{3}(?!\d))")


def grade_math(box: str, answer: str) -> bool:
    r"""Whether two answers are mathematically equivalent, by math-verify.

    Args:
        box: Content of the last box of a text, without ``\boxed{}``.
        answer: The expected answer, in LaTeX.

    Raises:
        GradeError: The comparison failed or took too long.
    """
    # One worker per process: a forked process must not use the worker of its parent.
    return _worker(os.getpid()).grade(_THIN_SPACE.sub("", box), _THIN_SPACE.sub("", answer))


class Worker:
    """A process that compares answers; it ends with this process.

    Attributes:
        wait_s: Seconds for one comparison.
    """

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.wait_s = wait_s
        self._process: subprocess.Popen[bytes] | None = None

    def grade(self, box: str, answer: str) -> bool:
        """Compare two answers; see `grade_math`."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([box, answer]).encode() + b"\n")
            process.stdin.flush()
            verdict = self._read(self.wait_s)
        except OSError as error:
            self.close()
            msg = "the process that compares answers ended"
            raise GradeError(msg) from error
        if isinstance(verdict, bool):
            return verdict
        msg = f"answers could not be compared: {verdict}"
        raise GradeError(msg)

    @property
    def pid(self) -> int | None:
        """Number of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # something killed it
        if self._process is None:
            command = [sys.executable, "-m", "kvpolicy.lab.tasks.math_grading"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            if self._read(_START_S) != "ready":
                self.close()
                remedy = install_extra("tasks")
                msg = f"the process that compares answers did not start; {remedy} may help"
                raise GradeError(msg)
        return self._process

    def _read(self, wait_s: float) -> object:
        """Read one line from the process, or return why there is none after ``wait_s``."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], wait_s)
        if not ready:
            self.close()
            return f"no verdict within {wait_s:g} s"
        line = process.stdout.readline()
        if not line:
            self.close()
            return "the process that compares them ended"
        return json.loads(line)


@lru_cache(maxsize=1)
def _worker(_: int) -> Worker:
    worker = Worker()
    atexit.register(worker.close)
    return worker


def _serve() -> None:
    """Compare answers until standard input is closed."""
    # Libraries print to standard output, too; their output goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    def write(value: object) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    def compare(box: str, answer: str) -> bool | str:
        # The parser reads boxed text as one mathematical expression, not as prose.
        gold, given = (parse(f"\\boxed{{{text}}}", raise_on_error=True) for text in (answer, box))
        if not gold:
            return "the expected answer is not mathematics"
        return bool(verify(gold, given, raise_on_error=True))

    write("ready")
    for line in sys.stdin:
        box, answer = json.loads(line)
        try:
            write(compare(box, answer))
        except TimeoutException:
            write("no verdict within the time of a comparison")
        except Exception as error:  # sympy raises arbitrary exceptions on malformed text
            write(f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}")


if __name__ == "__main__":
    _serve()
