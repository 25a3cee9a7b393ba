"""The benchmark: fair turns, ratios within a round, results that continue, and the command."""

import json
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shell import Shell, refusal
from tiny import tiny_model

from kvpolicy.errors import OutputError
from kvpolicy.lab.bench import kvpress, turns
from kvpolicy.lab.bench.contender import (
    FIRST_PLAN,
    FULL,
    GENERATE,
    KVPRESS,
    MODEL_ALONE,
    VLLM,
    Contender,
    Decode,
    Machine,
    Measurement,
    Text,
)
from kvpolicy.lab.bench.contenders import build_contenders
from kvpolicy.lab.bench.continuous import CONTINUOUS
from kvpolicy.lab.bench.kvpress import presses_for
from kvpolicy.lab.bench.limit import LIMIT, ModelSize
from kvpolicy.lab.bench.max_batch import best_batch, largest_batch
from kvpolicy.lab.bench.memory import measure_memory, resident_bytes
from kvpolicy.lab.bench.models import SHAPES, kv_row_bytes, random_model, weight_bytes
from kvpolicy.lab.bench.summary import complete_rounds, summarize
from kvpolicy.lab.bench.turn_file import open_turns
from kvpolicy.lab.bench.turns import Job, Turn, jobs_of, measure
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

WORK = Text(batch=2, prompt_min=3, prompt_max=5, new_tokens=5, seed=0)
STEP = Decode(batch=2, held=30, steps=3)
IN_FP32 = 4
SIZE = ModelSize(weight_bytes=1000, num_weights=250, row_bytes=10)


def measurement(step_s: float | list[float], **changes: Any) -> Measurement:
    steps = step_s if isinstance(step_s, list) else [step_s] * 3
    plain: dict[str, Any] = {"kv_bytes": 1, "read_bytes": 0}
    return Measurement(steps_s=tuple(steps), **(plain | changes))


def named(name: str, run: Callable[..., Measurement] | None = None, **fields: Any) -> Contender:
    run = run or (lambda work: measurement(1.0))
    return Contender(name, run, run, **fields)


def one_round(number: int, found: dict[str, Measurement], work: str = WORK.name) -> list[Turn]:
    return [Turn(number, (name, work), one) for name, one in found.items()]


def cells(*stacks: str, budget: int = 8, buffer: int = 4, num_layers: int = 2) -> list[Cell]:
    return build_cells(
        [Series.from_stack(stack) for stack in stacks],
        num_layers=num_layers,
        budgets=[budget],
        buffer=buffer,
    )


# Turns


@given(st.integers(1, 9), st.integers(1, 50), st.integers(0, 50), st.integers(0, 99))
def test_prompts_span_the_requested_lengths(batch: int, low: int, more: int, seed: int) -> None:
    workload = Text(batch, low, low + more, new_tokens=3, seed=seed)
    prompts = workload.prompts(61)
    lengths = sorted(map(len, prompts))
    assert len(prompts) == batch
    assert lengths[0] == low
    assert lengths[-1] == (low + more if batch > 1 else low)
    assert prompts == workload.prompts(61)
    assert all(0 <= token < 61 for prompt in prompts for token in prompt)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 40), st.integers(0, 99))
def test_held_texts_begin_with_shorter_ones(batch: int, held: int, more: int, seed: int) -> None:
    """So that a cache of prefixes has most of a text after a shorter one was measured."""
    short = Decode(batch, held, 1, seed).prompts(61)
    long = Decode(batch, held + more, 1, seed).prompts(61)
    assert [len(prompt) for prompt in short] == [held] * batch
    assert [prompt[:held] for prompt in long] == short


def test_all_jobs_run_in_every_round_in_rotating_order() -> None:
    ran: list[tuple[str, Any]] = []

    def runs(name: str) -> Contender:
        def run(work: Any) -> Measurement:
            ran.append((name, work))
            return measurement(1.0)

        return named(name, run)

    jobs = jobs_of([runs("a"), runs("b"), runs("c")], [WORK])
    found = list(measure(jobs, rounds=3))
    orders = [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert [turn.job for turn in found] == [(n, WORK.name) for order in orders for n in order]
    assert [turn.round for turn in found] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert ran == [(name, WORK) for order in orders for name in order]
    ran.clear()
    done = {turn.key for turn in found[:4]}
    assert list(measure(jobs, rounds=3, done=done)) == found[4:], "measured turns are left out"
    assert len(ran) == 5


def test_contenders_do_what_they_can() -> None:
    short, long = Decode(1, 10, 1), Decode(1, 20, 1)
    few = Contender("few", lambda _: measurement(1.0), most_held=10)
    jobs = jobs_of([named("all"), few], [short, long, WORK])
    names = [(job.contender.name, job.work) for job in jobs]
    assert names == [("all", short), ("few", short), ("all", long), ("all", WORK)]


@given(st.integers(1, 60), st.integers(1, 40))
def test_steps_are_rounded_up_to_whole_periods(steps: int, period: int) -> None:
    asked: list[int] = []

    def decode(work: Decode) -> Measurement:
        asked.append(work.steps)
        return measurement(1.0)

    Contender("x", decode, period=period).run(Decode(1, 5, steps))
    assert asked[0] % period == 0
    assert steps <= asked[0] < steps + period


# The file of turns


def test_a_folder_of_turns_continues(tmp_path: Path) -> None:
    first = Turn(0, ("a", "w"), measurement([1.0, 2.5], policy_share=0.25, compacted=(3, 0)))
    second = Turn(0, ("b", "w"), measurement(4.0, machine=Machine(2.0, 3.0)))
    described = {"shape": {"name": "tiny"}, "threads": 2}
    with open_turns(tmp_path / "new" / "folder", described) as file:
        file.add(first)
        file.add_batch("a", 7)
        file.add_batch("b", None)
    lines = tmp_path / "new" / "folder" / "turns.jsonl"
    with lines.open("a") as torn:
        torn.write('{"round": 0, "contender": "b", "wo')  # killed in the middle of a line
    with open_turns(tmp_path / "new" / "folder", described) as file:
        assert file.turns == [first]
        assert file.batches == {"a": 7, "b": None}
        file.add(second)
    with open_turns(tmp_path / "new" / "folder", described) as file:
        assert file.turns == [first, second]
    message = "threads is 2, and here it is 4"
    with (
        pytest.raises(OutputError, match=message),
        open_turns(tmp_path / "new" / "folder", described | {"threads": 4}),
    ):
        pass


# Best batches


@given(st.integers(0, 5000))
def test_the_largest_batch_fits_and_is_at_most_an_eighth_too_small(most: int) -> None:
    tried: list[int] = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= most

    found = largest_batch(fits)
    assert found <= most
    assert most - found < max(1, found // 8)
    assert len(tried) == len(set(tried)), "nothing is measured twice"


def test_the_fastest_batch_within_memory_is_chosen() -> None:
    """Ten bytes a sequence; sixteen sequences are the fastest, and the memory ends at 25."""

    def decode(work: Decode) -> Measurement:
        if work.batch > 25:
            msg = "DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"
            raise RuntimeError(msg)
        seconds = 1.0 if work.batch <= 16 else 2.0
        return measurement(seconds, kv_bytes=10 * work.batch)

    contender = Contender("x", decode)
    assert best_batch(contender, STEP, 1e9) == 16
    assert best_batch(contender, STEP, 45) == 4
    assert best_batch(contender, STEP, 5) is None

    def broken(work: Decode) -> Measurement:
        msg = "another error"
        raise RuntimeError(msg)

    with pytest.raises(RuntimeError, match="another error"):
        best_batch(Contender("x", broken), STEP, 1e9)


# Results


def jobs_at(contenders: list[Contender], *works: Any) -> list[Job]:
    return jobs_of(contenders, works or [WORK])


def test_ratios_are_paired_by_round() -> None:
    """Both get slower from round to round, and the ratio is 2 in each."""
    who = [
        named(GENERATE),
        named("full"),
        named("small", budget=16, references={GENERATE: GENERATE, KVPRESS: "other"}),
        named("other"),
        named("packed", references={GENERATE: "full", "nobody": "absent"}),
    ]
    found: list[Turn] = []
    for number, step_s in enumerate([0.5, 1.0, 5.0]):
        small = measurement(step_s / (3 + number), policy_share=0.1 * number, kv_bytes=number)
        of_round = {
            GENERATE: measurement(step_s),
            "full": measurement(step_s / 2, policy_share=0.0, prefill_s=2.0),
            "small": small,
            "other": measurement(2 * step_s),
            "packed": measurement(step_s / 8),
        }
        found += one_round(number, of_round)
    generate, full, small, other, packed = summarize(found, jobs_at(who), SIZE)
    spreads = [attrs.astuple(one.ratios[GENERATE]) for one in (generate, full, small)]
    assert spreads[:2] == [(1, 1, 1), (2, 2, 2)]
    assert spreads[2] == pytest.approx((4, 3, 5))
    assert packed.ratios[GENERATE].median == pytest.approx(4), "like stands beside like"
    assert list(packed.ratios) == [GENERATE], "who was not measured is not compared with"
    assert small.ratios[KVPRESS].median == pytest.approx(8)
    assert list(other.ratios) == [GENERATE]
    assert full.rounds == pytest.approx((8, 4, 0.8)), "two sequences in half the step's seconds"
    assert full.decode_tok_s == pytest.approx(4)
    assert small.policy_share == pytest.approx(0.1)
    assert generate.policy_share is None
    assert (full.budget, small.budget, small.kv_bytes) == (None, 16, 2)
    assert full.prefill_tok_s == pytest.approx((3 + 5) / 2.0)
    assert (full.step_ms, full.step_p95_ms) == pytest.approx((500, 500))
    spread = (full.mean_ms.median, full.mean_ms.low, full.mean_ms.high)
    assert spread == pytest.approx((500, 250, 2500))


def test_works_and_batches_have_ratios_of_their_own() -> None:
    """Speeds are compared at one work; at best batches, tokens count and not steps."""
    short, long = Decode(2, 10, 3), Decode(4, 20, 3)
    mine, theirs = named("mine"), named(GENERATE)
    other_batch = Decode(8, 20, 3)
    jobs = [Job(theirs, short), Job(mine, short), Job(theirs, long), Job(mine, other_batch)]
    found = [
        *one_round(0, {GENERATE: measurement(3.0), "mine": measurement(1.0)}, short.name),
        *one_round(0, {GENERATE: measurement(1.0), "mine": measurement(1.0)}, long.name),
    ]
    results = summarize(found, jobs, SIZE)
    assert [one.ratios[GENERATE].median for one in results] == pytest.approx([1, 3, 1, 2])
    assert [one.held for one in results] == [10, 10, 20, 20]
    assert [one.batch for one in results] == [2, 2, 4, 8]


def test_an_incomplete_round_does_not_count() -> None:
    jobs = jobs_at([named(GENERATE), named("full")])
    whole = one_round(0, {GENERATE: measurement(0.25), "full": measurement(0.25)})
    more = summarize([*whole, *one_round(1, {GENERATE: measurement(9.0)})], jobs, SIZE)
    assert [one.rounds for one in more] == [(8.0,), (8.0,)]
    assert summarize(whole[:1], jobs, SIZE) == []
    assert len(complete_rounds(whole, jobs)) == 1


def percentile(values: list[float], percent: float) -> float:
    """Between the two nearest of the sorted values, in proportion."""
    ordered = list(values)
    for i in range(len(ordered)):
        for j in range(i):
            if ordered[i] < ordered[j]:
                ordered[i], ordered[j] = ordered[j], ordered[i]
    place = percent / 100 * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


STEPS = st.lists(st.floats(1e-4, 10), min_size=1, max_size=200)


@given(STEPS)
def test_latencies_equal_a_plain_oracle(steps: list[float]) -> None:
    turns = one_round(0, {GENERATE: measurement(steps)})
    (found,) = summarize(turns, jobs_at([named(GENERATE)]), SIZE)
    assert found.step_ms == pytest.approx(1e3 * percentile(steps, 50))
    assert found.step_p95_ms == pytest.approx(1e3 * percentile(steps, 95))
    assert found.decode_tok_s == pytest.approx(2 * len(steps) / sum(steps))


@given(STEPS)
def test_a_curve_goes_through_all_steps(steps: list[float]) -> None:
    turns = one_round(0, {GENERATE: measurement(steps)})
    (found,) = summarize(turns, jobs_at([named(GENERATE)]), SIZE)
    places = [place for place, _ in found.curve]
    assert places == sorted(places)
    if len(steps) <= 64:
        assert places == [3 + i for i in range(len(steps))], "the third token, the fourth, ..."
        assert [ms for _, ms in found.curve] == pytest.approx([1e3 * one for one in steps])
        return
    assert len(places) == 64
    # Equal parts: of each, the middle of its steps and their median.
    edges = [round(i * len(steps) / 64) for i in range(65)]
    for (place, ms), first, last in zip(found.curve, edges, edges[1:], strict=False):
        assert place == 3 + (first + last - 1) / 2
        assert ms == pytest.approx(1e3 * percentile(steps[first:last], 50))


def test_the_share_of_the_limit_is_the_least_time_by_the_time() -> None:
    """Reading 1,000 bytes of weights takes 10 s, multiplying 2 x 2 x 250 takes 5 or 20."""
    mine = measurement(64.0, read_bytes=60)
    for speed, weights_s in ((200.0, 10), (50.0, 20)):
        limit = measurement(99.0, read_bytes=300, machine=Machine(100.0, speed))
        found = summarize(
            one_round(0, {LIMIT: limit, "mine": mine}), jobs_at([named(LIMIT), named("mine")]), SIZE
        )[1]
        assert found.limit_ms == pytest.approx(1e3 * (weights_s + 0.6))
        assert found.limit_share == pytest.approx((weights_s + 0.6) / 64)
        assert found.rows_mean == pytest.approx(60 / 10 / 2)
    # A work at which the limit was not measured has that of another one.
    other = Job(named("mine"), Decode(4, 10, 3))
    turns = [
        *one_round(0, {LIMIT: limit}),
        *one_round(0, {"mine": mine}, other.work.name),
    ]
    (_, alone) = summarize(turns, [*jobs_at([named(LIMIT)]), other], SIZE)
    assert alone.limit_ms == pytest.approx(1e3 * (2 * 4 * 250 / 50 + 0.6))


def test_a_policy_costs_what_the_first_does_not() -> None:
    who = [
        named("oldest", references={FIRST_PLAN: "oldest"}),
        named("mine", references={FIRST_PLAN: "oldest"}),
    ]
    found: list[Turn] = []
    for number, step_s in enumerate([4.0, 5.0, 8.0]):
        of_round = {
            "oldest": measurement(3.0),
            "mine": measurement([step_s, step_s, step_s], compacted=(0, 0, 0)),
        }
        found += one_round(number, of_round)
    oldest, mine = summarize(found, jobs_at(who), SIZE)
    assert mine.policy_cost is not None
    assert attrs.astuple(mine.policy_cost) == pytest.approx((2 / 5, 1 / 4, 5 / 8))
    assert oldest.policy_cost is not None
    assert oldest.policy_cost.median == 0
    assert mine.compacting_ratio is None, "no step compacts"
    # At batches of their own, the difference says nothing about the policy.
    jobs = [Job(who[0], Decode(1, 10, 3)), Job(who[1], Decode(2, 10, 3))]
    turns = one_round(0, of_round, "10 held")
    assert [one.policy_cost is None for one in summarize(turns, jobs, SIZE)] == [False, True]


def test_steps_that_compact_are_compared_with_the_others() -> None:
    steps = measurement([1.0, 5.0, 2.0, 7.0, 3.0], compacted=(0, 2, 0, 1, 0))
    (found,) = summarize(one_round(0, {"mine": steps}), jobs_at([named("mine")]), SIZE)
    assert found.compacting_ratio is not None
    assert found.compacting_ratio.median == 6.0 / 2.0
    assert found.compactions == 3


# kvpress


def fake_kvpress() -> tuple[ModuleType, list[Any]]:
    made: list[Any] = []

    class ScorerPress:
        pass

    @dataclass
    class SnapKVPress(ScorerPress):
        compression_ratio: float = 0.0
        window_size: int = 64

    class KnormPress:  # the right name, but no scorer
        pass

    class DecodingPress:
        def __init__(self, **given: Any) -> None:
            made.append(given)

        @contextmanager
        def __call__(self, model: Any) -> Iterator[None]:
            yield

    module = ModuleType("kvpress")
    for one in (ScorerPress, SnapKVPress, KnormPress, DecodingPress):
        setattr(module, one.__name__, one)
    return module, made


def contenders_of(mine: list[Cell]) -> tuple[Contender, ...]:
    found = build_contenders({"": tiny_model()}, mine, without=[LIMIT, CONTINUOUS])
    assert found.absent == {}
    return found.all


def test_a_press_gets_budget_interval_and_knobs_of_its_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, made = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    mine = cells("snapkv", "knorm", "h2o", "snapkv+protect", budget=24, buffer=6)
    contenders = contenders_of(mine)
    names = [one.name for one in contenders]
    assert names[:4] == [MODEL_ALONE, GENERATE, "snapkv", "kvpress SnapKVPress"]
    assert names[4:] == ["knorm", "h2o", "snapkv+protect"]
    assert [one.references.get(KVPRESS) for one in contenders[2:4]] == ["kvpress SnapKVPress", None]
    assert contenders[3].period == 6
    done = contenders[3].run(Decode(2, 60, 4))
    row = kv_row_bytes(tiny_model())
    assert done.read_bytes == 2 * row * (24 + 1 + 3.5), "its budget is held, not the text"
    (given,) = made
    assert (given["target_size"], given["compression_interval"]) == (24, 6)
    assert given["base_press"].window_size == 8, "the engine's, not 64"


def test_plans_that_differ_in_knobs_only_have_separate_presses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, made = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    plans = {
        label: {"stack": [{"policy": "snapkv", "window_size": size}]}
        for label, size in (("wide", 8), ("narrow", 4))
    }
    series = [Series(label, plan) for label, plan in plans.items()]
    mine = build_cells(series, num_layers=2, budgets=[24], buffer=6)
    contenders = contenders_of(mine)
    presses = ["kvpress SnapKVPress (wide)", "kvpress SnapKVPress (narrow)"]
    names = [MODEL_ALONE, GENERATE, "wide", presses[0], "narrow", presses[1]]
    assert [one.name for one in contenders] == names
    jobs = jobs_at(list(contenders))
    found = {one.name: one for one in summarize(measure(jobs, rounds=1), jobs, SIZE)}
    assert list(found) == names, "the round is complete"
    assert [contender.references[KVPRESS] for contender in contenders[2::2]] == presses
    assert found["wide"].ratios[KVPRESS].median > 0
    assert {one["base_press"].window_size for one in made} == {8, 4}


def test_contenders_with_equal_names_are_refused(kvpolicy: Shell, tmp_path: Path) -> None:
    """Results are looked up by name."""
    for folder, size in (("a", 2), ("b", 4)):
        (tmp_path / folder).mkdir()
        plan = f'stack = [{{policy = "snapkv", window_size = {size}}}]\n'
        (tmp_path / folder / "x.toml").write_text(plan)
    plans = [word for folder in "ab" for word in ("--plan", tmp_path / folder / "x.toml")]
    output = tmp_path / "speed"
    message = refusal(kvpolicy("bench", *OPTIONS, "--rounds", 1, *plans, "--output", output))
    assert "2 contenders called 'x'" in message
    assert "rename one" in message
    assert not (output / "bench.json").exists()


def test_a_missing_kvpress_is_reported_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    found = build_contenders({"": tiny_model()}, cells("knorm"), without=[LIMIT, CONTINUOUS])
    assert [one.name for one in found.all] == [MODEL_ALONE, GENERATE, "knorm"]
    assert "cannot be imported" in found.absent["kvpress"]
    assert "from a clone of kvpolicy: pip install -e '.[benchmarks]'" in found.absent["kvpress"]


def test_a_kvpress_that_needs_other_transformers_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can be imported with any transformers, and fails when it decodes."""
    library, _ = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    lines = ["torch>=2", "transformers<4,>=3; python_version > '3'"]
    monkeypatch.setattr(kvpress, "requires", lambda _: lines)
    absent = presses_for(tiny_model(), cells("snapkv"))[1]
    assert absent is not None
    assert "transformers<4,>=3" in absent
    monkeypatch.setattr(kvpress, "requires", lambda _: ["transformers>=3"])
    assert presses_for(tiny_model(), cells("snapkv"))[1] is None


@pytest.mark.filterwarnings("ignore")  # from its imports
def test_kvpress_itself_stays_within_budget_and_interval() -> None:
    model = tiny_model()
    presses, absent = presses_for(model, cells("knorm", budget=12, buffer=4))
    if absent is not None:
        pytest.skip(absent)
    (mine,) = presses.values()
    done = mine.run(Text(2, 2, 4, 40))
    row = 2 * kv_row_bytes(model)
    assert len(done.steps_s) == 38
    # It counts steps, not rows: a cache may exceed budget and interval by what it began with.
    assert row * 12 < done.kv_bytes <= row * (12 + 4)
    assert done.read_bytes < done.kv_bytes
    held = mine.run(Decode(2, 100, 9))
    assert len(held.steps_s) == 12, "three intervals"
    assert row * 12 < held.kv_bytes <= row * (12 + 4 + 1)


def test_weights_in_another_form_are_contenders_of_their_own() -> None:
    model = tiny_model()
    found = build_contenders({"": model, "packed": model}, cells("knorm"), without=["kvpress"])
    names = [one.name for one in found.all]
    mine = [MODEL_ALONE, GENERATE, CONTINUOUS, "knorm"]
    mine = [name for name in mine if name not in found.absent]
    assert names == [LIMIT, *mine, *(f"{name}, packed" for name in mine)]
    of_packed = found.all[-1].references
    assert of_packed == {
        GENERATE: "generate, packed",
        MODEL_ALONE: "model alone, packed",
        VLLM: "vLLM",  # its weights have one form
    }


def test_plans_are_compared_with_the_full_cache_and_as_many_of_the_newest_rows() -> None:
    given_cells = [*cells("full", "streaming", "knorm"), *cells("h2o", budget=12)]
    found = build_contenders({"": tiny_model()}, given_cells, without=["kvpress"])
    references = {one.name: one.references for one in found.all}
    assert references["knorm"][FIRST_PLAN] == "streaming"
    assert references["knorm"][FULL] == references["h2o"][FULL] == "full"
    assert FIRST_PLAN not in references["streaming"], "it is the first"
    assert FIRST_PLAN not in references["h2o"], "no other keeps as many rows"


# Models


@pytest.mark.parametrize("name", ["tiny", "5m"])
def test_a_shape_counts_what_its_model_has(name: str) -> None:
    shape = SHAPES[name]
    model = random_model(shape, 0, max_positions=64)
    assert model.config.eos_token_id is None
    in_bf16 = random_model(shape, 0, max_positions=64, dtype="bfloat16")
    assert {one.dtype for one in in_bf16.parameters()} == {torch.bfloat16}
    assert weight_bytes(in_bf16) * 2 == weight_bytes(model)


def test_shapes_are_as_large_as_their_names_say() -> None:
    def num_parameters(name: str) -> int:
        return random_model(SHAPES[name], 0, max_positions=64, device="meta").num_parameters()

    assert num_parameters("100m") == pytest.approx(100e6, rel=0.01)
    assert num_parameters("30m") == pytest.approx(30e6, rel=0.1)
    assert num_parameters("8b") == 8_030_261_248, "Llama-3.1-8B's"


@pytest.mark.parametrize("tied", [True, False])
def test_an_untied_embedding_does_not_count_as_read(tied: bool) -> None:
    vocab, hidden, inner, kv = 61, 32, 64, 16
    model = tiny_model(tie_word_embeddings=tied)
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    assert weight_bytes(model) == 4 * (2 * layer + hidden + vocab * hidden)


def test_weights_depend_on_the_seed_only() -> None:
    before = torch.get_rng_state()
    one, again, other = (random_model(SHAPES["tiny"], s, max_positions=64) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    pairs = zip(one.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(left, right) for left, right in pairs)
    assert not torch.equal(next(one.parameters()), next(other.parameters()))


# Memory


def test_memory_is_constant_while_a_text_grows() -> None:
    model = tiny_model()
    small, full = cells("knorm", "full")
    readings = list(measure_memory(model, small, [1, 2, 3], [20, 40, 80]))
    assert [one.new_tokens for one in readings] == [20, 40, 80]
    assert len({one.kv_bytes for one in readings}) == 1
    row = 2 * 2 * 2 * 8 * IN_FP32
    assert [one.full_bytes for one in readings] == [row * (3 + n) for n in (20, 40, 80)]
    assert all(one.rss_bytes > 1e7 and one.step_ms > 0 for one in readings)
    (reading,) = measure_memory(model, full, [1, 2, 3], [80])
    positions = 2 * 2 * 8
    assert reading.kv_bytes == (row + positions) * (3 + 80 + 1)


def test_resident_bytes_grow_with_touched_pages() -> None:
    # Not a tensor: that may reuse memory that the process has freed but not returned.
    before, size = resident_bytes(), 64 * 2**20
    with mmap.mmap(-1, size) as held:
        for page in range(0, size, mmap.PAGESIZE):
            held[page] = 1
        assert resident_bytes() - before > 0.9 * size


# The command

SIZES = ("--shape", "tiny", "--batch", 2, "--prompt-min", 4, "--prompt-max", 9)
OPTIONS = (*SIZES, "--new-tokens", 14, "--budget", 8, "--buffer", 4, "--steps", 2)
FEW = ("--without", "generate_batch,kvpress")


@pytest.mark.needs_reasoner
def test_the_command_prints_writes_and_continues(kvpolicy: Shell, tmp_path: Path) -> None:
    output, plot = tmp_path / "speed", tmp_path / "bench.svg"
    more = ("--policies", "full,streaming", "--lengths", "12,20", *FEW, "--output", output)
    found = kvpolicy("bench", *OPTIONS, *more, "--rounds", 1, "--plot", plot, "--json")
    assert found.status == 0, found.err
    assert found.out == (output / "bench.json").read_text(encoding="utf-8")
    names = [LIMIT, MODEL_ALONE, GENERATE, "full cache", "StreamingLLM"]
    works = ["12 held", "20 held"]
    standings = found.json["standings"]
    assert [(one["work"], one["name"]) for one in standings] == [
        (work, name) for work in works for name in names
    ]
    for one in standings:
        for ratio in one["ratios"].values():
            assert ratio["low"] <= ratio["median"] <= ratio["high"]
        assert 0 < one["step_ms"] <= one["step_p95_ms"]
        assert one["limit_share"] > 0
        assert (one["compactions"] or 0) == (4 if one["name"] == "StreamingLLM" else 0)
    assert found.json["shape"]["name"] == "tiny"
    assert plot.read_text(encoding="utf-8").startswith("<?xml")
    turns = (output / "turns.jsonl").read_text(encoding="utf-8").splitlines()
    assert len(turns) == 1 + 10

    again = kvpolicy("bench", *OPTIONS, *more, "--rounds", 2)
    assert again.status == 0, again.err
    assert "round 2" in again.err
    assert "round 1" not in again.err, "its turns were kept"
    for word in (
        "ms per step",
        "speed / generate's",
        "12 held",
        "20 held",
        "compactions in",
    ):
        assert word in again.out
    message = refusal(kvpolicy("bench", *OPTIONS, *more, "--rounds", 2, "--seed", 1))
    assert "turns of another benchmark" in message


def test_texts_and_memory_have_tables(kvpolicy: Shell, tmp_path: Path) -> None:
    plain = kvpolicy("bench", *OPTIONS, "--text", "--rounds", 1, "--policies", "knorm", *FEW)
    assert plain.status == 0, plain.err
    for word in ("x generate", "p95", "of limit", "knorm", MODEL_ALONE, "least - most"):
        assert word in plain.out
    memory = ("--memory", "--lengths", "9,30", "--policies", "knorm", "--output", tmp_path / "new")
    found = kvpolicy("bench", *OPTIONS, *memory)
    assert found.status == 0, found.err
    assert len(json.loads((tmp_path / "new" / "bench.json").read_text())["readings"]) == 2
    head, _, *rows = found.out.splitlines()
    assert "if all stayed" in head
    assert [row.split()[:2] for row in rows] == [["knorm", "9"], ["knorm", "30"]]


def test_counts_have_a_table(kvpolicy: Shell) -> None:
    arguments = ("bench", "--launches", *OPTIONS, "--policies", "full,knorm", "--lengths", 20)
    found = kvpolicy(*arguments)
    assert found.status == 0, found.err
    for word in (MODEL_ALONE, "full", "knorm", "static_step.py:read", "1 + 0"):
        assert word in found.out
    (alone, *mine) = kvpolicy(*arguments, "--json").json["launches"]
    assert all(one["operations"] > alone["operations"] for one in mine)


def test_best_batches_are_within_the_memory(kvpolicy: Shell, tmp_path: Path) -> None:
    arguments = (*OPTIONS, "--max-batch", "--lengths", 40, "--rounds", 1, "--policies", "knorm")
    limit = ("--memory-limit", 0.0002, "--json", "--output", tmp_path / "best")
    found = kvpolicy("bench", *arguments, *limit, *FEW)
    assert found.status == 0, found.err
    generate, knorm = found.json["standings"]
    assert (generate["name"], knorm["name"]) == (GENERATE, "knorm")
    assert all(one["batch"] and one["kv_bytes"] <= 200e3 for one in (generate, knorm))
    again = kvpolicy("bench", *arguments, *limit, *FEW)
    assert "searching" not in again.err, "what was found was written"
    message = refusal(kvpolicy("bench", *arguments, "--memory-limit", 0.000001, *FEW))
    assert "raise --memory-limit" in message


def test_what_is_left_out_is_not_compared_with(kvpolicy: Shell) -> None:
    arguments = ("--rounds", 1, "--policies", "knorm", "--lengths", 12)
    without = ("--without", "generate,generate_batch,kvpress,machine limit")
    plain, found = (
        kvpolicy("bench", *OPTIONS, *arguments, *without, *m) for m in ((), ("--json",))
    )
    assert plain.status == found.status == 0, plain.err
    assert "x generate" not in plain.out
    assert [one["name"] for one in found.json["standings"]] == [MODEL_ALONE, "knorm"]
    assert [list(one["ratios"]) for one in found.json["standings"]] == [[], [MODEL_ALONE]]


@pytest.mark.usefixtures("packs_small_products")
def test_like_stands_beside_like_with_packed_weights(kvpolicy: Shell) -> None:
    arguments = ("--rounds", 1, "--policies", "knorm", "--lengths", 12, "--packed", "--json")
    found = kvpolicy("bench", *OPTIONS, *arguments, *FEW)
    assert found.status == 0, found.err
    assert "packed 15 linear layers as 9 products" in found.err
    ratios = {
        one["name"]: one["ratios"].get(GENERATE, {}).get("median")
        for one in found.json["standings"]
    }
    plain = [MODEL_ALONE, GENERATE, "knorm"]
    assert list(ratios) == [LIMIT, *plain, *(f"{name}, packed" for name in plain)]
    assert [ratios[GENERATE], ratios[f"{GENERATE}, packed"]] == pytest.approx([1, 1])


@pytest.mark.needs_reasoner
def test_complete_rounds_count_after_an_interrupt(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(jobs: Any, **_: object) -> Iterator[Turn]:
        for number, job in enumerate([*jobs, *jobs][: 2 * len(jobs) - 1]):
            yield Turn(number // len(jobs), job.name, measurement(1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(turns, "measure", measure)
    output = tmp_path / "speed"
    found = kvpolicy("bench", *SIZES, "--rounds", 2, "--output", output)
    assert found.status == 130
    assert "1 of 2 rounds were complete" in found.err
    standings = json.loads((output / "bench.json").read_text(encoding="utf-8"))["standings"]
    assert {tuple(one["rounds"]) for one in standings} == {(2.0,)}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--shape", "9b"), ("'9b'", "100m")),
        (("--dtype", "int8"), ("int8", "float32")),
        (("--dtype", "auto"), ("auto", "float32")),
        (("--device", "nowhere"), ("nowhere",)),
        (("--plot", "speed.gif"), ("speed.gif", ".png")),
        (("--plot", "speed.png", "--memory"), ("--plot", "--memory")),
        (("--lengths", "1,x", "--memory"), ("--lengths", "'x'")),
        (("--lengths", "64,128", "--max-batch"), ("--max-batch", "--lengths")),
        (("--text", "--memory"), ("--text and --memory",)),
        (("--without", "nobody"), ("'nobody'", "generate_batch")),
        (("--at-accuracy", "0.02"), ("--sweep FOLDER",)),
        (("--at-accuracy", "0.02", "--sweep", "x", "--policies", "h2o"), ("--policies",)),
        (("--output", "/dev/null/speed"), ("/dev/null/speed", "cannot be written")),
        (("--vllm-python", "no-such-python"), ("no-such-python", "--vllm-python")),
    ],
)
@pytest.mark.needs_reasoner
def test_wrong_input_is_refused_with_a_sentence(
    kvpolicy: Shell, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refusal(kvpolicy("bench", "--quick", *arguments))
    assert all(part in message for part in parts), message


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_a_gpu_benchmark_needs_a_gpu(kvpolicy: Shell) -> None:
    message = refusal(kvpolicy("bench", "--gpu", "--quick", "--policies", "knorm"))
    assert "--gpu needs a GPU with CUDA" in message


@pytest.mark.needs_reasoner  # it ships the default sweep
def test_the_benchmark_of_a_gpu_can_be_walked_through_on_a_cpu(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.lab.cli.bench._GPU_BATCHES", (1, 2))
    monkeypatch.setattr("kvpolicy.lab.bench.check._TEXT", Text(1, 3, 30, 3))
    arguments = ("bench", "--gpu", "--device", "cpu", "--quick", "--dtype", "float32")
    sizes = ("--lengths", 40, "--budget", 16, "--buffer", 4, "--steps", 2, "--rounds", 1)
    found = kvpolicy(*arguments, *sizes, "--memory-limit", 0.0001)
    assert found.status == 0, found.err
    assert "checking tokens and compactions on cpu" in found.err
    for work in ("batch 1\n", "batch 2\n", "best batch\n"):
        assert work in found.out
    for word in ("rows", "limit ms", "of limit", "over first plan", "x full cache", "path"):
        assert word in found.out
    best = found.out[found.out.index("best batch") :]
    names = ("full cache", "StreamingLLM", "H2O", "SnapKV", "R-KV")
    assert all(name in best for name in names)
    assert best.count("static") == len(names)
