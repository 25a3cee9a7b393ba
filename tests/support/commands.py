"""Fixtures for tests that run commands: a shell and a shared model folder."""

from pathlib import Path

import pytest
from folders import save_tiny_model
from shell import Shell


@pytest.fixture
def kvpolicy(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
