"""The benchmark: fair turns, ratios within a round, and baselines that do the same work."""

import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import CELLS
from shell import Shell, refusal
from tiny import greedy_tokens, tiny_model

from kvpolicy.engine.engine import Engine
from kvpolicy.lab.bench import baselines, bench
from kvpolicy.lab.bench.baselines import (
    GENERATE,
    MODEL_ALONE,
    generate,
    left_pad,
    model_alone,
    presses_for,
)
from kvpolicy.lab.bench.bench import Turn, Workload, build_contenders, measure
from kvpolicy.lab.bench.contender import Contender, Measurement
from kvpolicy.lab.bench.memory import measure_memory, resident_bytes
from kvpolicy.lab.bench.models import SHAPES, random_model, weight_bytes
from kvpolicy.lab.bench.summary import summarize
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.sweep_file import Series

WORK = Workload(batch=2, prompt_min=3, prompt_max=5, new_tokens=5, seed=0)
PROMPTS = [[5, 9, 1, 7], [3, 2]]
IN_FP32 = 4


def measurement(
    step_s: float | list[float], share: float | None = None, **changes: Any
) -> Measurement:
    steps = step_s if isinstance(step_s, list) else [step_s] * 3
    plain: dict[str, Any] = {"prefill_s": 2.0, "kv_bytes": 1, "read_bytes": 0}
    return Measurement(steps_s=tuple(steps), policy_share=share, **(plain | changes))


def named(name: str, run: Callable[..., Measurement] | None = None, **fields: Any) -> Contender:
    return Contender(name, run or (lambda *_: measurement(1.0)), **fields)


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
    workload = Workload(batch, low, low + more, new_tokens=3, seed=seed)
    prompts = workload.prompts(61)
    lengths = sorted(map(len, prompts))
    assert len(prompts) == batch
    assert lengths[0] == low
    assert lengths[-1] == (low + more if batch > 1 else low)
    assert prompts == workload.prompts(61)
    assert all(0 <= token < 61 for prompt in prompts for token in prompt)


def test_all_contenders_run_in_every_round_in_rotating_order() -> None:
    ran: list[tuple[str, int, int]] = []

    def runs(name: str) -> Contender:
        def run(prompts: Any, new_tokens: int) -> Measurement:
            ran.append((name, len(prompts), new_tokens))
            return measurement(1.0)

        return named(name, run)

    turns = list(measure([runs("a"), runs("b"), runs("c")], WORK, 61, rounds=3))
    orders = [["a", "b", "c"], ["b", "c", "a"], ["c", "a", "b"]]
    assert [name for name, _ in turns] == [name for order in orders for name in order]
    assert [one[0] for one in ran[:3]] == ["a", "b", "c"], "one warm-up each"
    assert ran[3:] == [(name, 2, 5) for order in orders for name in order]


# Results


def test_ratios_are_paired_by_round() -> None:
    """Both get slower from round to round, and the ratio is 2 in each."""
    who = [
        named(GENERATE),
        named("full"),
        named("small", budget=16, baseline="other"),
        named("other"),
    ]
    turns: list[Turn] = []
    for number, step_s in enumerate([0.5, 1.0, 5.0]):
        small_step = measurement(step_s / (3 + number), 0.1 * number, kv_bytes=number)
        turns += [
            (GENERATE, measurement(step_s)),
            ("full", measurement(step_s / 2, 0.0)),
            ("small", small_step),
            ("other", measurement(2 * step_s)),
        ]
    generate, full, small, other = summarize(turns, who, WORK)
    assert (generate.ratio.median, generate.ratio.low, generate.ratio.high) == (1, 1, 1)
    assert (full.ratio.median, full.ratio.low, full.ratio.high) == (2, 2, 2)
    found = (small.ratio.median, small.ratio.low, small.ratio.high)
    assert found == pytest.approx((4, 3, 5))
    assert small.baseline_ratio is not None
    assert small.baseline_ratio.median == pytest.approx(8)
    assert other.baseline_ratio is None
    assert full.rounds == pytest.approx((8, 4, 0.8)), "two sequences in half the step's seconds"
    assert full.decode_tok_s == pytest.approx(4)
    assert small.policy_share == pytest.approx(0.1)
    assert generate.policy_share is None
    assert (full.budget, small.budget, small.kv_bytes) == (None, 16, 2)
    assert full.prefill_tok_s == pytest.approx((3 + 5) / 2.0)
    assert (full.step_ms, full.step_p95_ms) == pytest.approx((500, 500))


def test_an_incomplete_round_does_not_count() -> None:
    who = [named(GENERATE), named("full")]
    whole = [(GENERATE, measurement(0.25)), ("full", measurement(0.25))]
    more = summarize([*whole, (GENERATE, measurement(9.0))], who, WORK)
    assert [one.rounds for one in more] == [(8.0,), (8.0,)]
    assert summarize(whole[:1], who, WORK) == []


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
    who, turns = [named(GENERATE)], [(GENERATE, measurement(steps))]
    (found,) = summarize(turns, who, WORK)
    assert found.step_ms == pytest.approx(1e3 * percentile(steps, 50))
    assert found.step_p95_ms == pytest.approx(1e3 * percentile(steps, 95))
    assert found.decode_tok_s == pytest.approx(2 * len(steps) / sum(steps))


@given(STEPS)
def test_a_curve_goes_through_all_steps(steps: list[float]) -> None:
    (found,) = summarize([(GENERATE, measurement(steps))], [named(GENERATE)], WORK)
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


def test_the_share_of_the_limit_is_bytes_by_bandwidth_by_time() -> None:
    """Three steps of half a second, 100 bytes of weights each, and 60 of the cache in all."""
    turns = [(GENERATE, measurement(0.5, read_bytes=60))]
    who = [named(GENERATE)]
    (found,) = summarize(turns, who, WORK, weight_bytes=100, bandwidth_gb_s=1e-6)
    assert found.limit_share == pytest.approx(((3 * 100 + 60) / 1000) / 1.5)
    assert summarize(turns, who, WORK)[0].limit_share is None


# Contenders


def test_generate_measures_the_full_cache() -> None:
    """Left-padded generate gives the tokens of the engine, and the bytes of a full cache."""
    model = tiny_model("qwen2", seed=3)
    assert model.generation_config is not None
    done = generate(model).run(PROMPTS, 6)
    layers, heads, head_dim = 2, 2, 8
    row = 2 * layers * len(PROMPTS) * heads * head_dim * IN_FP32
    # The last token is never fed back, so that its row is missing.
    assert done.kv_bytes == row * (4 + 6 - 1)
    # Five decode steps; the first does not count, and the second sees two rows after the prompt.
    assert len(done.steps_s) == 4
    assert done.read_bytes == sum(row * (4 + new) for new in (2, 3, 4, 5))
    assert done.prefill_s is not None
    assert done.prefill_s > 0
    run = Engine(model, None, CELLS[0].resolved, slots=2).generate(
        PROMPTS, max_new_tokens=6, stop_ids=()
    )
    for result, prompt in zip(run.results(), PROMPTS, strict=True):
        assert list(result.tokens) == greedy_tokens(model, prompt, 6)


@pytest.mark.parametrize(("stack", "new_tokens"), [("full", 6), ("knorm", 19)])
def test_the_engine_attends_to_as_many_rows_as_a_plain_count(stack: str, new_tokens: int) -> None:
    model = tiny_model()
    budget, buffer = 8, 4
    contenders, _ = build_contenders(model, cells(stack, budget=budget, buffer=buffer))
    done = contenders[2].run(PROMPTS, new_tokens)
    layers, heads, head_dim = 2, 2, 8
    rows_read = 0
    for prompt in PROMPTS:
        rows = len(prompt)
        for step in range(1, new_tokens):
            rows += 1
            if step > 1:
                rows_read += rows
            if stack != "full" and rows == budget + buffer:
                rows = budget
    assert done.read_bytes == rows_read * layers * heads * head_dim * 2 * IN_FP32
    assert len(done.steps_s) == new_tokens - 2
    # Keys, values, and positions of 8 bytes; a full cache is allocated for the longest sequence.
    slab = 4 + 6 if stack == "full" else budget + buffer
    allocated = layers * len(PROMPTS) * heads * slab * (2 * head_dim * IN_FP32 + 8)
    moved = 0 if stack == "full" else heads * budget * head_dim * IN_FP32
    assert allocated + moved <= done.kv_bytes <= allocated + 4 * moved
    assert done.policy_share is not None
    assert 0 <= done.policy_share < 1
    assert (done.policy_share > 0) == (stack != "full")


def test_policies_take_no_more_than_all_of_the_decode_time() -> None:
    """Long prompts and few tokens: nearly all compactions are before the first decode step."""
    contenders, _ = build_contenders(tiny_model(), cells("knorm"))
    done = contenders[2].run([[1 + i % 50 for i in range(120)]] * 2, 3)
    assert done.policy_share is not None
    assert 0 <= done.policy_share <= 1


def test_the_model_alone_has_no_cache() -> None:
    done = model_alone(tiny_model()).run(PROMPTS, 9)
    assert (done.kv_bytes, done.read_bytes, done.prefill_s) == (0, 0, None)
    assert len(done.steps_s) == 7


def test_prompts_are_padded_on_the_left() -> None:
    token_ids, mask = left_pad([[1, 2, 3], [4]], torch.device("cpu"))
    assert token_ids.tolist() == [[1, 2, 3], [0, 0, 4]]
    assert mask.tolist() == [[1, 1, 1], [0, 0, 1]]


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


def test_a_press_gets_budget_interval_and_knobs_of_its_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, made = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    mine = cells("snapkv", "knorm", "h2o", "snapkv+protect", budget=24, buffer=6)
    contenders, absent = build_contenders(tiny_model(), mine)
    assert absent == {}
    names = [one.name for one in contenders]
    assert names[:4] == [GENERATE, MODEL_ALONE, "snapkv", "kvpress SnapKVPress"]
    assert names[4:] == ["knorm", "h2o", "snapkv+protect"]
    assert [one.baseline for one in contenders[2:4]] == ["kvpress SnapKVPress", None]
    contenders[3].run(PROMPTS, 4)
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
    contenders, _ = build_contenders(tiny_model(), mine)
    presses = ["kvpress SnapKVPress (wide)", "kvpress SnapKVPress (narrow)"]
    names = [GENERATE, MODEL_ALONE, "wide", presses[0], "narrow", presses[1]]
    assert [one.name for one in contenders] == names
    turns = list(measure(contenders, WORK, 61, rounds=1))
    found = {one.name: one for one in summarize(turns, contenders, WORK)}
    assert list(found) == names, "the round is complete"
    assert [found[name].baseline for name in ("wide", "narrow")] == presses
    assert found["wide"].baseline_ratio is not None
    assert {one["base_press"].window_size for one in made} == {8, 4}


def test_contenders_with_equal_names_are_refused(kvpolicy: Shell, tmp_path: Path) -> None:
    """Results are looked up by name."""
    for folder, size in (("a", 2), ("b", 4)):
        (tmp_path / folder).mkdir()
        plan = f'stack = [{{policy = "snapkv", window_size = {size}}}]\n'
        (tmp_path / folder / "x.toml").write_text(plan)
    plans = [word for folder in "ab" for word in ("--plan", tmp_path / folder / "x.toml")]
    output = tmp_path / "bench.json"
    message = refusal(kvpolicy("bench", *OPTIONS, "--rounds", 1, *plans, "--output", output))
    assert "2 contenders called 'x'" in message
    assert "rename one" in message
    assert not output.exists()


def test_a_missing_kvpress_is_reported_with_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    contenders, absent = build_contenders(tiny_model(), cells("knorm"))
    assert [one.name for one in contenders] == [GENERATE, MODEL_ALONE, "knorm"]
    assert "cannot be imported" in absent["kvpress"]
    assert "from a clone of kvpolicy: pip install -e '.[benchmarks]'" in absent["kvpress"]


def test_a_kvpress_that_needs_other_transformers_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It can be imported with any transformers, and fails when it decodes."""
    library, _ = fake_kvpress()
    monkeypatch.setitem(sys.modules, "kvpress", library)
    lines = ["torch>=2", "transformers<4,>=3; python_version > '3'"]
    monkeypatch.setattr(baselines, "requires", lambda _: lines)
    absent = presses_for(tiny_model(), cells("snapkv"))[1]
    assert absent is not None
    assert "transformers<4,>=3" in absent
    monkeypatch.setattr(baselines, "requires", lambda _: ["transformers>=3"])
    assert presses_for(tiny_model(), cells("snapkv"))[1] is None


@pytest.mark.filterwarnings("ignore")  # from its imports
def test_kvpress_itself_stays_within_budget_and_interval() -> None:
    model = tiny_model()
    presses, absent = presses_for(model, cells("knorm", budget=12, buffer=4))
    if absent is not None:
        pytest.skip(absent)
    (mine,) = presses.values()
    done = mine.run(PROMPTS, 40)
    row = 2 * 2 * len(PROMPTS) * 2 * 8 * IN_FP32
    assert len(done.steps_s) == 38
    # It counts steps, not rows: a cache may exceed budget and interval by what it began with.
    assert row * 12 < done.kv_bytes <= row * (12 + 4)
    assert done.read_bytes < 38 * done.kv_bytes


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
OPTIONS = (*SIZES, "--new-tokens", 14, "--budget", 8, "--buffer", 4)


@pytest.mark.needs_reasoner
def test_the_command_prints_and_writes_ratios(kvpolicy: Shell, tmp_path: Path) -> None:
    output, plot = tmp_path / "bench.json", tmp_path / "bench.svg"
    more = ("--rounds", 2, "--policies", "full,streaming", "--bandwidth", 10)
    found = kvpolicy("bench", *OPTIONS, *more, "--output", output, "--plot", plot, "--json")
    assert found.status == 0, found.err
    assert found.out == output.read_text(encoding="utf-8")
    names = [one["name"] for one in found.json["standings"]]
    assert names == [GENERATE, MODEL_ALONE, "full cache", "StreamingLLM"]
    for one in found.json["standings"]:
        assert one["ratio"]["low"] <= one["ratio"]["median"] <= one["ratio"]["high"]
        assert len(one["rounds"]) == 2
        assert 0 < one["step_ms"] <= one["step_p95_ms"]
        assert len(one["curve"]) == 12
        assert one["limit_share"] > 0
    assert found.json["workload"]["new_tokens"] == 14
    assert found.json["shape"]["name"] == "tiny"
    assert found.json["num_parameters"] == 119_104
    assert "round 2" in found.err
    drawing = plot.read_text(encoding="utf-8")
    assert drawing.startswith("<?xml")


def test_speed_and_memory_have_tables(kvpolicy: Shell) -> None:
    plain = kvpolicy("bench", *OPTIONS, "--rounds", 1, "--policies", "knorm", "--bandwidth", 10)
    assert plain.status == 0, plain.err
    for word in ("x generate", "p95", "of limit", "knorm", MODEL_ALONE, "least - most"):
        assert word in plain.out
    found = kvpolicy("bench", *OPTIONS, "--memory", "--lengths", "9,30", "--policies", "knorm")
    assert found.status == 0, found.err
    head, _, *rows = found.out.splitlines()
    assert "if all stayed" in head
    assert [row.split()[:2] for row in rows] == [["knorm", "9"], ["knorm", "30"]]


def test_without_generate_nothing_is_compared_with_it(kvpolicy: Shell) -> None:
    arguments = ("--rounds", 1, "--policies", "knorm", "--no-generate")
    plain, found = (kvpolicy("bench", *OPTIONS, *arguments, *more) for more in ((), ("--json",)))
    assert plain.status == found.status == 0, plain.err
    assert "x generate" not in plain.out
    assert [one["name"] for one in found.json["standings"]] == [MODEL_ALONE, "knorm"]
    assert [one["ratio"] for one in found.json["standings"]] == [None, None]


@pytest.mark.needs_reasoner
def test_complete_rounds_count_after_an_interrupt(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turns = [(name, measurement(1.0)) for _ in range(2) for name in (GENERATE, "mine")]

    def measure(*_: object, **__: object) -> Iterator[Turn]:
        yield from turns[:3]
        raise KeyboardInterrupt

    monkeypatch.setattr(
        bench, "build_contenders", lambda *_, **__: ([named(GENERATE), named("mine")], {})
    )
    monkeypatch.setattr(bench, "measure", measure)
    output = tmp_path / "bench.json"
    found = kvpolicy("bench", *SIZES, "--rounds", 2, "--output", output)
    assert found.status == 130
    assert "1 of 2 rounds were complete" in found.err
    assert "mine" in found.out
    assert '"rounds": [\n        2.0\n      ]' in output.read_text(encoding="utf-8")


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
    ],
)
@pytest.mark.needs_reasoner
def test_wrong_input_is_refused_with_a_sentence(
    kvpolicy: Shell, arguments: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    message = refusal(kvpolicy("bench", "--quick", *arguments))
    assert all(part in message for part in parts), message
