"""These tests run commands on a cluster of two nodes, which is started once."""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import model_folder
from sweeps_on_ray import Nodes, Sweep, read_state

__all__ = ["model_folder"]

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
    made = Sweep(tmp_path, model_folder, nodes.env)
    yield made
    if made.process is not None and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()
