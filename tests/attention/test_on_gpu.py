"""What Triton does in an engine: decode steps over integers, compactions and redundancy."""

from typing import Any

import pytest
import torch
from tiny import tiny_model
from triton_device import DEVICE, INTERPRETED

from kvpolicy import Engine, Plan
from kvpolicy.attention.base import Decode, DecodeLayer
from kvpolicy.attention.triton_backend.backend import TritonBackend
from kvpolicy.toolkit import triton_redundancy


def positions_and_tokens(
    name: str, num_tokens: int = 12, **options: Any
) -> tuple[list[list[int]], list[list[int]]]:
    """Tokens and kept positions of two sequences of which rows are evicted several times."""
    model = tiny_model("qwen3", num_layers=2).to(DEVICE)
    engine = Engine(model, plan=Plan.uniform(name, budget=16, buffer=4, **options), slots=2)
    prompts = [list(range(2, 40)), list(range(20, 30))]
    run = engine.generate(prompts, max_new_tokens=num_tokens, stop_ids=())
    kept = []
    while not run.done:
        run.step()
        kept.append(run.cache.layers[1].positions.flatten().tolist())
    return [result.token_ids for result in run.results()], kept


@pytest.mark.skipif(not INTERPRETED, reason="the same kernels run on both sides on a GPU")
@pytest.mark.parametrize(
    ("name", "options"), [("rkv", {}), ("h2o", {}), ("h2o", {"prefill_buffer": 12})]
)
def test_engine_keeps_the_same_rows_with_triton(
    name: str, options: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of prompts, too, that enter in more rows than a slot has room for."""
    expected = positions_and_tokens(name, **options)
    calls = []

    def counted(module: Any, function: str) -> None:
        called = getattr(module, function)

        def call(*args: Any, **options: Any) -> Any:
            calls.append(function)
            return called(*args, **options)

        monkeypatch.setattr(module, function, call)

    counted(TritonBackend, "compact")
    counted(triton_redundancy, "key_redundancy")
    for layout in ("even", "staged") if options else ("even",):
        user = f"kvpolicy.cache.layouts.{layout}.backend_for"
        monkeypatch.setattr(user, lambda *_: TritonBackend)
    monkeypatch.setattr("kvpolicy.toolkit.redundancy.runs_in_triton", lambda _: True)
    assert positions_and_tokens(name, **options) == expected
    assert set(calls) == {"compact", "key_redundancy"} if name == "rkv" else {"compact"}


@pytest.mark.skipif(not INTERPRETED, reason="the same kernels run on both sides on a GPU")
@pytest.mark.parametrize(
    ("bits", "options"),
    [
        (8, {"rows": "int8"}),
        (4, {"rows": {"keys": "int4", "values": "int4", "exact": 6}, "heads": "shared"}),
    ],
)
def test_engine_decodes_over_integers_with_triton_as_on_a_cpu(
    bits: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What eager forwards have stored is read, and compactions move what a step has stored."""
    options = {"num_tokens": 7, **options}
    expected = positions_and_tokens("h2o", **options)
    calls = []

    class Counting(TritonBackend):
        def bind(self, layer: DecodeLayer) -> Decode:
            attend = super().bind(layer)

            def call(*given: torch.Tensor, **options: Any) -> torch.Tensor:
                calls.append(layer.key_bits)
                return attend(*given, **options)

            return call

    for user in ("static_step", "layouts.even"):
        monkeypatch.setattr(f"kvpolicy.cache.{user}.backend_for", lambda *_, **__: Counting())
    assert positions_and_tokens("h2o", **options) == expected
    assert bits in calls
