"""Which GPU attention an engine takes, and what it says of others."""

import sys

import pytest
import torch
from tiny import tiny_model

from kvpolicy import Engine, KVPolicyError, Plan
from kvpolicy.errors import ModelError
from kvpolicy.kernels import flash_attention
from kvpolicy.kernels.flash_attention import flash_problem

PLAN = Plan.uniform("full")
GPU = torch.device("cuda:0")


def test_an_unknown_name_is_answered_with_the_names() -> None:
    with pytest.raises(KVPolicyError, match=r"gpu_attention .*'triton' or 'flash-attn'"):
        Engine(tiny_model(), plan=PLAN, gpu_attention="flash")  # type: ignore[arg-type]


def test_flash_attn_needs_a_gpu_and_static_steps() -> None:
    with pytest.raises(ModelError, match="cpu"):
        Engine(tiny_model(), plan=PLAN, gpu_attention="flash-attn")
    with pytest.raises(ModelError, match="static"):
        Engine(tiny_model(), plan=PLAN, gpu_attention="flash-attn", eager=True)


def test_what_flash_attn_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = (7, 5)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    monkeypatch.setattr(flash_attention, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)  # importing it raises
    assert "and the model is in float32" in str(flash_problem(GPU, torch.float32))
    assert flash_problem(GPU, torch.bfloat16) == "Tesla T4 is older than Ampere"
    capability = (8, 0)
    assert "[kernels]" in str(flash_problem(GPU, torch.bfloat16))
    monkeypatch.setattr(flash_attention, "find_spec", lambda _: "a spec")
    assert "flash-attn cannot be imported" in str(flash_problem(GPU, torch.bfloat16))
    monkeypatch.setitem(sys.modules, "flash_attn", torch)  # which has no such function
    assert "flash-attn cannot be imported" in str(flash_problem(GPU, torch.bfloat16))
    module = type(torch)("flash_attn")
    module.flash_attn_with_kvcache = print  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert flash_problem(GPU, torch.float16) is None
