"""These tests run commands on a cluster of two nodes, which is started once."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from commands import model_folder
from sweeps_on_ray import Command, FileRun, Nodes, Sweep, read_state

__all__ = ["model_folder"]

Running = TypeVar("Running", bound=Command)

_PROGRAM = Path(__file__).parents[2] / "support" / "ray_nodes.py"


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    env = os.environ | {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else a busy machine hardly lets them begin
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }
    with (
        (tmp_path_factory.mktemp("ray") / "nodes.err").open("w") as actual,
        subprocess.Popen(
            [sys.executable, str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=actual,
            env=env,
            text=True,
        ) as process,
    ):
        yield Nodes(process, env, read_state(process))
        assert process.stdin is not None
        process.stdin.close()


@pytest.fixture
def sweep(tmp_path: Path, model_folder: Path, nodes: Nodes) -> Iterator[Sweep]:
    with _ended(Sweep(tmp_path, model_folder, nodes.env)) as made:
        yield made


@pytest.fixture
def file_run(tmp_path: Path, model_folder: Path, nodes: Nodes) -> Iterator[FileRun]:
    with _ended(FileRun(tmp_path, model_folder, nodes.env)) as made:
        yield made


@contextmanager
def _ended(command: Running) -> Iterator[Running]:
    yield command
    if command.process is not None and command.process.poll() is None:
        os.killpg(command.process.pid, signal.SIGKILL)
        command.process.communicate()
