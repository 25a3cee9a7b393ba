"""Checks for every policy, called from the tests of each."""

from typing import Any

import pytest
import torch
from compare import assert_rows_shape
from strategies import Drawn, fill

from kvpolicy import load_policy
from kvpolicy.testing import keep_rows


def assert_batch_equals_single_rows(name: str, drawn: Drawn, budget: int, **knobs: Any) -> None:
    """A sequence keeps the same rows in any batch."""
    kept = keep_rows(name, drawn.keys, drawn.values, drawn.queries, budget=budget, **knobs)
    for b in range(len(drawn.keys)):
        one = drawn.row(b)
        alone = keep_rows(name, one.keys, one.values, one.queries, budget=budget, **knobs)
        assert (kept[b] == alone[0]).all(), f"sequence {b}"


def assert_nothing_leaves(name: str, drawn: Drawn, budget: int, **knobs: Any) -> None:
    kept = keep_rows(name, drawn.keys, drawn.values, drawn.queries, budget=budget, **knobs)
    assert_rows_shape(kept, drawn.keys, budget)
    assert (kept == torch.arange(drawn.num_rows)).all()


def assert_half_precision_works(name: str, budget: int, **knobs: Any) -> None:
    """bf16 rows have fp32 scores: the kept rows equal those of exact fp32 copies."""
    keys, values = (fill((2, 2, 24, 8), "gauss", seed).bfloat16() for seed in (1, 2))
    queries = fill((2, 4, 24, 8), "gauss", 3).bfloat16()
    kept = keep_rows(name, keys, values, queries, budget=budget, **knobs)
    assert_rows_shape(kept, keys, budget)
    upcast = [tensor.float() for tensor in (keys, values, queries)]
    assert (kept == keep_rows(name, *upcast, budget=budget, **knobs)).all()


def assert_knobs_refused(name: str, knobs: dict[str, Any], error: type[Exception]) -> None:
    """Check that the knobs raise ``error`` with the policy and a knob in the message."""
    with pytest.raises(error, match=name) as caught:
        load_policy(name, **knobs)
    assert any(knob in str(caught.value) for knob in knobs)
