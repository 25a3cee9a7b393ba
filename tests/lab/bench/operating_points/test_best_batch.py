"""The fastest batch within a memory."""

import pytest
import torch
from bench_parts import STEP, measurement
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.operating_points.best_batch import best_batch, largest_batch
from kvpolicy.lab.bench.workload import Decode


@given(st.integers(0, 5000))
def test_the_largest_batch_fits_and_is_at_most_an_eighth_too_small(most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    found = largest_batch(fits)
    assert found <= most
    assert most - found < max(1, found // 8)
    assert len(tried) == len(set(tried)), "nothing is measured twice"


def test_the_fastest_batch_within_memory_is_chosen() -> None:
    """Ten bytes a sequence; sixteen sequences are the fastest, and the memory ends at 25."""

    def decode(work: Decode) -> Measurement:
        if work.batch > 25:
            torch.empty(1 << 60, dtype=torch.uint8)
        seconds = 1.0 if work.batch <= 16 else 2.0
        return measurement(seconds, kv_bytes=10 * work.batch)

    contender = Contender("x", decode)
    told: list[str] = []
    assert best_batch(contender, STEP, 1e9, told.append) == 16
    assert [int(line.split()[1].rstrip(":")) for line in told[:6]] == [1, 2, 4, 8, 16, 32]
    assert best_batch(contender, STEP, 45) == 4
    assert best_batch(contender, STEP, 5) is None

    def broken(work: Decode) -> Measurement:
        msg = "another error"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="another error"):
        best_batch(Contender("x", broken), STEP, 1e9)
