"""The roofline: what a machine does is measured."""

import pytest
import torch

from kvpolicy.lab.bench.roofline import (
    Machine,
    ModelSize,
    least_step_s,
    memory_bandwidth,
    product_speed,
)


def test_what_a_machine_does_is_measured() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < memory_bandwidth(cpu, 2**22) < 1e13
    for dtype in (torch.float32, torch.float64):
        assert 1e7 < product_speed(cpu, dtype, 64) < 1e14


def test_the_limit_of_a_step_is_what_must_be_read_once() -> None:
    """Qwen3-8B in bfloat16 on a card that moves 4.27 TB/s: 1 and 32 texts of 8,704 tokens."""
    row, card = 147_456, Machine(4.27e12, 9e14)
    size = ModelSize(15_140_000_000, 7_570_000_000, row, num_layers=36, query_size=36 * 4096)
    for batch, ms in ((1, 3.85), (32, 13.2)):
        step_s = least_step_s(card, size, batch, batch * 8704 * row)
        assert 1e3 * step_s == pytest.approx(ms, abs=0.1)
