"""The limit of the machine, by memory and by arithmetic."""

import pytest
from bench_parts import IN_FP32, ROW
from tiny import tiny_model

from kvpolicy.lab.bench.contenders.machine_limit import machine_limit
from kvpolicy.lab.bench.models import weight_bytes
from kvpolicy.lab.bench.workload import Decode, Text

MODULE = "kvpolicy.lab.bench.roofline"


def test_the_limit_reads_or_multiplies_the_weights_and_reads_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    weights = weight_bytes(model)
    monkeypatch.setattr(f"{MODULE}.memory_bandwidth", lambda _: 1000.0)
    monkeypatch.setattr(f"{MODULE}.product_speed", lambda *_: 1e9)
    held = machine_limit(model).run(Decode(batch=3, held=50, steps=4))
    assert held.read_bytes == 3 * ROW * 52.5
    assert held.steps_s == pytest.approx(((weights + held.read_bytes) / 1000,))
    monkeypatch.setattr(f"{MODULE}.product_speed", lambda *_: 10.0)
    text = machine_limit(model).run(Text(2, prompt_min=3, prompt_max=5, new_tokens=10))
    assert text.read_bytes == 2 * ROW * (4 + 5)
    products = 2 * 2 * weights / IN_FP32
    assert text.steps_s == pytest.approx((products / 10 + text.read_bytes / 1000,))
