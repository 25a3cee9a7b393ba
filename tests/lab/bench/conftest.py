"""Settings of the tests of benchmarks."""

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _little_work_for_the_limit() -> Iterator[None]:
    """Measure the limit of the machine with little work: its value is not tested."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpolicy.lab.bench.limit._MOVED", {"cpu": 2**20})
        patch.setattr("kvpolicy.lab.bench.limit._SIDE", {"cpu": 64})
        yield
