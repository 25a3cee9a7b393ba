"""Sweeps: every setting once, whoever wrote it down; samples of two settings never mix."""

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_comparisons import BASE, Catalogue, prepared

from kvpolicy.engine.results import Result, RunReport
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.jobs import ItemDone, Job, JobDone, News
from kvpolicy.lab.sweep.prepare import prepare
from kvpolicy.lab.sweep.runner import SampleDone, run
from kvpolicy.lab.sweep.sweep import points
from kvpolicy.lab.sweep.sweep_file import load_preset, series_of_stack
from kvpolicy.lab.tasks.measures import Outcome

MIX, WINDOW = "rkv.mix_lambda", "rkv.window_size"


def described(comparison: Comparison) -> list[tuple[object, ...]]:
    """Model, task, seed, series and budget of each cell."""
    found = []
    for cell in comparison.cells:
        group = comparison.group_of(cell)
        where = (group.model.name, group.task.name, group.seed)
        found.append((*where, cell.series, cell.budget))
    return found


names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True).map(tuple)
counts = st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True).map(tuple)


@given(names, names, counts, counts, counts, counts)
def test_a_product_has_every_setting_once_and_in_order(
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
    found = points(preset)
    assert [(p.model, p.task, p.seed, p.setting.knobs, p.setting.budget) for p in found] == expected


@given(st.integers(2, 4), st.lists(st.booleans(), min_size=5, max_size=5), st.randoms())
def test_side_by_side_lists_are_gone_through_together_and_single_entries_stay(
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
    found = points(preset)
    assert len(found) == (length if any(are_long) else 1)
    for i, point in enumerate(found):
        wanted = [one[i] if long else one[0] for one, long in zip(lists, are_long, strict=True)]
        seen = (point.model, point.task, point.seed, point.setting.knobs["x"], point.setting.budget)
        assert list(seen) == [str(wanted[0]), str(wanted[1]), *wanted[2:]]


def test_lists_of_unequal_length_cannot_be_gone_through_side_by_side() -> None:
    preset = attrs.evolve(BASE, seeds=(0, 1), budgets=(16, 32, 48), combine="zip")
    with pytest.raises(PlanError, match="2 of seeds, 3 of budgets"):
        points(preset)


def test_every_series_is_run_with_its_own_knobs_on_every_model_task_and_seed() -> None:
    tasks = ("reasoner", "needle:length=60")
    comparison = prepared(
        models=("a", "b"), tasks=tasks, seeds=(0, 3), budgets=(48, 64), knobs={MIX: (0.1, 0.25)}
    )
    expected = []
    for where in itertools.product(("a", "b"), tasks, (0, 3)):
        expected.append((*where, "full", None))
        for mix, budget in itertools.product(("0.1", "0.25"), (48, 64)):
            expected.append((*where, f"rkv, mix_lambda={mix}", budget))
        for budget in (48, 64):
            expected.append((*where, "streaming", budget))
    assert described(comparison) == expected
    for cell in comparison.cells:
        stack = cell.resolved.layers[0].stack[0]
        if stack.policy == "rkv":
            assert cell.knobs == {MIX: stack.knobs["mix_lambda"]}
        else:
            assert cell.knobs == {}


def test_names_of_samples_and_cells_are_unique() -> None:
    comparison = prepared(
        models=("a", "b"),
        # Two tasks whose questions are the same, and graded otherwise.
        tasks=("reasoner", "agreement:of=reasoner", "needle:length=60"),
        seeds=(0, 1),
        attempts=2,
        temperature=0.5,
        budgets=(48, 64),
        knobs={MIX: (0.1, 0.2)},
    )
    keys = [
        comparison.key(cell, item)
        for cell in comparison.cells
        for item in comparison.group_of(cell).items
    ]
    assert len(keys) == comparison.num_samples == len(set(keys))
    assert len({cell.id for cell in comparison.cells}) == 2 * 3 * 2 * (1 + 2 * 2 + 2)
    assert len({group.id for group in comparison.groups}) == 2 * 3 * 2


def test_another_answer_to_a_question_makes_another_sample() -> None:
    comparison = prepared(budgets=(48,))
    (group,), plan = comparison.groups, comparison.cells[0].digest
    items = [attrs.evolve(group.items[0], answer="not this"), *group.items[1:]]
    mended = attrs.evolve(group, items=items)
    assert mended.id != group.id
    same = [
        group.key(plan, old) == mended.key(plan, new)
        for old, new in zip(group.items, items, strict=True)
    ]
    assert same == [False, *[True] * (len(items) - 1)]


@pytest.mark.parametrize(
    "change",
    [
        {"models": ("b",)},
        {"tasks": ("needle:length=60",)},
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
def test_the_name_of_a_group_depends_on_all_that_its_samples_do(change: dict[str, Any]) -> None:
    (one,), (other,) = prepared().groups, prepared(**change).groups
    assert one.id != other.id
    assert prepared().groups[0].id == one.id


def test_one_model_under_two_names_is_run_once() -> None:
    twice = prepared(models=("a", "a'"), budgets=(48, 64))
    assert described(twice) == described(prepared(budgets=(48, 64)))
    # Side by side each brings another budget, and both belong to the one group.
    aside = prepared(models=("a", "a'"), budgets=(48, 64), combine="zip")
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
    prepare(attrs.evolve(BASE, models=("a", "b", "c"), seeds=(0, 1)), models)
    assert models.asked == ["c", "b", "a"]


def test_two_knobs_of_one_name_are_told_apart() -> None:
    series = (series_of_stack("rkv"), series_of_stack("snapkv"), series_of_stack("rkv+protect"))
    both = prepared(series=series, knobs={WINDOW: (4,), "snapkv.window_size": (4,)})
    assert [one[3] for one in described(both)] == [
        "rkv, window_size=4",
        "snapkv, window_size=4",
        "rkv+protect, window_size=4",
    ]
    stacked = prepared(
        series=(series_of_stack("streaming+protect"),),
        knobs={"streaming.n_sink": (2,), "protect.n_sink": (3,)},
    )
    assert described(stacked)[0][3] == "streaming+protect, streaming.n_sink=2, protect.n_sink=3"


def test_buffers_are_tried_like_knobs_where_there_is_one() -> None:
    comparison = prepared(knobs={"buffer": (4, 8)})
    assert [(cell.series, cell.buffer) for cell in comparison.cells] == [
        ("full", None),
        ("rkv, buffer=4", 4),
        ("rkv, buffer=8", 8),
        ("streaming, buffer=4", 4),
        ("streaming, buffer=8", 8),
    ]


@pytest.mark.parametrize(
    ("changes", "overrides", "said"),
    [
        ({"knobs": {"h2o.n_recent": (1,)}}, [], "no policy 'h2o'"),
        ({"knobs": {"rkv.mix_lamda": (1,)}}, [], "mix_lambda"),
        ({"knobs": {"budget": (1, 2)}}, [], "--budgets"),
        ({"knobs": {"bufer": (1, 2)}}, [], "buffer"),
        ({"knobs": {MIX: (0.1, 0.2)}}, [f"{MIX}=0.3"], "--set"),
        ({"tasks": ("reasoner", "reasonr")}, [], "did you mean reasoner"),
        ({"series": (series_of_stack("ful"),)}, [], "did you mean full"),
    ],
)
def test_what_fits_nothing_is_refused(
    changes: dict[str, Any], overrides: list[str], said: str
) -> None:
    with pytest.raises(KVPolicyError, match=said) as caught:
        prepare(attrs.evolve(BASE, **changes), Catalogue(), overrides=overrides)
    assert "\n" not in str(caught.value)


class Shuffled:
    """A pool whose news of all jobs come in any order."""

    def __init__(self, seed: int, report: RunReport | None = None) -> None:
        self._rng = random.Random(seed)
        self._report = report or RunReport()
        self.served: list[Job] = []

    def serve(self, jobs: Sequence[Job]) -> Iterator[News]:
        self.served += jobs
        left = [list(job.items) for job in jobs]
        order = [number for number, items in enumerate(left) for _ in items]
        self._rng.shuffle(order)
        for number in order:
            job, place = jobs[number], left[number].pop()
            yield ItemDone(job, place, Outcome(Result(0, text=f"{job.cell} {place}")))
            if not left[number]:
                yield JobDone(job, self._report, 0.0)


@given(st.integers(0, 99), st.integers(0, 40))
def test_samples_of_two_groups_never_mix(seed: int, stop: int) -> None:
    import tempfile

    comparison = prepared(
        models=("a", "b"),
        tasks=("reasoner", "needle:length=60"),
        seeds=(0, 1),
        attempts=2,
        temperature=1.0,
        series=BASE.series[:2],
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "out"
        for most in (stop, None):  # left somewhere, and gone on with
            with Store(folder, comparison.to_dict()) as store:
                events = run(comparison, store, Shuffled(seed))
                done = [e for e in itertools.islice(events, most) if isinstance(e, SampleDone)]
                events.close()
        assert stop or len(done) == comparison.num_samples
        with Store(folder, comparison.to_dict()) as store:
            samples = list(store.samples.values())
    assert len(samples) == comparison.num_samples
    for sample in samples:
        cell = comparison.cell(sample.cell)
        group = comparison.group_of(cell)
        assert (sample.group, sample.plan, sample.series) == (group.id, cell.digest, cell.series)
        assert (sample.model, sample.task) == (group.model.name, group.task.name)
        assert sample.seed == group.seed
        wanted, place = sample.text.split()
        item = group.items[int(place)]
        assert (wanted, item.index, item.attempt) == (cell.id, sample.item, sample.attempt)
        assert sample.key == comparison.key(cell, item)


def test_a_timing_tells_what_policies_took_of_decoding(tmp_path: Path) -> None:
    """Five seconds of scoring, most of them while prompts entered."""
    comparison = prepared()
    report = RunReport(decode_s=2.0, prefill_s=6.0, score_s=5.0, decode_policy_s=0.5)
    with Store(tmp_path, comparison.to_dict()) as store:
        list(run(comparison, store, Shuffled(0, report)))
    timings = read_run(tmp_path).timings
    assert timings.keys() == {cell.id for cell in comparison.cells}
    assert {(one.policy_s, one.decode_s) for one in timings.values()} == {(0.5, 2.0)}


def test_jobs_come_model_after_model_and_the_costliest_cells_first(tmp_path: Path) -> None:
    comparison = prepared(models=("b", "a"), seeds=(0, 1), budgets=(48, 64))
    pool = Shuffled(0)
    with Store(tmp_path, comparison.to_dict()) as store:
        list(run(comparison, store, pool))
    cells = [comparison.cell(job.cell) for job in pool.served]
    models = [comparison.group_of(cell).model.name for cell in cells]
    assert models == sorted(models, reverse=True)
    for _, mine in itertools.groupby(cells, lambda cell: comparison.group_of(cell).model.name):
        costs = [cell.budget or float("inf") for cell in mine]
        assert costs == sorted(costs, reverse=True)


SWEEP = """
models = ["a", "b"]
tasks = ["reasoner", "needle:length=60"]
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
    monkeypatch.chdir("/")  # plans are found beside the file that names them
    found = load_preset(written(tmp_path, SWEEP))
    assert (found.models, found.tasks) == (("a", "b"), ("reasoner", "needle:length=60"))
    assert (found.seeds, found.budgets, found.buffer) == ((0, 1), (16, 32), 8)
    assert found.knobs == {MIX: (0.1, 0.2), "buffer": (4,)}
    assert (found.combine, found.name) == ("zip", "sweep")
    labels = ["first", "full", "rkv+protect", "mine", "reasoner-mix"]
    assert [series.label for series in found.series] == labels
    assert found.series[2].plan == {"stack": ["rkv", "protect"]}
    assert found.series[3].plan == {"stack": ["h2o"]}


def test_a_list_of_one_entry_is_written_as_the_entry(tmp_path: Path) -> None:
    single = SWEEP.replace('["a", "b"]', '["a"]').replace(
        '["reasoner", "needle:length=60"]', '["t"]'
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
    ("change", "said"),
    [
        (('models = ["a", "b"]', 'models = ["a"]\nmodel = "b"'), "both 'model' and 'models'"),
        (('models = ["a", "b"]', "models = []"), "models"),
        (("seeds = [0, 1]", "seeds = [0, -1]"), "seeds"),
        (("seeds = [0, 1]", "seeds = [0, 1.5]"), "1.5 is not a whole number"),
        (("[0.1, 0.2]", "[]"), "'rkv.mix_lambda' has no value"),
        (('"zip"', '"cross"'), "combine"),
        (('["full", "rkv+protect"]', "[1]"), "policies"),
        (('"mine.toml"', '"yours.toml"'), "yours.toml"),
        (("combine", "combin"), "did you mean combine"),
    ],
)
def test_a_wrong_sweep_is_answered_with_what_is_wrong(
    tmp_path: Path, change: tuple[str, str], said: str
) -> None:
    assert change[0] in SWEEP
    with pytest.raises(KVPolicyError, match=said) as caught:
        load_preset(written(tmp_path, SWEEP.replace(*change)))
    assert "\n" not in str(caught.value)
