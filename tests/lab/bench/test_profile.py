"""What a device did in a step, from the events of a trace."""

from typing import Any

import pytest
import torch

from kvpolicy.lab.bench.profile import KINDS, OTHERS, StepProfile, profile_of, profile_steps


def event(name: str, start: float, duration: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration}


def test_a_profile_counts_launches_their_time_and_gaps() -> None:
    events = [
        event("void gemm<float>", 10, 5),
        event("rms_norm", 15, 1),
        event("void gemm<float>", 20, 6),
        event("elementwise", 21, 2),  # at the same time, in another stream
        event("_attend_chunk", 30, 4),
        event("Memcpy DtoH", 34, 1, "gpu_memcpy"),
        event("a label", 0, 100, "gpu_user_annotation"),
        event("aten::mm", 0, 100, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    found = profile_of({"traceEvents": events}, 2, 30e-6, on_gpu=True)
    assert found.launches == 3
    assert found.kernels_ms == pytest.approx(19e-3 / 2)
    assert found.gaps_ms == pytest.approx((4 + 4) * 1e-3 / 2)
    assert found.profiled_ms == pytest.approx(15e-3)
    kernels = [(one.name, one.launches, one.ms) for one in found.kernels]
    assert kernels[0] == ("void gemm<float>", 1, pytest.approx(5.5e-3))
    kinds = {"products": 5.5e-3, "attention": 2e-3, "copies": 0.5e-3, "norms": 0.5e-3, OTHERS: 1e-3}
    assert found.kinds_ms == pytest.approx(dict.fromkeys(KINDS, 0.0) | kinds)
    assert profile_of({"traceEvents": []}, 1, 0.0, on_gpu=True).launches == 0


def test_operations_of_a_cpu_within_others_count_once() -> None:
    events = [event("linear", 0, 9, "cpu_op"), event("addmm", 1, 5, "cpu_op")]
    found = profile_of({"traceEvents": events}, 1, 1e-5, on_gpu=False)
    assert [(one.name, one.ms) for one in found.kernels] == [("linear", pytest.approx(9e-3))]


def test_steps_are_profiled_where_they_run() -> None:
    left, right = torch.ones(2, 8, 8)

    def take_steps() -> int:
        for _ in range(3):
            torch.mm(left, right)
        return 3

    found = profile_steps(take_steps, torch.device("cpu"))
    (kernel,) = found.kernels
    assert (found.launches, kernel.name, kernel.launches) == (1, "aten::mm", 1)
    assert found.kinds_ms["products"] == found.kernels_ms > 0
    assert not found.problem


def test_a_profiler_that_sees_nothing_or_may_not_run_says_so() -> None:
    assert profile_steps(lambda: 1, torch.device("cpu")).problem

    def refuse() -> int:
        msg = "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
        raise RuntimeError(msg)

    found = profile_steps(refuse, torch.device("cpu"))
    assert "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" in found.problem
    assert found == StepProfile.unknown(found.problem)
