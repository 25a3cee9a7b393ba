"""Running one untrusted program: start it in the sandbox, wait for its end, read its output.

Nothing is written to disk, so that nothing is left if this process is killed: the program, its
input, its output and the folder that it can write to are in memory.
"""

import json
import os
import secrets
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import BinaryIO, Literal, TypedDict

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.sandbox.walls import FIRST_USER, NUM_USERS, Wall, bubblewrap, landlock

MEMORY_BYTES = 4 * 2**30
MAX_FILE_BYTES = 16 * 2**20  # also of the output
MAX_FOLDER_BYTES = 64 * 2**20
MAX_FILES = 1000
MAX_THREADS = 64

_START_S = 60.0  # on a machine that is busy with a model
_END_S = 10.0
_LAST_ERROR_BYTES = 4096

_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
# Instead of the user's variables, among which are keys, tokens and proxies.
_VARIABLES = {
    "HOME": "/home",
    "TMPDIR": "/home",
    "PATH": "",
    "LANG": "C.UTF-8",
    **dict.fromkeys(_THREADS, "1"),
}

# A sandbox is used if this program works in it and is refused what it must not have.
_TRIAL = """
import decimal, json, os, random, socket, threading
thread = threading.Thread(target=lambda: print(input()))
thread.start()
thread.join()
for attempt in (os.fork, socket.socket, lambda: os.kill(1, 0), lambda: os.listdir("/etc/ssl")):
    try:
        attempt()
        print("not refused")
    except OSError:
        pass
"""

Ending = Literal["done", "failed", "timeout"]


class Job(TypedDict):
    """What ``child.py`` is told."""

    program: str
    cpu_s: int
    memory_bytes: int
    threads: int
    file_bytes: int
    folder_bytes: int
    folder_files: int
    has_folder: bool
    user: int | None
    namespaces: int
    readable: list[str]
    hidden: list[str]
    packages: dict[str, str]
    filter: str
    parent: int | None


@attrs.frozen
class Finished:
    """How a program ended.

    Attributes:
        ending: ``"done"`` (by itself, with status 0), ``"failed"`` or ``"timeout"``.
        stdout: Its output, up to `MAX_FILE_BYTES`; writing more is an error in the program.
        stderr: The end of its standard error.
    """

    ending: Ending
    stdout: str
    stderr: str


@cache
def find_wall() -> Wall:
    """The way in which programs are confined on this machine: the first that works.

    Raises:
        TaskError: None works; the message says why, and what to install.
    """
    problems = []
    for make in (bubblewrap, partial(bubblewrap, proc=False), landlock):
        try:
            wall = make()
            check_wall(wall)
        except TaskError as error:
            problems.append(str(error))
        else:
            return wall
    reasons = "; ".join(dict.fromkeys(problems))
    msg = (
        "programs written by a model are only run in a sandbox, and there is none on this machine: "
        f"{reasons}. On Linux, install bubblewrap (apt-get install bubblewrap) and "
        "kvpolicy[tasks]; elsewhere, use a virtual machine with Linux"
    )
    raise TaskError(msg)


def check_wall(wall: Wall) -> None:
    """Try a way to confine programs.

    Args:
        wall: The way.

    Raises:
        TaskError: A program does not start in it, or is not refused what it must not have.
    """
    finished = run_program(_TRIAL, "works\n", time_s=20.0, wall=wall)
    if (finished.ending, finished.stdout) != ("done", "works\n"):
        last = finished.stderr.strip().rpartition("\n")[2]
        msg = f"{wall.name} does not hold here ({last or finished.stdout.strip()})"
        raise TaskError(msg)


def run_program(source: str, stdin: str, *, time_s: float, wall: Wall | None = None) -> Finished:
    """Run a Python program in the sandbox.

    Args:
        source: Its source.
        stdin: Its standard input.
        time_s: Limit of wall time and of processor time, in seconds, without the time to start.
        wall: How it is confined; by default as `find_wall` says.

    Returns:
        How it ended. Its process no longer exists, nor does what it wrote.

    Raises:
        TaskError: There is no sandbox, or it did not start the program.
    """
    wall = wall or find_wall()
    job = Job(
        program=source,
        cpu_s=int(time_s) + 1,
        memory_bytes=MEMORY_BYTES,
        threads=MAX_THREADS,
        file_bytes=MAX_FILE_BYTES,
        folder_bytes=MAX_FOLDER_BYTES,
        folder_files=MAX_FILES,
        has_folder=wall.has_folder,
        user=FIRST_USER + secrets.randbelow(NUM_USERS) if wall.lends_user else None,
        namespaces=wall.namespaces,
        readable=wall.readable,
        hidden=wall.hidden,
        packages=wall.packages,
        filter=wall.filter.hex(),
        # In a namespace of its own, the child does not see this process.
        parent=None if wall.has_folder else os.getpid(),
    )
    with (
        _in_memory(json.dumps(job)) as job_file,
        _in_memory(stdin) as given,
        _in_memory() as output,
        _in_memory() as errors,
    ):
        with _started(wall, job_file, given, output, errors) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(time_s)
            status = process.poll()
        return Finished(_ending(status), _read(output), _read(errors, last=_LAST_ERROR_BYTES))


def _ending(status: int | None) -> Ending:
    if status == 0:
        return "done"
    # The kernel kills a program that exceeds its processor time; bubblewrap reports 128 more.
    return "timeout" if status in (None, -signal.SIGKILL, 128 + signal.SIGKILL) else "failed"


@contextmanager
def _started(
    wall: Wall, job: BinaryIO, stdin: BinaryIO, stdout: BinaryIO, stderr: BinaryIO
) -> Iterator["subprocess.Popen[bytes]"]:
    """A program that has started, with everything in force; it is killed on exit."""
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as held:
        # Closed by the kernel when the last process that holds it has ended.
        with open(writer, "wb", 0):
            try:
                process = subprocess.Popen(
                    [*wall.command, str(job.fileno()), str(writer)],
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    cwd="/",
                    env=_VARIABLES,
                    pass_fds=(job.fileno(), writer),
                    start_new_session=True,
                )
            except OSError as error:
                msg = f"{wall.name} cannot be started ({error})"
                raise TaskError(msg) from error
        try:
            if not (_is_ready(held, _START_S) and held.read(1)):
                process.kill()
                process.wait()
                reason = _read(stderr, last=_LAST_ERROR_BYTES).strip().rpartition("\n")[2]
                msg = f"{wall.name} did not start a program ({reason or 'no reason was given'})"
                raise TaskError(msg)
            yield process
        finally:
            # Also after Ctrl-C, which does not reach the session of the program.
            process.kill()
            process.wait()
            while _is_ready(held, _END_S) and held.read(2**16):
                pass


def _is_ready(file: BinaryIO, timeout_s: float) -> bool:
    return bool(select.select([file], [], [], timeout_s)[0])


def _in_memory(text: str = "") -> BinaryIO:
    """A file without a name, which holds a text."""
    file = os.fdopen(os.memfd_create("kvpolicy"), "w+b", 0)
    file.write(text.encode(errors="replace"))
    file.seek(0)
    return file


def _read(file: BinaryIO, *, last: int | None = None) -> str:
    size = min(os.fstat(file.fileno()).st_size, MAX_FILE_BYTES)
    file.seek(max(size - last, 0) if last is not None else 0)
    return file.read(size).decode(errors="replace")
