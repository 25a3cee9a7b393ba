"""``kvpolicy serve`` in a process of its own, as a user starts it.

No fork of this one: a server has threads, and torch cannot begin a thread in a process forked from
one that has computed something.
"""

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import attrs
import httpx2
from fresh_process import start_fresh

_RUN = "import sys; from kvpolicy.cli.app import run; sys.exit(run(sys.argv[1:]))"

PATIENCE_S = 150.0  # a server on Ray takes half a minute to start


@attrs.define(eq=False)
class ServedCommand:
    """A running command, whose output goes to two files of a folder."""

    child: ForkServerProcess
    folder: Path

    @property
    def out(self) -> list[str]:
        return (self.folder / "out").read_text("utf-8").splitlines()

    @property
    def log(self) -> list[str]:
        return (self.folder / "err").read_text("utf-8").splitlines()

    @property
    def url(self) -> str:
        return self.out[0].split()[-1]

    @property
    def curl(self) -> str:
        """The line that it tells its user to try."""
        return next((line for line in self.out if line.startswith("curl ")), "")

    def http(self, **options: Any) -> httpx2.Client:
        given = {"base_url": self.url, "timeout": PATIENCE_S, "trust_env": False, "verify": False}
        return httpx2.Client(**given | options)

    def send(self, signum: int) -> None:
        assert self.child.pid is not None
        os.kill(self.child.pid, signum)

    def end(self, signum: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit status."""
        self.send(signum)
        return self.wait()

    def wait(self) -> int:
        """The exit status; negative: the signal that ended it."""
        self.child.join(PATIENCE_S)
        assert self.child.exitcode is not None, "it has not ended"
        return self.child.exitcode


@contextmanager
def served_command(
    folder: Path, *args: object, env: Mapping[str, str] | None = None, port: int = 0
) -> Iterator[ServedCommand]:
    """Run ``kvpolicy serve`` until the block ends."""
    folder.mkdir(exist_ok=True)
    words = ("serve", "--port", port, *args)
    child = start_fresh(_RUN, *words, out=folder / "out", err=folder / "err", env=env)
    served = ServedCommand(child, folder)
    try:
        end = time.monotonic() + PATIENCE_S
        while not served.curl:
            assert child.is_alive(), served.log
            assert time.monotonic() < end, "it has not started"
            time.sleep(0.05)
        yield served
    finally:
        child.kill()
        child.join()
