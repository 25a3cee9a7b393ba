"""Many requests, cancellations and failing policies: `docs/benchmarks/soak.py`, asserted."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from slow_share import share_of

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "soak.py"
# Resident memory fluctuates by some pages in any program; leaking one slot's rows for each of
# 10,000 requests would exceed 100 MiB.
MAX_GROWTH = 8 * 2**20
NUM_LONG = share_of(10_000)  # requests of the long soak: ten thousand take ten minutes


def run_soak(num_requests: int, **options: Any) -> Any:
    """Run in waves; the script checks results, slots and tokens after each wave."""
    soak = runpy.run_path(str(SCRIPT))["Soak"](num_requests, **options)
    for _ in soak:
        pass
    return soak


def assert_no_memory_growth(soak: Any, num_plans: int) -> None:
    first, last = soak.samples[num_plans - 1], soak.samples[-1]
    assert (last.tensors, last.tensor_bytes) == (first.tensors, first.tensor_bytes)
    assert last.rss_bytes - first.rss_bytes < MAX_GROWTH


@pytest.mark.nightly
def test_soak_finishes_every_request_once_without_leaks() -> None:
    soak = run_soak(120, wave=20)
    assert sum(soak.reasons.values()) == 120
    assert set(soak.reasons) == {"length", "stop", "cancelled", "error"}
    assert soak.checked >= 6
    assert_no_memory_growth(soak, num_plans=4)


@pytest.mark.nightly
def test_long_soak_finishes_every_request_once_without_leaks() -> None:
    soak = run_soak(NUM_LONG)
    assert sum(soak.reasons.values()) == NUM_LONG
    hooks = {kind.rpartition(" ")[2] for kind in soak.failures}
    assert hooks == {"schedule", "observe", "steer", "due", "score", "select", "evict"}
    assert soak.checked >= NUM_LONG // 20
    assert_no_memory_growth(soak, num_plans=4)
