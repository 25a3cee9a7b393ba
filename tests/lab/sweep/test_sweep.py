"""Sweeps: every setting and cell once; samples of two settings never mix."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_sweeps import BASE, Catalogue, built

from kvpolicy.engine.requests.results import Result, RunReport
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.jobs import Event, Job, JobFinished, SampleMeasured
from kvpolicy.lab.sweep.prepare import build_sweep, not_sampled
from kvpolicy.lab.sweep.runner import CellDone, SampleDone, run
from kvpolicy.lab.sweep.sweep_file import Series, load_preset
from kvpolicy.lab.tasks.task import EvalOutcome

pytestmark = pytest.mark.needs_reasoner

MIX, WINDOW = "rkv.mix_lambda", "rkv.window_size"


def described(sweep: Sweep) -> list[tuple[object, ...]]:
    """Model, task, seed, series and budget of each cell."""
    found = []
    for cell in sweep.cells:
        setting = sweep.setting_of(cell)
        where = (setting.model.name, setting.task.name, setting.seed)
        found.append((*where, cell.series, cell.budget))
    return found


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map(tuple)
counts = st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True).map(tuple)


@given(names, names, counts, counts, counts, counts)
def test_a_product_has_every_point_once_and_in_order(
    models: tuple[str, ...],
    tasks: tuple[str, ...],
    seeds: tuple[int, ...],
    first: tuple[int, ...],
    second: tuple[int, ...],
    budgets: tuple[int, ...],
) -> None:
    knobs = {"x": first, "y": second}
    preset = attrs.evolve(
        BASE, models=models, tasks=tasks, seeds=seeds, budgets=budgets, knobs=knobs
    )
    expected = []
    for model in models:
        for task in tasks:
            for seed in seeds:
                for x in first:
                    for y in second:
                        for budget in budgets:
                            expected.append((model, task, seed, {"x": x, "y": y}, budget))
    found = preset.points()
    assert [(p.model, p.task, p.seed, p.variant.knobs, p.variant.budget) for p in found] == expected


@given(st.integers(2, 4), st.lists(st.booleans(), min_size=5, max_size=5), st.randoms())
def test_lists_are_zipped_and_single_entries_repeated(
    length: int, are_long: list[bool], rng: random.Random
) -> None:
    lists = [[rng.randint(1, 99) for _ in range(length if long else 1)] for long in are_long]
    models, tasks, seeds, knob, budgets = map(tuple, lists)
    preset = attrs.evolve(
        BASE,
        models=tuple(map(str, models)),
        tasks=tuple(map(str, tasks)),
        seeds=seeds,
        budgets=budgets,
        knobs={"x": knob},
        combine="zip",
    )
    found = preset.points()
    assert len(found) == (length if any(are_long) else 1)
    for i, point in enumerate(found):
        wanted = [one[i] if long else one[0] for one, long in zip(lists, are_long, strict=True)]
        seen = (point.model, point.task, point.seed, point.variant.knobs["x"], point.variant.budget)
        assert list(seen) == [str(wanted[0]), str(wanted[1]), *wanted[2:]]


def test_lists_of_unequal_length_cannot_be_zipped() -> None:
    preset = attrs.evolve(BASE, seeds=(0, 1), budgets=(16, 32, 48), combine="zip")
    with pytest.raises(PlanError, match=r"seeds.*budgets"):
        preset.points()


def test_every_series_runs_with_its_own_knobs_in_every_setting() -> None:
    tasks = ("reasoner", "reasoner-needle:length=60")
    sweep = built(
        models=("a", "b"), tasks=tasks, seeds=(0, 3), budgets=(48, 64), knobs={MIX: (0.1, 0.25)}
    )
    expected = []
    for where in itertools.product(("a", "b"), tasks, (0, 3)):
        expected.append((*where, "full", None))
        for mix, budget in itertools.product(("0.1", "0.25"), (48, 64)):
            expected.append((*where, f"rkv, mix_lambda={mix}", budget))
        for budget in (48, 64):
            expected.append((*where, "streaming", budget))
    assert described(sweep) == expected
    for cell in sweep.cells:
        stack = cell.resolved.layers[0].stack[0]
        if stack.policy == "rkv":
            assert cell.knobs == {MIX: stack.knobs["mix_lambda"]}
        else:
            assert cell.knobs == {}


def test_ids_of_samples_cells_and_settings_are_unique() -> None:
    sweep = built(
        models=("a", "b"),
        # Two tasks whose questions are the same, and graded otherwise.
        tasks=("reasoner", "agreement:of=reasoner", "reasoner-needle:length=60"),
        seeds=(0, 1),
        attempts=2,
        temperature=0.5,
        budgets=(48, 64),
        knobs={MIX: (0.1, 0.2)},
    )
    keys = [
        sweep.key(cell, item) for cell in sweep.cells for item in sweep.setting_of(cell).examples
    ]
    assert len(keys) == sweep.num_samples == len(set(keys))
    assert len({cell.id for cell in sweep.cells}) == 2 * 3 * 2 * (1 + 2 * 2 + 2)
    assert len({setting.id for setting in sweep.settings}) == 2 * 3 * 2


def test_another_reference_answer_makes_another_sample() -> None:
    sweep = built(budgets=(48,))
    (setting,), plan = sweep.settings, sweep.cells[0].digest
    items = [attrs.evolve(setting.examples[0], answer="not this"), *setting.examples[1:]]
    mended = attrs.evolve(setting, examples=items)
    assert mended.id != setting.id
    same = [
        setting.key(plan, old) == mended.key(plan, new)
        for old, new in zip(setting.examples, items, strict=True)
    ]
    assert same == [False, *[True] * (len(items) - 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"models": ("b",)},
        {"tasks": ("reasoner-needle:length=60",)},
        {"seeds": (1,)},
        {"n": 3},
        {"split": "tune"},
        {"attempts": 2, "temperature": 0.5},
        {"temperature": 0.5},
        {"max_new_tokens": 8},
        {"slots": 3},
    ],
    ids=str,
)
def test_the_id_of_a_setting_depends_on_everything_its_samples_depend_on(
    change: dict[str, Any],
) -> None:
    (one,), (other,) = built().settings, built(**change).settings
    assert one.id != other.id
    assert built().settings[0].id == one.id
    # The keys of samples depend on the same, except for the choice of examples and the batch.
    keys = {setting.key("plan", one.examples[0]) for setting in (one, other)}
    assert len(keys) == (1 if change.keys() & {"n", "split", "slots"} else 2)


@pytest.mark.parametrize("family", ["agreement", "perplexity", "repetition", "retention"])
def test_what_is_not_sampled_has_no_temperature_and_one_attempt(family: str) -> None:
    """Its attempts would be equal, and the plot would name a temperature that nothing had."""
    tasks = ("reasoner", f"{family}:of=reasoner")
    changes = {"temperature": 0.5, "top_p": 0.9, "attempts": 3, "seeds": (0, 1)}
    graded, *_, measured = built(tasks=tasks, **changes).settings
    assert (graded.sampling.temperature, graded.num_attempts) == (0.5, 3)
    assert (measured.sampling.greedy, measured.num_attempts) == (True, 1)
    alone = built(tasks=tasks, seeds=(0, 1)).settings[-1]
    assert measured.id == alone.id
    config = attrs.evolve(BASE, tasks=tasks, **changes)
    assert not_sampled(config) == [tasks[1]]
    assert not_sampled(attrs.evolve(BASE, tasks=tasks)) == []


def test_one_model_under_two_names_is_run_once() -> None:
    twice = built(models=("a", "a'"), budgets=(48, 64))
    assert described(twice) == described(built(budgets=(48, 64)))
    # Zipped, each name has another budget, and both cells are in one setting.
    aside = built(models=("a", "a'"), budgets=(48, 64), combine="zip")
    assert described(aside) == [
        ("a", "reasoner", 0, series, budget)
        for series, budget in [
            ("full", None),
            ("rkv", 48),
            ("streaming", 48),
            ("rkv", 64),
            ("streaming", 64),
        ]
    ]


def test_every_model_is_described_once_and_the_first_one_last() -> None:
    models = Catalogue()
    build_sweep(attrs.evolve(BASE, models=("a", "b", "c"), seeds=(0, 1)), models)
    assert models.described == ["c", "b", "a"]


def test_two_knobs_of_one_name_have_different_labels() -> None:
    series = (
        Series.from_stack("rkv"),
        Series.from_stack("snapkv"),
        Series.from_stack("rkv+protect"),
    )
    both = built(series=series, knobs={WINDOW: (4,), "snapkv.window_size": (4,)})
    assert [one[3] for one in described(both)] == [
        "rkv, window_size=4",
        "snapkv, window_size=4",
        "rkv+protect, window_size=4",
    ]
    stacked = built(
        series=(Series.from_stack("streaming+protect"),),
        knobs={"streaming.n_sink": (2,), "protect.n_sink": (3,)},
    )
    assert described(stacked)[0][3] == "streaming+protect, streaming.n_sink=2, protect.n_sink=3"


def test_buffers_are_varied_where_a_plan_has_one() -> None:
    sweep = built(knobs={"buffer": (4, 8)})
    assert [(cell.series, cell.buffer) for cell in sweep.cells] == [
        ("full", None),
        ("rkv, buffer=4", 4),
        ("rkv, buffer=8", 8),
        ("streaming, buffer=4", 4),
        ("streaming, buffer=8", 8),
    ]


@pytest.mark.parametrize(
    ("changes", "overrides", "message"),
    [
        ({"knobs": {"h2o.n_recent": (1,)}}, [], "'h2o'"),
        ({"knobs": {"rkv.mix_lamda": (1,)}}, [], "mix_lambda"),
        ({"knobs": {"budget": (1, 2)}}, [], "--budgets"),
        ({"knobs": {"bufer": (1, 2)}}, [], "buffer"),
        ({"knobs": {MIX: (0.1, 0.2)}}, [f"{MIX}=0.3"], "--set"),
        ({"tasks": ("reasoner", "reasonr")}, [], "'reasonr'"),
        ({"series": (Series.from_stack("ful"),)}, [], "'ful'"),
    ],
)
def test_names_and_knobs_that_do_not_fit_are_refused(
    changes: dict[str, Any], overrides: list[str], message: str
) -> None:
    with pytest.raises(KVPolicyError, match=message) as caught:
        build_sweep(attrs.evolve(BASE, **changes), Catalogue(), overrides=overrides)
    assert "\n" not in str(caught.value)


class Shuffled(Catalogue):
    """An executor whose events of all jobs come in any order."""

    def __init__(self, seed: int, report: RunReport | None = None) -> None:
        super().__init__()
        self._rng = random.Random(seed)
        self._report = report or RunReport()
        self.jobs: list[Job] = []

    def num_workers(self, sweep: Sweep) -> int:
        return 1

    def machine(self, sweep: Sweep) -> dict[str, Any]:
        return {}

    def run_jobs(self, sweep: Sweep, jobs: Sequence[Job]) -> Iterator[Event]:
        self.jobs += jobs
        left = [list(job.samples) for job in jobs]
        order = [number for number, items in enumerate(left) for _ in items]
        self._rng.shuffle(order)
        for number in order:
            job, place = jobs[number], left[number].pop()
            yield SampleMeasured(job, place, EvalOutcome(Result(0, text=f"{job.cell} {place}")))
            if not left[number]:
                yield JobFinished(job, self._report, 0.0)


@pytest.fixture(scope="module")
def several_settings() -> Sweep:
    return built(
        models=("a", "b"),
        tasks=("reasoner", "reasoner-needle:length=60"),
        seeds=(0, 1),
        attempts=2,
        temperature=1.0,
        series=BASE.series[:2],
    )


@given(st.integers(0, 99), st.integers(0, 40))
def test_samples_of_two_settings_never_mix(several_settings: Sweep, seed: int, stop: int) -> None:
    import tempfile

    sweep = several_settings
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "out"
        for most in (stop, None):  # stop somewhere, then continue
            with Store(folder, sweep.to_dict()) as store:
                events = run(sweep, store, Shuffled(seed))
                done = [e for e in itertools.islice(events, most) if isinstance(e, SampleDone)]
                events.close()
        assert stop or len(done) == sweep.num_samples
        with Store(folder, sweep.to_dict()) as store:
            samples = list(store.samples.values())
    assert len(samples) == sweep.num_samples
    for sample in samples:
        cell = sweep.cell(sample.cell)
        setting = sweep.setting_of(cell)
        assert (sample.group, sample.plan, sample.series) == (setting.id, cell.digest, cell.series)
        assert (sample.model, sample.task) == (setting.model.name, setting.task.name)
        assert sample.seed == setting.seed
        wanted, index = sample.text.split()
        item = setting.examples[int(index)]
        assert (wanted, item.index, item.attempt) == (cell.id, sample.item, sample.attempt)
        assert sample.key == sweep.key(cell, item)


def test_a_timing_has_the_policies_share_of_decoding(tmp_path: Path) -> None:
    """Five seconds of scoring, most of them while prompts entered."""
    sweep = built()
    report = RunReport(decode_s=2.0, prefill_s=6.0, score_s=5.0, decode_policy_s=0.5)
    with Store(tmp_path, sweep.to_dict()) as store:
        list(run(sweep, store, Shuffled(0, report)))
    timings = read_run(tmp_path).timings
    assert timings.keys() == {cell.id for cell in sweep.cells}
    assert {(one.policy_s, one.decode_s) for one in timings.values()} == {(0.5, 2.0)}


def test_compiling_is_no_part_of_the_speed_of_a_cell(tmp_path: Path) -> None:
    sweep = built()
    report = RunReport(elapsed_s=12.0, compile_s=8.0, decode_s=3.0, new_tokens=20)
    with Store(tmp_path, sweep.to_dict()) as store:
        events = list(run(sweep, store, Shuffled(0, report)))
    assert {one.compile_s for one in events if isinstance(one, CellDone)} == {8.0}
    (timing, *_) = read_run(tmp_path).timings.values()
    assert (timing.elapsed_s, timing.decode_s, timing.compile_s) == (4.0, 3.0, 8.0)
    assert timing.throughput_tok_s == 5.0


def test_jobs_come_setting_after_setting_and_the_costliest_cells_first(tmp_path: Path) -> None:
    sweep = built(models=("b", "a"), seeds=(0, 1), budgets=(48, 64))
    executor = Shuffled(0)
    with Store(tmp_path, sweep.to_dict()) as store:
        list(run(sweep, store, executor))
    cells = [sweep.cell(job.cell) for job in executor.jobs]
    models = [sweep.setting_of(cell).model.name for cell in cells]
    assert models == sorted(models, reverse=True)
    by_setting = itertools.groupby(cells, lambda cell: sweep.setting_of(cell).id)
    groups = [(name, list(mine)) for name, mine in by_setting]
    assert len(groups) == len({name for name, _ in groups}) == 4
    for _, mine in groups:
        costs = [cell.budget or float("inf") for cell in mine]
        assert costs == sorted(costs, reverse=True)


SWEEP = """
models = ["a", "b"]
tasks = ["reasoner", "reasoner-needle:length=60"]
seeds = [0, 1]
n = 10
max_new_tokens = 50
slots = 4
budgets = [16, 32]
buffer = 8
policies = ["full", "rkv+protect"]
plans = ["mine.toml", "reasoner-mix"]
knobs = { "rkv.mix_lambda" = [0.1, 0.2], buffer = 4 }
combine = "zip"

[[series]]
label = "first"
plan.stack = ["streaming"]
"""


def written(folder: Path, text: str) -> str:
    (folder / "mine.toml").write_text('stack = ["h2o"]', encoding="utf-8")
    path = folder / "sweep.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_sweep_can_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")  # plans are found in the folder of the sweep file
    found = load_preset(written(tmp_path, SWEEP))
    assert (found.models, found.tasks) == (("a", "b"), ("reasoner", "reasoner-needle:length=60"))
    assert (found.seeds, found.budgets, found.buffer) == ((0, 1), (16, 32), 8)
    assert found.knobs == {MIX: (0.1, 0.2), "buffer": (4,)}
    assert (found.combine, found.name) == ("zip", "sweep")
    labels = ["first", "full", "rkv+protect", "mine", "reasoner-mix"]
    assert [series.label for series in found.series] == labels
    assert found.series[2].plan == {"stack": ["rkv", "protect"]}
    assert found.series[3].plan == {"stack": ["h2o"]}


def test_a_single_entry_needs_no_list(tmp_path: Path) -> None:
    single = SWEEP.replace('["a", "b"]', '["a"]').replace(
        '["reasoner", "reasoner-needle:length=60"]', '["t"]'
    )
    single = single.replace("[0, 1]", "[3]").replace("[16, 32]", "[16]")
    plain = single.replace('models = ["a"]', 'model = "a"').replace('tasks = ["t"]', 'task = "t"')
    plain = plain.replace("seeds = [3]", "seed = 3").replace("budgets = [16]", "budgets = 16")
    assert load_preset(written(tmp_path, plain)) == load_preset(written(tmp_path, single))


def test_a_knob_need_not_be_quoted(tmp_path: Path) -> None:
    quoted = load_preset(written(tmp_path, SWEEP))
    plain = SWEEP.replace('"rkv.mix_lambda"', "rkv.mix_lambda")
    assert load_preset(written(tmp_path, plain)) == quoted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('models = ["a", "b"]', 'models = ["a"]\nmodel = "b"'), "'model' and 'models'"),
        (('models = ["a", "b"]', "models = []"), "models"),
        (("seeds = [0, 1]", "seeds = [0, -1]"), "seeds"),
        (("seeds = [0, 1]", "seeds = [0, 1.5]"), r"1\.5"),
        (("[0.1, 0.2]", "[]"), r"rkv\.mix_lambda"),
        (('"zip"', '"cross"'), "combine.*'cross'.*'product', 'zip'"),
        (('"zip"', '["zip"]'), "combine.*'product', 'zip'"),
        (('["full", "rkv+protect"]', "[1]"), "policies"),
        (('"mine.toml"', '"yours.toml"'), r"yours\.toml"),
        (("combine", "combin"), "'combin'"),
    ],
)
def test_an_invalid_sweep_file_is_refused_with_the_reason(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    assert change[0] in SWEEP
    with pytest.raises(KVPolicyError, match=message) as caught:
        load_preset(written(tmp_path, SWEEP.replace(*change)))
    assert "\n" not in str(caught.value)
