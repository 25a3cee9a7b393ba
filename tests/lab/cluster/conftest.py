"""These tests run commands on a cluster of two nodes, which is started once."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import model_folder
from sweeps_on_ray import Nodes, Sweep, running_nodes

__all__ = ["model_folder"]


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with running_nodes(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture
def sweep(tmp_path: Path, model_folder: Path, nodes: Nodes) -> Iterator[Sweep]:
    made = Sweep(tmp_path, model_folder, nodes.env)
    yield made
    if made.process is not None and made.process.poll() is None:
        os.killpg(made.process.pid, signal.SIGKILL)
        made.process.communicate()
