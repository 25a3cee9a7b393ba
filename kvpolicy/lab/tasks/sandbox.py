"""Running a program that nobody has read, within limits of time and memory and without network."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks import sandbox_child as confined

MEMORY_BYTES = 4 * 2**30
MAX_OUTPUT_BYTES = 16 * 2**20

Ending = Literal["done", "failed", "timeout"]


@attrs.frozen
class Finished:
    """How a program ended.

    Attributes:
        ending: ``"done"`` (by itself, with status 0), ``"failed"`` or ``"timeout"``.
        stdout: What it printed, cut at `MAX_OUTPUT_BYTES`.
        stderr: The last of what it said of errors.
    """

    ending: Ending
    stdout: str
    stderr: str


def check_confinement() -> None:
    """Refuse machines on which programs cannot be confined; raises `TaskError`."""
    if not confined.can_confine():
        msg = (
            "programs written by a model are run on Linux (x86-64, ARM64) only, where they can be "
            "kept from the network"
        )
        raise TaskError(msg)


def run_program(
    source: str, stdin: str, *, time_s: float, memory_bytes: int = MEMORY_BYTES
) -> Finished:
    """Run a Python program in a process and a temporary folder of its own.

    Args:
        source: Its text.
        stdin: What it reads.
        time_s: Seconds it may take, by the clock and by the processor.
        memory_bytes: Bytes of memory it may have.

    Returns:
        How it ended. When this returns, nothing of it runs and its folder is gone.
    """
    with tempfile.TemporaryDirectory(prefix="kvpolicy-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        program, output, errors = (folder / part for part in ("program.py", "out", "err"))
        program.write_text(source, encoding="utf-8", errors="replace")
        command = [
            *(sys.executable, "-I", "-B", confined.__file__),
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
            is_late = _feed(process, stdin, time_s)
        ending: Ending = "done" if process.returncode == 0 else "failed"
        # A program that used up its processor time was ended by the kernel.
        if is_late or process.returncode == -signal.SIGXCPU:
            ending = "timeout"
        return Finished(ending, _read(output, MAX_OUTPUT_BYTES), _read(errors, 4096, last=True))


def _feed(process: "subprocess.Popen[bytes]", stdin: str, time_s: float) -> bool:
    """Give a program its input and wait; whether it was too late."""
    try:
        process.communicate(stdin.encode(errors="replace"), timeout=time_s)
    except subprocess.TimeoutExpired:
        return True
    finally:
        # Also where Ctrl-C ends the wait: the program is in a session of its own.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stdin is not None:
            _close(process.stdin)
    return False


def _close(pipe: object) -> None:
    try:
        pipe.close()  # type: ignore[attr-defined]
    except BrokenPipeError:
        return  # it ended before it had read everything


def _environment(home: Path) -> dict[str, str]:
    """Nothing of ours: no keys, no tokens, no proxies."""
    folder = str(home)
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"HOME": folder, "TMPDIR": folder, "PATH": "", "LANG": "C.UTF-8", **one}


def _read(path: Path, most: int, *, last: bool = False) -> str:
    with path.open("rb") as file:
        if last:
            file.seek(max(path.stat().st_size - most, 0))
        return file.read(most).decode(errors="replace")
