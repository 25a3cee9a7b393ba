"""flash-attn beside our kernel, with a stand-in for either that takes its time from a clock."""

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from tiny import tiny_model
from torch import Tensor

from kvpolicy.errors import KVPolicyError
from kvpolicy.kernels.operator import decode
from kvpolicy.lab.bench.diagnostics import attention
from kvpolicy.lab.bench.diagnostics.attention import compare_attention
from kvpolicy.model.graphs import Graph, Output


@attrs.define
class Kernels:
    """Attends as the CPU does.

    Attributes:
        seconds: What a call takes, by whether flash-attn is asked for.
        error: What flash-attn adds to outputs.
        now: The clock.
    """

    seconds: dict[bool, float]
    error: float = 0.0
    now: float = 0.0

    def __call__(self, *arguments: Any, flash: bool, **options: Any) -> Tensor:
        self.now += self.seconds[flash]
        return decode(*arguments, **options) + self.error * flash


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    kernels = Kernels({False: 2e-6, True: 1e-6})
    monkeypatch.setattr(attention, "decode", kernels)
    monkeypatch.setattr(attention, "flash_problem", lambda *_: None)
    monkeypatch.setattr(attention, "synchronized_time", lambda _: kernels.now)
    return kernels


def captured(run: Callable[[], Output]) -> Graph:
    return Graph(lambda: run() and None, run())


def compared() -> str:
    return compare_attention(tiny_model(), batch=3, rows=40, capture=captured)


def test_the_faster_one_is_named(kernels: Kernels) -> None:
    times = "of 3 sequences with 40 rows takes 2 us with our kernel and 1 us with flash-attn"
    assert compared() == f"a layer {times}: flash-attn is faster."
    kernels.seconds[True] = 3e-6
    assert compared().endswith("3 us with flash-attn: our kernel is faster.")


def test_what_flash_attn_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, flash: bool, **__: object) -> Tensor:
        msg = "FlashAttention only supports Ampere GPUs or newer."
        raise RuntimeError(msg)

    monkeypatch.setattr(attention, "flash_problem", lambda *_: None)
    monkeypatch.setattr(attention, "decode", refuse)
    assert (
        "not compared with flash-attn: RuntimeError: FlashAttention only supports Ampere"
        in compared()
    )


def test_other_outputs_end_the_benchmark(kernels: Kernels) -> None:
    kernels.error = 1.0
    with pytest.raises(KVPolicyError, match="flash-attn"):
        compared()


def test_without_flash_attn_a_sentence_says_why() -> None:
    found = compare_attention(tiny_model(dtype=torch.bfloat16), batch=3, rows=40)
    assert found.startswith("attention is not compared with flash-attn: it runs on GPUs only")
