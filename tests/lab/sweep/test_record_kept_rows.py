"""A kept-rows record tells for every row and time whether the row was in the cache."""

from collections import abc
from typing import Any

import numpy as np
import pytest
from families import WINDOWED, family_model
from hypothesis import given
from hypothesis import strategies as st
from recorder import Scores
from strategies import plans, prompts
from tiny import shared_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import Engine, Plan, Sampling, hookimpl
from kvpolicy.engine.engine import Run
from kvpolicy.engine.extensions.base import Extension
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Step
from kvpolicy.engine.tracing import recording
from kvpolicy.errors import OutputError
from kvpolicy.lab.sweep.recording import KeptLayer, KeptRecord, KeptRows, record_kept_rows

chunks = st.sampled_from([1, 3, 7, 512])


class Seen(Extension):
    """What the cache itself held, looked up before every forward and at the end."""

    def __init__(self) -> None:
        #: (request, layer): tokens at each compaction.
        self.at: dict[tuple[int, int], list[int]] = {}
        #: (request, layer, tokens): positions that each KV head held, compactions done.
        self.held: dict[tuple[int, int, int], list[set[int]]] = {}
        self._due: dict[int, np.ndarray] = {}  # rows in each layer before a compaction

    def before_eviction(self, sequences: abc.Sequence[Sequence], due: np.ndarray) -> None:
        self._due |= {seq.id: self.cache.rows[:, seq.slot].copy() for seq in sequences}

    def before(self, step: Step) -> None:
        for seq in step.sequences:
            self.finish(seq)

    def finish(self, seq: Sequence) -> None:
        rows, seq_len = self.cache.rows[:, seq.slot], int(self.cache.seq_len[seq.slot])
        before = self._due.pop(seq.id, rows)
        for number, layer in enumerate(self.cache.layers):
            if rows[number] < before[number]:
                self.at.setdefault((seq.id, number), []).append(seq_len)
            held = layer.positions[seq.slot, :, : int(rows[number])]
            self.held[seq.id, number, seq_len] = [set(head.tolist()) for head in held]


def record(engine: Engine, chosen: Any, *arguments: Any, **options: Any) -> dict[int, KeptRows]:
    return taken(engine.generate(*arguments, **options), chosen)


def taken(run: Run, chosen: Any) -> dict[int, KeptRows]:
    with record_kept_rows(run, chosen) as recorder:
        return {result.id: recorder.pop(result) for result in run if result.id in recorder.requests}


def check_is_what_was_seen(request: int, rows: KeptRows, seen: Seen, num_layers: int) -> None:
    """Of every row, at every moment that was looked at."""
    assert [layer.layer for layer in rows.layers] == list(range(num_layers))
    for (number, layer_idx, num_tokens), held in seen.held.items():
        if number != request:
            continue
        layer = rows.layers[layer_idx]
        assert layer.at == seen.at.get((request, layer_idx), [])
        done = sum(at <= num_tokens for at in layer.at)
        oldest = 0 if layer.window is None else num_tokens - layer.window + 1
        for left_at, positions in zip(layer.left_at, held, strict=True):
            assert len(left_at) == len(rows.tokens)
            stated = {p for p in range(num_tokens) if left_at[p] == -1 or left_at[p] >= done}
            assert {p for p in stated if p >= oldest} == {p for p in positions if p >= oldest}
            if layer.window is None or num_tokens in layer.at:
                # Right after a compaction, hidden rows that stayed are told as well.
                assert stated == positions


# --- the oracle -------------------------------------------------------------------------------


@pytest.mark.nightly
@given(
    st.data(),
    plans(num_layers=2),
    prompts(count=5, max_len=60),
    st.integers(1, 4),
    chunks,
)
def test_a_record_equals_the_cache_under_any_plan(
    data: st.DataObject, plan: Plan, prompts: list[list[int]], slots: int, chunk: int
) -> None:
    """Prompts longer than the slabs, chunked; slots that change hands; rows that are rewritten."""
    chosen = data.draw(st.sets(st.integers(0, 4)))
    seen, model = Seen(), shared_model(num_layers=2)
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk, extensions=[lambda: seen])
    records = record(engine, chosen, prompts, max_new_tokens=21)
    assert records.keys() == chosen
    for request, rows in records.items():
        assert rows.num_prompt == len(prompts[request])
        assert len(rows.tokens) == len(prompts[request]) + 21
        check_is_what_was_seen(request, rows, seen, num_layers=2)


@pytest.mark.nightly
@given(
    st.sampled_from(WINDOWED),
    st.sampled_from([5, 11, 17]),
    plans(num_layers=2),
    prompts(count=3, max_len=40),
    chunks,
)
def test_a_record_equals_the_cache_where_windows_slide(
    family: str, window: int, plan: Plan, prompts: list[list[int]], chunk: int
) -> None:
    seen, model = Seen(), family_model(family, window=window)
    engine = Engine(model, plan=plan, slots=2, chunk=chunk, extensions=[lambda: seen])
    records = record(engine, range(3), prompts, max_new_tokens=17)
    for request, rows in records.items():
        windows = [layer.window for layer in rows.layers]
        assert windows == [shape.sliding_window for shape in engine.adapter.layer_shapes()]
        check_is_what_was_seen(request, rows, seen, num_layers=2)


def test_a_record_equals_the_cache_where_pads_are_stored() -> None:
    plan = Plan.uniform("h2o", budget=16, buffer=4, padding="stored")
    seen = Seen()
    engine = Engine(shared_model(), plan=plan, slots=3, extensions=[lambda: seen])
    records = record(engine, range(3), [[1] * 4, [2] * 9, [3] * 30], max_new_tokens=30)
    for request, rows in records.items():
        check_is_what_was_seen(request, rows, seen, num_layers=2)
        assert rows.layers[0].at


# --- how requests end -------------------------------------------------------------------------


PROMPTS = [[1, 2, 3] * 9, [4, 5] * 9, [6, 7, 8]]
PLAN = Plan.uniform("h2o", budget=14, buffer=4)


def test_a_request_that_is_cancelled_has_its_rows_until_then() -> None:
    seen = Seen()
    engine = Engine(shared_model(), plan=PLAN, slots=2, extensions=[lambda: seen])
    run = engine.generate(PROMPTS, max_new_tokens=30)
    with record_kept_rows(run, range(3)) as recorder:
        for _ in range(12):
            run.step()
        run.cancel(0)  # being served
        run.cancel(2)  # waiting
        records = {result.id: (result, recorder.pop(result)) for result in run}
    served, rows = records[0]
    assert len(rows.tokens) == 27 + len(served.tokens) < 27 + 30
    check_is_what_was_seen(0, rows, seen, num_layers=2)
    assert rows.layers[0].at
    waiting = records[2][1]
    assert waiting.num_prompt == len(waiting.tokens) == 3
    assert [layer.at for layer in waiting.layers] == [[], []]


class FailsOnce:
    """Evicts half of what it should, and raises, at the second compaction of one sequence."""

    @hookimpl
    def evict(self, rows: Any, keep: Tensor, memory: Any, layer_idx: int) -> None:
        for notes in memory.of(self):
            notes[layer_idx] = notes.get(layer_idx, 0) + 1
            if notes[layer_idx] == 2 and rows.positions[0, 0, 0] > 0:
                msg = "no more"
                raise ValueError(msg)


def test_a_failed_eviction_evicts_nothing() -> None:
    newest = Scores(lambda positions: positions.double())
    plan = Plan.uniform(newest, FailsOnce(), budget=14, buffer=4)
    seen, options = Seen(), {"slots": 1, "on_hook_error": "answer"}
    engine = Engine(shared_model(), plan=plan, **options, extensions=[lambda: seen])
    run = engine.generate(PROMPTS[:1], max_new_tokens=30)
    rows = taken(run, [0])[0]
    assert run.report.num_errors == 1
    assert [len(layer.at) for layer in rows.layers] == [1, 1]
    assert rows.layers[1].at == seen.at[0, 1]


def test_a_request_that_is_refused_has_an_empty_record() -> None:
    engine = Engine(shared_model(), plan=PLAN)
    assert record(engine, [1], [[1], []], max_new_tokens=3) == {1: KeptRows(0, [], [])}


def test_attempts_at_one_prompt_have_rows_of_their_own() -> None:
    seen = Seen()
    engine = Engine(shared_model(), plan=PLAN, slots=3, extensions=[lambda: seen])
    drawn = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    records = record(engine, [0, 2], [PROMPTS[0]] * 3, max_new_tokens=20, sampling=drawn)
    assert records.keys() == {0, 2}
    assert records[0].tokens != records[2].tokens
    for request, rows in records.items():
        check_is_what_was_seen(request, rows, seen, num_layers=2)


def test_other_runs_of_the_engine_are_not_recorded() -> None:
    engine = Engine(shared_model(), plan=PLAN, slots=2)
    alone = record(engine, [0], PROMPTS[:2], max_new_tokens=20)
    run, other = (engine.generate(one, max_new_tokens=20) for one in (PROMPTS[:2], PROMPTS[::-1]))
    with record_kept_rows(run, [0]) as recorder:
        records = {}
        while not run.done:
            other.step()
            for result in run.step().results:
                if result.id == 0:
                    records[0] = recorder.pop(result)
    assert records == alone


# --- tokens, and who pays ---------------------------------------------------------------------


def test_the_texts_are_the_prompt_and_the_answer() -> None:
    tokenizer = tiny_tokenizer()
    engine = Engine(shared_model(), tokenizer, PLAN)
    records = record(engine, [0], ["a b c"], max_new_tokens=12, stop_ids=[])
    (result,) = engine.generate(["a b c"], max_new_tokens=12, stop_ids=[]).results()
    assert records[0].num_prompt == 5
    assert "".join(records[0].tokens[:5]) == "a b c"
    assert "".join(records[0].tokens[5:]) == tokenizer.decode(result.tokens)


def test_without_a_tokenizer_texts_are_ids() -> None:
    engine = Engine(shared_model(), plan=PLAN)
    assert record(engine, [0], [[7, 8]], max_new_tokens=1)[0].tokens[:2] == ["<7>", "<8>"]


@pytest.mark.nightly
@given(prompts(count=3), plans(num_layers=2))
def test_tokens_are_the_same_with_and_without_a_record(
    prompts: list[list[int]], plan: Plan
) -> None:
    engine = Engine(shared_model(), plan=plan, slots=2)
    plain = engine.generate(prompts, max_new_tokens=20).results()
    run = engine.generate(prompts, max_new_tokens=20)
    with record_kept_rows(run, [0, 2]):
        kept = run.results()
    assert [result.tokens for result in kept] == [result.tokens for result in plain]


def test_policies_are_asked_as_without_a_record() -> None:
    """About several layers together: else they would take longer in cells that are recorded."""
    asked: list[tuple[int, ...]] = []

    class Newest:
        @hookimpl
        def score(self, positions: Tensor) -> Tensor:
            asked.append(tuple(positions.shape))
            return positions.double()

    engine = Engine(shared_model(), plan=Plan.uniform(Newest(), budget=14, buffer=4), slots=2)
    engine.generate(PROMPTS, max_new_tokens=20).results()
    alone, asked[:] = list(asked), []
    assert max(rows for rows, *_ in alone) > 1, "several layers"
    assert record(engine, [0], PROMPTS, max_new_tokens=20)[0].layers[0].at
    assert asked == alone


def test_a_run_is_recorded_and_traced() -> None:
    engine = Engine(shared_model(), plan=PLAN)
    alone = record(engine, [0], PROMPTS, max_new_tokens=20)
    with recording(engine) as trace:
        assert record(engine, [0], PROMPTS, max_new_tokens=20) == alone
    assert trace.num_calls


def test_popped_rows_are_forgotten() -> None:
    engine = Engine(shared_model(), plan=PLAN)
    run = engine.generate([[1]], max_new_tokens=2)
    with record_kept_rows(run, [0]) as recorder:
        (result,) = run.results()
        assert recorder.pop(result).tokens
        assert recorder.pop(Result(0)).tokens == []


# --- on disk ----------------------------------------------------------------------------------


def test_a_record_can_be_read_back() -> None:
    rows = KeptRows(1, ["a", "\ufffd"], [KeptLayer(0, None, [1], [[0, -1]])])
    kept = KeptRecord.of(rows, key="k", cell="c", item=3, attempt=1)
    record = kept.to_dict()
    assert list(record) == ["key", "cell", "item", "attempt", "num_prompt", "tokens", "layers"]
    assert KeptRecord.from_dict(record) == kept


@pytest.mark.parametrize("change", [{"more": 1}, {"layers": [{"layer": 0}]}, {"tokens": 3}])
def test_a_record_with_other_fields_is_refused(change: dict[str, Any]) -> None:
    kept = KeptRecord.of(KeptRows(0, [], []), key="k", cell="c", item=3, attempt=1)
    with pytest.raises(OutputError, match="kept"):
        KeptRecord.from_dict(kept.to_dict() | change)
