"""Sweeps and files of prompts, in processes of their own, on a cluster whose nodes are killed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

# Time limit of steps that take seconds on an idle machine.
PATIENCE_S = 900

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed: pip install -c constraints.txt -e '.[dev,ray]'",
)

HOLD = '''
import os
import signal
import time
from pathlib import Path

import attrs
from torch import Tensor

from kvpolicy import hookimpl

FOLDER = Path({folder!r})
AFTER = 14
COUNTED = []


@attrs.define(eq=False)
class Held:
    """Keep the newest rows; stop in the middle while ``hold`` exists, die while ``die`` exists."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        COUNTED.append(1)
        if (FOLDER / "die").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if len(COUNTED) == AFTER and (FOLDER / "hold").exists():
            (FOLDER / f"held-{{os.getpid()}}").touch()
            while (FOLDER / "hold").exists():
                time.sleep(0.02)
        return positions.float()
'''


def wait_until(what: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.05)


@attrs.define
class Nodes:
    """The cluster."""

    process: "subprocess.Popen[str]"
    env: dict[str, str]
    state: dict[str, Any]

    @property
    def address(self) -> str:
        return self.state["address"]

    def node_of(self, worker: int) -> int:
        """Index of the node of a worker."""
        parent = int(Path(f"/proc/{worker}/stat").read_text("utf-8").rpartition(")")[2].split()[1])
        return self.state["nodes"].index(parent)

    def kill(self, node: int) -> None:
        """Kill a node, like a power failure, and start another one."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"kill {node}\n")
        self.process.stdin.flush()
        self.state = read_state(self.process)


def read_state(process: "subprocess.Popen[str]") -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    msg = "the cluster did not start"
    raise AssertionError(msg)


@attrs.define
class Command:
    """One command with the policy ``held``, in a process of its own."""

    folder: Path
    model: Path
    env: dict[str, str]
    process: "subprocess.Popen[str] | None" = None

    def launch(self, *words: object) -> None:
        """Start a command; `end` waits for it."""
        plugin = self.folder / "held.py"
        plugin.write_text(HOLD.format(folder=str(self.folder)), encoding="utf-8")
        whole = (*words, "--model", self.model, "--plugin", plugin, "--json")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvpolicy", *(str(word) for word in whole)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self.env,
            text=True,
            start_new_session=True,
        )

    def end(self) -> tuple[int, str, str]:
        """Wait for the process: status, stdout and stderr."""
        assert self.process is not None
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, out, err

    def interrupt(self) -> None:
        """Ctrl-C."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGINT)

    def held(self) -> list[int]:
        """Process ids of workers that wait in the middle of a sample."""
        return [int(path.name.partition("-")[2]) for path in self.folder.glob("held-*")]

    def hold(self) -> None:
        """Make workers wait in the middle of a sample."""
        (self.folder / "hold").touch()

    def let_go(self) -> None:
        """Let the workers continue."""
        (self.folder / "hold").unlink()


@attrs.define
class Sweep(Command):
    """A sweep, and its results."""

    def start(self, *more: object, name: str = "out") -> None:
        """Start the command."""
        self.launch(
            *("ablate", "--policies", "full,held", "--budgets", "12"),
            *("--buffer", 6, "--n", 12, "--slots", 2, "--max-new-tokens", 40),
            *("--output", self.folder / name, *more),
        )

    def samples(self, name: str = "out") -> list[dict[str, Any]]:
        return _lines(self.folder / name / "samples.jsonl")


@attrs.define
class FileRun(Command):
    """A file of prompts that is answered."""

    num_prompts: int = 24

    def start(self, *more: object, name: str = "out") -> None:
        """Start the command."""
        prompts = self.folder / "prompts.jsonl"
        lines = [{"id": f"q{i}", "prompt": f" tea is {i}."} for i in range(self.num_prompts)]
        prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        self.launch(
            *("run", "--prompts", prompts, "--policy", "held", "--budget", "12"),
            *("--buffer", 6, "--slots", 2, "--max-new-tokens", 40),
            *("--output", self.folder / f"{name}.jsonl", *more),
        )

    def answers(self, name: str = "out") -> list[dict[str, Any]]:
        return _lines(self.folder / f"{name}.jsonl")

    def journal(self) -> list[dict[str, Any]]:
        """Answers before all are there."""
        return _lines(self.folder / "out.jsonl.run" / "answers.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
