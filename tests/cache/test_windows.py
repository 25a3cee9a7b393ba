"""Sliding-window layers: rows never exceed the window, and tokens equal the model's own."""

from typing import Any

import pytest
import torch
from families import WINDOWED, family_model
from hypothesis import given
from hypothesis import strategies as st
from list_reference import reference_tokens
from rated import Rated, list_layers
from recorder import Recorder
from strategies import costly, plans, prompts
from tiny import greedy_tokens

from kvpolicy import Engine, Plan, Request
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.evictor import Evictor
from kvpolicy.plan.spec import LayerGroup, PolicySpec

chunks = st.sampled_from([1, 2, 5, 11, 512])
windows = st.integers(2, 9)  # transformers does not support a window of 1


@pytest.fixture(autouse=True)
def _rows_never_exceed_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the cache after every forward of every test in this file."""
    evict = Evictor.evict

    def evict_and_check(self: Evictor, *arguments: Any) -> None:
        evict(self, *arguments)
        assert_valid(self._cache)

    monkeypatch.setattr(Evictor, "evict", evict_and_check)


def assert_valid(cache: KVCache) -> None:
    for layer, rows in zip(cache.layers, cache.rows, strict=True):
        window = layer.shape.sliding_window
        for slot, num in enumerate(rows.tolist()):
            assert window is None or num <= layer.keys.shape[2] <= window
            positions = layer.positions[slot]
            assert (positions[:, :num].diff(dim=1) > 0).all()
            assert (positions[:, :num] >= 0).all()
            assert (positions[:, num:] == -1).all()
            for track in layer.tracks.values():
                assert not track[slot, :, num:].any()


@pytest.mark.nightly
@given(st.sampled_from(WINDOWED), windows, prompts(count=4, max_len=40), st.integers(1, 4), chunks)
def test_tokens_equal_generate_over_many_windows(
    family: str, window: int, prompts: list[list[int]], slots: int, chunk: int
) -> None:
    # More requests than slots, of different lengths, so slots are reused.
    model = family_model(family, window=window)
    requests = [Request(prompt, max_new_tokens=5 + 9 * i) for i, prompt in enumerate(prompts)]
    engine = Engine(model, plan=Plan.uniform("full"), slots=slots, chunk=chunk)
    for request, result in zip(requests, engine.generate(requests).results(), strict=True):
        expected = greedy_tokens(model, request.prompt, request.max_new_tokens)
        assert list(result.tokens) == expected
        assert result.rows_evicted == 0


@pytest.mark.nightly
@given(st.data(), st.sampled_from(["mistral", "gpt_oss"]), windows, prompts(count=2, max_len=30))
def test_budget_above_the_window_equals_generate(
    data: st.DataObject, family: str, window: int, prompts: list[list[int]]
) -> None:
    """Also with stored queries, attention sums and tracks."""
    recorder = Recorder()
    name = data.draw(st.sampled_from(["h2o", "rkv", "snapkv", "streaming"]))
    full = LayerGroup("1:2", (PolicySpec.of("full"),))
    plan = Plan(
        layers=(
            full,
            LayerGroup(
                "0:1",
                (PolicySpec.of(name), PolicySpec.of(recorder)),
                budget=data.draw(st.integers(8, 12)),
                buffer=data.draw(st.integers(max(1, window - 8), 12)),
            ),
        )
    )
    model = family_model(family, window=window)
    engine = Engine(model, plan=plan, slots=2, chunk=data.draw(chunks))
    results = engine.generate(prompts, max_new_tokens=15).results()
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 15)
    assert recorder.records == []


@pytest.mark.nightly
@given(
    st.sampled_from(["mistral", "gemma2", "gpt_oss", "gemma3_text"]),
    st.integers(4, 16),
    prompts(count=3, max_len=40),
    st.tuples(st.integers(2, 7), st.integers(1, 7), st.sampled_from([0, 0, 3, 5])),
    chunks,
    st.sampled_from(["evict", "keep"]),
)
def test_eviction_in_a_window_equals_the_list_reference(
    family: str,
    window: int,
    prompts: list[list[int]],
    rules: tuple[int, int, int],
    chunk: int,
    prompt_rows: str,
) -> None:
    budget, buffer, every = rules
    model = family_model(family, window=window)
    plan = Plan.uniform(Rated(every), budget=budget, buffer=buffer, prompt=prompt_rows)
    engine = Engine(model, plan=plan, slots=2, chunk=chunk)
    results = engine.generate(prompts, max_new_tokens=25).results()
    for prompt, result in zip(prompts, results, strict=True):
        num_staying = len(prompt) if prompt_rows == "keep" else 0
        layers = list_layers(engine, budget, buffer, every, num_staying)
        assert list(result.tokens) == reference_tokens(model, layers, prompt, 25)


@pytest.mark.nightly
@costly
@given(st.data(), st.sampled_from(WINDOWED), prompts(count=3, max_len=30), chunks)
def test_batched_sequence_equals_sequence_alone_in_windows(
    data: st.DataObject, family: str, prompts: list[list[int]], chunk: int
) -> None:
    model = family_model(family, window=17, dtype=torch.float64)
    plan = data.draw(plans(num_layers=2))
    batched = Engine(model, plan=plan, slots=3, chunk=chunk)
    results = batched.generate(prompts, max_new_tokens=14).results()
    for prompt, result in zip(prompts, results, strict=True):
        alone = Engine(model, plan=plan, slots=1).generate([prompt], max_new_tokens=14)
        (expected,) = alone.results()
        assert result.tokens == expected.tokens


@pytest.mark.few(1)
@pytest.mark.parametrize("stored", ["none", "stored"])
def test_padded_batches_run_in_windows(stored: str) -> None:
    model = family_model("gpt_oss", window=10)
    plan = Plan.uniform("h2o", budget=8, buffer=4, knobs={"h2o": {"n_recent": 2}}, padding=stored)
    results = (
        Engine(model, plan=plan, slots=3, chunk=7)
        .generate([[5, 6], [7] * 20, [8, 9, 3] * 4], max_new_tokens=30)
        .results()
    )
    assert [result.finish_reason for result in results] == ["length"] * 3
    # Full layers hold 12 rows minus pads; window layers hold 10, with or without pads.
    assert {result.peak_rows for result in results} == ({12} if stored == "none" else {10, 12})


def test_window_memory_does_not_depend_on_length() -> None:
    model = family_model("mistral")
    peaks = []
    for length in (40, 160):
        run = Engine(model, plan=Plan.uniform("full"), slots=2).generate(
            [[3] * 20] * 2, max_new_tokens=length
        )
        assert {result.peak_rows for result in run.results()} == {6}
        peaks.append(run.report.peak_kv_bytes)
    assert peaks[0] == peaks[1]


def test_sequence_may_use_all_positions_of_the_model() -> None:
    model = family_model("mistral")
    engine = Engine(model, plan=Plan.uniform("full"), slots=1)
    (result,) = engine.generate([[1, 2, 3] * 80], max_new_tokens=100).results()
    assert len(result.tokens) == 256 - 240
    assert list(result.tokens) == greedy_tokens(model, [1, 2, 3] * 80, 16)


def test_result_counts_window_rows() -> None:
    model = family_model("gemma2")
    engine = Engine(model, plan=Plan.uniform("full"), slots=1)
    (result,) = engine.generate([[3] * 20], max_new_tokens=10).results()
    assert result.peak_rows == 29
    assert result.peak_bytes == (29 + 6) * 2 * 2 * 8 * 4
