"""Operations of a step and values that the host reads are counted."""

from collections import Counter
from typing import Any

import pytest
import torch
from bench_parts import ROW, cell
from tiny import tiny_model
from torch import nn

from kvpolicy.lab.bench.diagnostics import launches
from kvpolicy.lab.bench.workload import Decode


class FourOperations(nn.Module):
    device = torch.device("cpu")

    def forward(self, **_: Any) -> list[float]:
        numbers = torch.empty(4).fill_(1.0).view(2, 2).t()  # one: views and allocations are none
        assert (numbers + 1).sum() > 0  # three, and a value
        return numbers[0].tolist()


def test_operations_and_values_read_are_counted() -> None:
    model: Any = FourOperations()
    found = launches.launches_alone(model, Decode(batch=2, held=40, steps=1))
    assert found.operations == 1 + 3
    assert found.reads == {"the model": 2}


@pytest.mark.nightly
@pytest.mark.parametrize("stack", ["full", "h2o", "mixed"])
def test_steps_are_counted_by_kind(stack: str) -> None:
    work = Decode(batch=2, held=40, steps=1)
    groups = [{"where": [0], "stack": ["full"]}, {"where": [1], "stack": ["h2o"]}]
    plan = cell("h2o", layers=groups) if stack == "mixed" else cell(stack)
    found = launches.launches_under(tiny_model(), plan, work)
    assert found.operations > launches.launches_alone(tiny_model(), work).operations
    assert found.path == "static"
    # The tokens, and the flags of a compaction, in the step of it or in the next.
    reads = Counter(found.reads) + Counter(found.compacting_reads)
    assert reads.pop("devices.py:read") in (1, 2)
    assert not reads
    assert (found.graphs, found.breaks) == (1, 0)
    if stack == "full":
        assert found.read_bytes == 2 * ROW * (40 + 2)
        assert (found.compacting, found.compacting_reads) == (None, {})
    else:
        assert found.compacting is not None
        assert found.compacting > 0
