"""Checks of single calls, for policies that consist of others or change rows."""

from typing import Any

import torch
from compare import assert_rows_shape
from strategies import Drawn

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
