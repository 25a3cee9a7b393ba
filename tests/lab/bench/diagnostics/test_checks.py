"""Checks of a device find what is wrong before its speed counts."""

from typing import Any

import pytest
import torch
from bench_parts import cell
from transformers import PreTrainedModel

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.diagnostics import checks
from kvpolicy.lab.bench.diagnostics.checks import check_compactions, check_tokens
from kvpolicy.lab.sweep.grid import Cell


def test_lost_rows_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    check_compactions(device, repeats=4)
    keep = checks.LayerRows.keep

    def racing(self: Any, kept: torch.Tensor, **options: Any) -> None:
        keep(self, kept, **options)
        self.keys[3, 1, 7] = self.keys[3, 1, 8]

    monkeypatch.setattr(checks.LayerRows, "keep", racing)
    with pytest.raises(KVPolicyError, match="compaction 0 on cpu"):
        check_compactions(device, repeats=1)


@pytest.mark.slow
def test_a_device_must_have_the_tokens_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device, plans = torch.device("cpu"), [cell("full"), cell("h2o", budget=4000)]
    check_tokens(device, plans)
    tokens, calls = checks._tokens, []

    def broken(model: PreTrainedModel, plan: Cell) -> list[tuple[int, ...]]:
        calls.append(plan.series)
        found = tokens(model, plan)
        return found if len(calls) < 4 else found[::-1]

    monkeypatch.setattr(checks, "_tokens", broken)
    with pytest.raises(KVPolicyError, match="h2o"):
        check_tokens(device, plans)
