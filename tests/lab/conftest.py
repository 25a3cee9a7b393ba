"""These tests run commands, and programs in sandboxes."""

from collections.abc import Iterator

import pytest
from commands import kvpolicy, model_folder
from sandboxes import any_wall, wall

__all__ = ["any_wall", "kvpolicy", "model_folder", "wall"]


@pytest.fixture
def little_work_for_the_limit() -> Iterator[None]:
    """Measure the limit of the machine with little work: its value is not tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpolicy.lab.bench.roofline.MOVED", {"cpu": 2**20})
        patch.setattr("kvpolicy.lab.bench.roofline.SIDE", {"cpu": 64})
        yield
