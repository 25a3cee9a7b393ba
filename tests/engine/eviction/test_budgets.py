"""Budgets hold at every step, and kept rows contain the keys of the tokens they came from."""

from collections import Counter

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Record, Recorder
from strategies import costly, plans, prompts
from tiny import FAMILIES, shared_model
from torch import Tensor
from transformers import DynamicCache

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.compat import cache_argument

NUM_LAYERS = 2
NUM_KV_HEADS, HEAD_DIM = 2, 8
models = st.builds(
    shared_model,
    st.sampled_from(FAMILIES),
    seed=st.integers(0, 3),
    num_layers=st.just(NUM_LAYERS),
)


@costly
@given(st.data(), models, st.sampled_from([1, 5, 512]))
def test_every_compaction_follows_the_contract(
    data: st.DataObject, model: torch.nn.Module, chunk: int
) -> None:
    recorder = Recorder()  # also checks that the rows follow from the previous compaction
    plan = data.draw(plans(num_layers=NUM_LAYERS, extra=[recorder], verbatim=True))
    batch = data.draw(prompts(count=4, max_len=48))
    engine = Engine(model, plan=plan, slots=3, chunk=chunk)
    results = engine.generate(batch, max_new_tokens=20).results()

    for record in recorder.records:
        for one in record.compactions:
            layer, stack = engine.plan.layers[one.layer_idx], engine.stacks[one.layer_idx]
            num_rows = one.positions.shape[1]
            assert one.budget == layer.budget
            assert num_rows > layer.budget, "compaction without need"
            if layer.bounded:
                assert num_rows <= layer.budget + layer.buffer
            assert one.kept is not None
            assert one.kept.shape == (NUM_KV_HEADS, layer.budget)
            for kept in one.kept.tolist():
                assert set(range(stack.n_first)) <= set(kept)
                assert set(range(one.seq_len - stack.n_last, one.seq_len)) <= set(kept)
    assert_results_equal_recorded_compactions(recorder.records, results, engine)
    assert_first_layer_keys_match_tokens(recorder.records, batch, results, model)


def assert_results_equal_recorded_compactions(
    records: list[Record], results: list, engine: Engine
) -> None:
    """Compactions, evicted rows and peaks in the results equal the recorded ones."""
    recorded = Counter(
        (
            len({one.seq_len for one in record.compactions}),
            sum(one.positions.shape[1] - one.kept.shape[1] for one in record.compactions),
        )
        for record in records
    )
    reported = Counter((r.compactions, r.rows_evicted) for r in results if r.compactions)
    assert recorded == reported
    assert all(result.rows_evicted == 0 for result in results if not result.compactions)
    for result in results:
        held = result.prompt_len + len(result.tokens) - 1  # the last token is never fed back
        most = [
            min(layer.budget + layer.buffer, held) if layer.bounded else held
            for layer in engine.plan.layers
        ]
        assert result.peak_rows <= max(most)
        assert result.peak_bytes <= sum(most) * NUM_KV_HEADS * 2 * HEAD_DIM * 4
    peaks = [one.positions.shape[1] for record in records for one in record.compactions]
    assert max(peaks, default=0) <= max(result.peak_rows for result in results)


def assert_first_layer_keys_match_tokens(
    records: list[Record], batch: list[list[int]], results: list, model: torch.nn.Module
) -> None:
    """In the first layer a key depends only on its token and position, so compare each one."""
    all_keys = [
        first_layer_keys(model, [*prompt, *result.tokens])
        for prompt, result in zip(batch, results, strict=True)
    ]
    for record in records:
        seen = record.of_layer(0)
        assert not seen or any(is_subset_of(seen, keys) for keys in all_keys)


def first_layer_keys(model: torch.nn.Module, tokens: list[int]) -> torch.Tensor:
    cache = DynamicCache()
    with torch.inference_mode():
        model(torch.tensor([tokens]), **cache_argument(cache), use_cache=True)
    return cache.layers[0].keys[0]


def is_subset_of(seen: list, keys: torch.Tensor) -> bool:
    if seen[-1].seq_len > keys.shape[1]:
        return False
    return all(
        torch.allclose(
            one.keys,
            keys.gather(1, one.positions[..., None].expand(-1, -1, keys.shape[2])),
            atol=1e-5,
        )
        for one in seen
    )


def test_peak_memory_does_not_depend_on_length() -> None:
    model = shared_model()
    plan = Plan.uniform("streaming", budget=12, buffer=4)
    peaks = []
    for length in (20, 60):
        run = Engine(model, plan=plan, slots=2).generate([[3] * 40] * 3, max_new_tokens=length)
        assert {result.peak_rows for result in run.results()} == {16}
        peaks.append(run.report.peak_kv_bytes)
    row = NUM_KV_HEADS * (2 * HEAD_DIM * 4 + 8)  # keys, values, and an int64 position
    allocated = 2 * NUM_LAYERS * 16 * row
    one_layer = 2 * 12 * NUM_KV_HEADS * HEAD_DIM * 4
    assert peaks[0] == peaks[1]
    assert allocated < peaks[0] <= allocated + 2 * one_layer


def test_full_cache_keeps_prompt_and_continuation() -> None:
    run = Engine(shared_model(), plan=Plan.uniform("full"), slots=1).generate(
        [[3] * 20], max_new_tokens=10
    )
    (result,) = run.results()
    assert result.peak_rows == 29
    assert result.peak_bytes == 29 * NUM_LAYERS * NUM_KV_HEADS * 2 * HEAD_DIM * 4


def test_buffer_of_one_compacts_after_every_token() -> None:
    plan = Plan.uniform("streaming", budget=8, buffer=1)
    (result,) = Engine(shared_model(), plan=plan).generate([[3] * 9], max_new_tokens=11).results()
    # Nine prompt tokens fill the slab, and so does each of the ten that are fed back; after
    # the last forward the sequence is done and nothing is compacted any more.
    assert result.compactions == 10
    assert result.rows_evicted == 10 * NUM_LAYERS


def test_full_buffer_triggers_compaction() -> None:
    recorder = Recorder()
    plan = Plan.uniform("h2o", recorder, budget=10, buffer=6)
    Engine(shared_model(), plan=plan).generate([[3] * 12], max_new_tokens=30).results()
    (record,) = recorder.records
    assert [one.seq_len for one in record.of_layer(0)] == [16, 22, 28, 34, 40]
    assert {one.positions.shape[1] for one in record.of_layer(0)} == {16}


def test_h2o_compacts_every_n_tokens() -> None:
    recorder = Recorder()
    plan = Plan.uniform("h2o", recorder, budget=10, buffer=6, knobs={"h2o": {"every": 2}})
    Engine(shared_model(), plan=plan).generate([[3] * 11], max_new_tokens=8).results()
    (record,) = recorder.records
    assert [one.seq_len for one in record.of_layer(0)] == [12, 14, 16]


def test_published_snapkv_compacts_once_after_prefill() -> None:
    recorder = Recorder()
    plan = Plan.uniform(
        "snapkv", recorder, budget=10, buffer=2, knobs={"snapkv": {"phase": "prefill"}}
    )
    engine = Engine(shared_model(), plan=plan, chunk=7)
    (result,) = engine.generate([[3] * 30], max_new_tokens=25).results()
    (record,) = recorder.records
    assert [one.seq_len for one in record.of_layer(0)] == [30]
    assert (result.compactions, result.peak_rows) == (1, 10 + 24 if 10 + 24 > 30 else 30)


@attrs.define(eq=False)
class Due:
    """Returns the same answer for every sequence."""

    answer: bool

    @hookimpl
    def due(self, num_rows: Tensor) -> Tensor:
        return torch.full_like(num_rows, self.answer, dtype=torch.bool)


def compacted_at(due: bool, *, prompt_len: int, new_tokens: int, chunk: int) -> list[int]:
    """Tokens seen at each compaction, with a budget of 6 and a buffer of 10."""
    recorder = Recorder()  # also checks that every compaction evicts rows
    plan = Plan.uniform("streaming", Due(due), recorder, budget=6, buffer=10)
    engine = Engine(shared_model(num_layers=1), plan=plan, chunk=chunk)
    engine.generate([[3] * prompt_len], max_new_tokens=new_tokens).results()
    return [one.seq_len for record in recorder.records for one in record.compactions]


def test_sequence_within_budget_is_not_compacted_even_if_due() -> None:
    assert compacted_at(True, prompt_len=3, new_tokens=8, chunk=512) == [7, 8, 9]


def test_compaction_during_prefill_only_when_slab_is_full() -> None:
    assert compacted_at(True, prompt_len=14, new_tokens=3, chunk=4) == [14, 15]
    assert compacted_at(True, prompt_len=20, new_tokens=2, chunk=4) == [16, 20]


def test_full_slab_is_compacted_even_if_not_due() -> None:
    assert compacted_at(False, prompt_len=3, new_tokens=40, chunk=512) == [16, 26, 36]
