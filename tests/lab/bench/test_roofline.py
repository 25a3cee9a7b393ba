"""The roofline: what a machine does is measured."""

import torch

from kvpolicy.lab.bench.roofline import memory_bandwidth, product_speed


def test_what_a_machine_does_is_measured() -> None:
    cpu = torch.device("cpu")
    assert 1e8 < memory_bandwidth(cpu, 2**22) < 1e13
    for dtype in (torch.float32, torch.float64):
        assert 1e7 < product_speed(cpu, dtype, 64) < 1e14
