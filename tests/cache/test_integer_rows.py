"""Rows in integers in every layout: equal to rows of full precision that are rounded alike.

What eager forwards give is compared to the bit, and static steps with eager ones.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from families import family_model
from tiny import shared_model, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy import Engine, Plan, PolicyCache, PrefixStore, Request, Result, SequenceSnapshot
from kvpolicy.attention import choose
from kvpolicy.attention.integers import dequantize, quantize
from kvpolicy.cache import store
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape
from kvpolicy.compat import cache_argument
from kvpolicy.engine.memory.footprint import footprint
from kvpolicy.errors import PlanError

HEAD_DIM = 8
INT8, MIXED = "int8", {"keys": "int8", "values": "int4", "exact": 0}
EXACT = {"keys": "int4", "values": "int4", "exact": 5}
PROMPTS = [[5, 6, 7, 8] * 6, [9, 3, 1] * 4, [11] * 30]

PLANS: dict[str, Callable[..., Plan]] = {
    "even": lambda **rows: Plan.uniform("h2o", budget=12, buffer=5, **rows),
    "queries": lambda **rows: Plan.uniform("snapkv", budget=12, buffer=5, **rows),
    "ragged": lambda **rows: Plan.uniform("h2o", budget=12, buffer=5, heads="shared", **rows),
    "prompt kept": lambda **rows: Plan.uniform("h2o", budget=9, buffer=5, prompt="keep", **rows),
    "staged": lambda **rows: Plan.uniform("h2o", budget=8, buffer=4, prefill_buffer=9, **rows),
    "window": lambda **rows: Plan.uniform("streaming", budget=12, buffer=5, **rows),
    "a whole window": lambda **rows: Plan.uniform("full", **rows),
    "rows replaced": lambda **rows: Plan.uniform("h2o", "merge", budget=12, buffer=5, **rows),
    "keys moved": lambda **rows: Plan.uniform("streaming", "rerotate", budget=9, buffer=5, **rows),
    "lookaheads": lambda **rows: Plan.uniform("laq", budget=12, buffer=5, **rows),
}


def model_of(kind: str) -> PreTrainedModel:
    return family_model("mistral", window=20) if "window" in kind else shared_model()


def answered(kind: str, rows: Any, **options: Any) -> list[Result]:
    options = {"slots": 2, "chunk": 7, **options}
    engine = Engine(model_of(kind), None, PLANS[kind](rows=rows), **options)
    requests = [Request(one, 20, stop_ids=(), snapshot=True) for one in PROMPTS]
    return engine.generate(requests).results()


def rounded(bits: int) -> type[store.StoredRows]:
    """A form in full precision, of what integers would have given."""

    class Rounded(store.StoredRows):
        def encode(self, rows: Tensor) -> Tensor:
            dim, dtype = self.shape.head_dim, self.shape.dtype
            return dequantize(quantize(rows, bits), dim, bits, dtype) if bits else rows.to(dtype)

    return Rounded


def held(result: Result, bits: tuple[int, int] = (0, 0)) -> list[Tensor]:
    """Positions, keys and values of all layers, as numbers."""
    assert result.snapshot is not None
    found = []
    for layer in result.snapshot.contents.layers:
        sides = zip((layer.keys, layer.values), bits, strict=True)
        numbers = [
            dequantize(one, HEAD_DIM, own, torch.float32) if own else one for one, own in sides
        ]
        found += [layer.positions, *numbers]
    return found


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", PLANS)
def test_integers_run_in_every_layout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = answered(kind, MIXED, eager=True)
    static = answered(kind, MIXED)
    assert [one.tokens for one in static] == [one.tokens for one in ours]
    monkeypatch.setattr(store, "form_of", rounded)
    theirs = answered(kind, MIXED, eager=True)
    for own, other in zip(ours, theirs, strict=True):
        assert own.tokens == other.tokens
        assert (own.compactions, own.rows_evicted) == (other.compactions, other.rows_evicted)
        assert all(map(torch.equal, held(own, (8, 4)), held(other)))
    assert bool(max(one.rows_evicted for one in ours)) == (kind != "a whole window")


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", PLANS)
def test_what_a_query_reads_exactly_does_not_depend_on_the_forward(kind: str) -> None:
    """Not on chunks, on who else is decoded, nor on the way of a decode step."""
    together = answered(kind, EXACT)
    assert any(one.rows_evicted for one in together) == (kind != "a whole window")
    for other in (answered(kind, EXACT, eager=True), answered(kind, EXACT, chunk=3)):
        assert [one.tokens for one in other] == [one.tokens for one in together]


@pytest.mark.parametrize("kind", PLANS)
def test_rows_of_which_all_are_exact_equal_plain_ones(kind: str) -> None:
    plain = answered(kind, "model")
    for rows in ({**EXACT, "exact": 60}, {"values": "int4", "exact": 60}):
        assert [one.tokens for one in answered(kind, rows)] == [one.tokens for one in plain]
    if kind != "a whole window":  # of which few rows are older
        assert [one.tokens for one in answered(kind, MIXED)] != [one.tokens for one in plain]


@pytest.mark.few(3)
@pytest.mark.parametrize("rows", [INT8, EXACT], ids=str)
@pytest.mark.parametrize("kind", PLANS)
def test_a_sequence_in_a_batch_equals_itself_alone(kind: str, rows: Any) -> None:
    together = answered(kind, rows)
    engine = Engine(model_of(kind), None, PLANS[kind](rows=rows), slots=1, chunk=7)
    for prompt, one in zip(PROMPTS, together, strict=True):
        (alone,) = engine.generate([Request(prompt, 20, stop_ids=())]).results()
        assert one.tokens == alone.tokens


@pytest.mark.few(4)
@pytest.mark.parametrize("rows", [MIXED, EXACT], ids=str)
@pytest.mark.parametrize("kind", PLANS)
def test_a_sequence_goes_on_from_a_file_with_the_same_bytes(
    kind: str, rows: Any, tmp_path: Path
) -> None:
    plan = PLANS[kind](rows=rows)
    engine = Engine(model_of(kind), None, plan, slots=2, chunk=7)
    (whole,) = engine.generate([Request(PROMPTS[0], 20, stop_ids=(), snapshot=True)]).results()
    (first,) = engine.generate([Request(PROMPTS[0], 9, stop_ids=(), snapshot=True)]).results()
    assert first.snapshot is not None
    first.snapshot.save(tmp_path / "one.safetensors")
    read = SequenceSnapshot.load(tmp_path / "one.safetensors")
    rest = Request((), 11, stop_ids=(), resume=read, snapshot=True)
    (second,) = engine.generate([rest]).results()
    assert first.tokens + second.tokens == whole.tokens
    assert whole.snapshot is not None
    assert second.snapshot is not None
    pairs = zip(whole.snapshot.contents.tensors, second.snapshot.contents.tensors, strict=True)
    assert all(torch.equal(*pair) for pair in pairs if pair[0].dtype in (torch.uint8, torch.int64))
    assert all(bool(layer.exact) == (rows == EXACT) for layer in read.contents.layers)
    pairs = zip(whole.snapshot.contents.layers, second.snapshot.contents.layers, strict=True)
    for one, again in pairs:
        for name, exact in one.exact.items():
            torch.testing.assert_close(again.exact[name], exact)
    other = Engine(model_of(kind), None, PLANS[kind](rows={**EXACT, "exact": 6}))
    (refused,) = other.generate([rest]).results()
    assert refused.finish_reason == "error"


@pytest.mark.parametrize("rows", [INT8, EXACT], ids=str)
@pytest.mark.parametrize("kind", ["even", "ragged", "a whole window"])
def test_prefixes_are_reused_with_their_bytes(kind: str, rows: Any, tmp_path: Path) -> None:
    prefixes = PrefixStore(1 << 20, block_tokens=4, spill=tmp_path)
    reused = answered(kind, rows, prefix_store=prefixes)
    again = answered(kind, rows, prefix_store=prefixes)
    plain = answered(kind, rows)
    assert sum(one.reused_tokens for one in again) > 0
    for one, other, third in zip(reused, again, plain, strict=True):
        assert one.tokens == other.tokens == third.tokens


@pytest.mark.parametrize("rows", [MIXED, EXACT], ids=str)
def test_a_policy_cache_holds_integers(rows: Any) -> None:
    model, prompt = shared_model(), torch.tensor([PROMPTS[0]])
    plan = PLANS["even"](rows=rows)
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        **cache_argument(PolicyCache(model, plan)),
    )
    (result,) = Engine(model, None, plan).generate([Request(PROMPTS[0], 20, stop_ids=())]).results()
    assert found[0, len(PROMPTS[0]) :].tolist() == list(result.tokens)


@pytest.mark.parametrize("rows", [INT8, {"values": "int4", "exact": 3}, EXACT], ids=str)
def test_static_steps_of_16_bits_equal_eager_ones(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch, which rounds what integers stand for as eager forwards do; Numba does not round."""
    monkeypatch.setattr(choose, "HAS_NUMBA", False)
    found = []
    for eager in (False, True):
        plan = PLANS["queries"](rows=rows)
        engine = Engine(tiny_model(dtype=torch.bfloat16), None, plan, slots=2, eager=eager)
        requests = [Request(one, 20, stop_ids=()) for one in PROMPTS]
        found.append([one.tokens for one in engine.generate(requests).results()])
    assert found[0] == found[1]


# Bytes

WANTED = {  # of a row and head of 64 channels, keys and values
    "int8": (64 + 4, 64 + 4),
    "mixed": (64 + 4, 32 + 8),
    "model": (256, 256),
}


@pytest.mark.parametrize("kind", WANTED)
def test_a_row_takes_the_bytes_that_are_stated(kind: str) -> None:
    rows, wanted = MIXED if kind == "mixed" else kind, sum(WANTED[kind])
    plan = Plan.uniform("h2o", budget=10, buffer=4, rows=rows)
    layer = plan.resolve(1).layers[0]
    slab = layer.slab(plan.resolve(1).stacks()[0], 99)
    shape = LayerShape(2, 2, 64, torch.float32, torch.device("cpu"))
    cache = KVCache([shape], [slab], 3)
    assert cache.row_bytes.tolist() == [2 * wanted]
    plain = KVCache([shape], [attrs.evolve(slab, key_bits=0, value_bits=0)], 3)
    assert plain.num_bytes - cache.num_bytes == 3 * 14 * 2 * (512 - wanted)


@pytest.mark.few(4)
@pytest.mark.parametrize("rows", [MIXED, EXACT], ids=str)
@pytest.mark.parametrize("kind", PLANS)
def test_bytes_are_those_that_are_allocated(kind: str, rows: Any) -> None:
    plan, longest = PLANS[kind](rows=rows), 50
    model = model_of(kind)
    found = footprint(plan, model, slots=2, longest=longest, longest_prompt=30)
    engine = Engine(model, None, plan, slots=2)
    run = engine.generate([Request(one, 20, stop_ids=()) for one in PROMPTS])
    results = run.results()
    assert run.cache.num_bytes == pytest.approx(found.num_bytes, rel=0.02)
    peak = run.report.peak_kv_bytes
    assert found.num_bytes < peak
    if kind != "a whole window":  # prompts of any length lie beside it for a moment
        assert peak <= found.needed_bytes
    row = int(run.cache.row_bytes.sum())
    exact = 2 * 2 * 5 * 2 * 8 * 4 if rows == EXACT else 0  # layers, heads, rows
    assert exact == sum(layer.exact_bytes for layer in run.cache.layers)
    assert exact == sum(layer.exact_bytes_per_slot for layer in found.layers)
    assert row == 2 * 2 * (8 + 4 + 4 + 4 if rows == MIXED else 2 * (4 + 4))
    assert all(one.peak_bytes == one.peak_rows * row for one in results)
    for prompt, one in zip(PROMPTS, results, strict=True):
        in_sight = min(len(prompt) + 19, 20 if "window" in kind else 10**6)
        assert one.full_bytes == in_sight * 2 * 2 * 2 * 8 * 4


def test_only_some_layers_may_have_integers() -> None:
    groups = [{"where": "0:1", "rows": "int8"}, {"where": "1:", "rows": {"values": "int4"}}]
    plan = Plan.from_dict({"stack": ["full"], "layers": groups})
    engine = Engine(tiny_model(num_layers=3), None, plan)
    run = engine.generate([Request(PROMPTS[0], 20, stop_ids=())])
    assert [len(one.tokens) for one in run.results()] == [20]
    assert run.cache.row_bytes.tolist() == [2 * 24, 2 * (32 + 8), 2 * (32 + 8)]


def test_heads_of_odd_sizes_are_refused() -> None:
    model = tiny_model(head_dim=6)
    with pytest.raises(PlanError, match="layer 0"):
        Engine(model, None, PLANS["even"](rows=INT8))
    Engine(model, None, PLANS["even"](rows="model"))
