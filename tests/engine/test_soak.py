"""Many requests, cancellations and failing policies: `docs/benchmarks/soak.py`, asserted."""

import os
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "benchmarks" / "soak.py"
# Resident memory moves by some pages whatever a program does; a leak of one slot's rows for
# each of 10,000 requests would be more than 100 MiB.
MOST_GROWTH = 8 * 2**20
LONG = int(os.environ.get("KVPOLICY_SOAK", "10000"))  # requests of the long soak


def soaked(num_requests: int, **options: Any) -> Any:
    """Served in waves; the script checks answers, slots and tokens after each of them."""
    soak = runpy.run_path(str(SCRIPT))["Soak"](num_requests, **options)
    for _ in soak:
        pass
    return soak


def assert_nothing_piles_up(soak: Any, num_plans: int) -> None:
    first, last = soak.samples[num_plans - 1], soak.samples[-1]
    assert (last.tensors, last.tensor_bytes) == (first.tensors, first.tensor_bytes)
    assert last.rss_bytes - first.rss_bytes < MOST_GROWTH


def test_a_soak_answers_every_request_once_and_leaves_nothing_behind() -> None:
    soak = soaked(120, wave=20)
    assert sum(soak.reasons.values()) == 120
    assert set(soak.reasons) == {"length", "stop", "cancelled", "error"}
    assert soak.checked >= 6
    assert_nothing_piles_up(soak, num_plans=4)


@pytest.mark.slow
def test_a_long_soak_answers_every_request_once_and_leaves_nothing_behind() -> None:
    soak = soaked(LONG)
    assert sum(soak.reasons.values()) == LONG
    hooks = {kind.rpartition(" ")[2] for kind in soak.failures}
    assert hooks == {"schedule", "observe", "steer", "due", "score", "select", "evict"}
    assert soak.checked >= LONG // 20
    assert_nothing_piles_up(soak, num_plans=4)
