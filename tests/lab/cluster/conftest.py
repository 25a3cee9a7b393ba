"""These tests run commands on a cluster of two nodes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from commands import model_folder
from sweeps_on_ray import Command, FileRun, Nodes, Sweep

__all__ = ["model_folder"]

Running = TypeVar("Running", bound=Command)


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
