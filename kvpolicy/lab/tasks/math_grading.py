"""Comparing answers by their meaning, in a process of its own.

math-verify measures time by ``signal.alarm``, which works in the main thread of a process only,
and sympy can hang where no signal reaches it. So the comparison is made in another process:
one that stays for the next answers, and is killed when it does not answer in time.
"""

import atexit
import json
import os
import re
import select
import subprocess
import sys
from functools import lru_cache

from kvpolicy.lab.tasks.datasets import EXTRA
from kvpolicy.lab.tasks.measures import GradeError

WAIT_S = 20.0  # for an answer; math-verify itself gives up after 5 s for each of its steps
_START_S = 120.0  # importing sympy, on a machine that is busy

# LaTeX groups digits by thin spaces as well, 1\,000 or 10,\!000, which math-verify does not read.
_THIN_SPACE = re.compile(r"(?<=\d),?\\[,!] ?(?=\d{3}(?!\d))")


def grade_math(box: str, answer: str) -> bool:
    r"""Tell whether two answers mean the same.

    Args:
        box: What the last box of a text holds, without ``\boxed{}``.
        answer: The right answer, in LaTeX.

    Returns:
        The verdict of math-verify on the two.

    Raises:
        GradeError: There is none, since it failed or took too long.
    """
    # By process: a forked one must not talk to the worker of its parent.
    return _worker(os.getpid()).grade(_THIN_SPACE.sub("", box), _THIN_SPACE.sub("", answer))


class Worker:
    """A process that compares answers; it ends with this one."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self._wait_s = wait_s
        self._process: subprocess.Popen[bytes] | None = None

    def grade(self, box: str, answer: str) -> bool:
        """Have two answers compared; see `grade_math`."""
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps([box, answer]).encode() + b"\n")
            process.stdin.flush()
            said = self._hear(self._wait_s)
        except OSError as error:
            self.close()
            msg = "the process that compares answers ended"
            raise GradeError(msg) from error
        if isinstance(said, bool):
            return said
        msg = f"answers could not be compared: {said}"
        raise GradeError(msg)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it was killed; nothing of it is to be used again
        if self._process is None:
            command = [sys.executable, "-m", "kvpolicy.lab.tasks.math_worker"]
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
            if self._hear(_START_S) != "ready":
                self.close()
                msg = f"the process that compares answers did not start; {EXTRA} may help"
                raise GradeError(msg)
        return self._process

    def _hear(self, wait_s: float) -> object:
        """One line from the process, within a time."""
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
