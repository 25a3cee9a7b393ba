"""Pooling over seeds: no sample lost or doubled, questions identified by their text."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import complete_edit, write_lines, write_run

from kvpolicy.lab.analysis.pooling import PooledCell, pool, pool_by_seed
from kvpolicy.lab.statistics import wilson
from kvpolicy.lab.store.read import RunFolder, read_run
from kvpolicy.lab.tasks.task import ACCURACY


def _run(folder: Path, **how: Any) -> RunFolder:
    return read_run(write_run(folder, **how))


def _change_items(folder: Path, **changes: Any) -> None:
    """Rewrite ``items.jsonl``: each change is a function of the record."""
    path = folder / "items.jsonl"
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for record in records:
        record |= {name: change(record) for name, change in changes.items()}
    write_lines(path, records)
    complete_edit(folder)


def test_only_seeds_are_pooled(tmp_path: Path) -> None:
    run = _run(tmp_path, seeds=(0, 1, 2), models=("a", "b"), tasks=("t", "u"))
    pooled = pool([run])
    assert [(c.group.model, c.group.task, c.name) for c in pooled] == [
        (model, task, name)
        for model in "ab"
        for task in "tu"
        for name in ("full cache", "H2O@64", "H2O@96")
    ]
    assert all(cell.seeds == (0, 1, 2) for cell in pooled)
    assert all(len(cell.samples) == cell.num_expected == 24 for cell in pooled)
    keys = Counter(sample.key for cell in pooled for sample in cell.samples)
    assert keys == dict.fromkeys(run.samples, 1)


@pytest.mark.parametrize(
    "other",
    [
        {"device": "cuda:0"},
        {"split": "tune"},
        {"max_new_tokens": 99},
        {"sampling": "temperature 1"},
        {"model_fingerprint": "f" * 16},
        {"slots": 2},
        {"dtype": "bfloat16"},
    ],
    ids=lambda other: next(iter(other)),
)
def test_settings_that_differ_in_anything_else_are_not_pooled(
    other: dict[str, Any], tmp_path: Path
) -> None:
    first = _run(tmp_path / "1", seeds=(0,))
    second = _run(tmp_path / "2", seeds=(1,), **other)
    assert len(pool([first, second])) == 6
    assert [cell.seeds for cell in pool([first, second])] == [(0,)] * 3 + [(1,)] * 3


def test_seeds_of_several_runs_are_pooled(tmp_path: Path) -> None:
    runs = [_run(tmp_path / f"{seed}", seeds=(seed,)) for seed in (3, 1)]
    pooled = pool(runs)
    assert [(cell.seeds, cell.runs, len(cell.samples)) for cell in pooled] == [
        ((1, 3), ("3", "1"), 16)
    ] * 3
    assert pooled[0].timing is not None
    assert (pooled[0].timing.new_tokens, pooled[0].timing.elapsed_s) == (320, 4.0)


def test_a_sample_that_is_in_several_runs_counts_once(tmp_path: Path) -> None:
    once = _run(tmp_path / "once")
    copy = _run(tmp_path / "copy")
    longer = _run(tmp_path / "longer", n=12)
    assert [len(cell.samples) for cell in pool([once, copy])] == [8, 8, 8]
    cells = pool([once, longer, copy])
    assert [(len(c.samples), c.num_expected) for c in cells] == [(12, 12)] * 3
    (timing,) = {cell.timing for cell in pool([once, copy])[:1]}
    assert timing is not None
    assert timing.num_requests == 8


def test_a_plan_with_two_names_is_one_plan(tmp_path: Path) -> None:
    runs = [
        _run(tmp_path / series, plans=[(series, 64)], seeds=(seed,))
        for seed, series in enumerate(("H2O", "H2O as published"))
    ]
    (cell,) = pool(runs)
    assert (cell.name, cell.seeds, len(cell.samples)) == ("H2O@64", (0, 1), 16)


def test_plans_of_one_name_that_differ_are_told_apart(tmp_path: Path) -> None:
    """By their buffer, as a sweep that tries buffers would; else by their digest."""
    plans = [("full cache", None), ("H2O", 64), ("R-KV", 64)]
    small = _run(tmp_path / "small", plans=plans)
    large = _run(tmp_path / "large", plans=[*plans[:2], ("H2O", 96)], buffer=32)
    assert [cell.name for cell in pool([small])] == ["full cache", "H2O@64", "R-KV@64"]
    names = [cell.name for cell in pool([small, large])]
    assert names == [
        *("full cache", "H2O, buffer=16@64", "R-KV@64"),
        *("H2O, buffer=32@64", "H2O, buffer=32@96"),
    ]
    assert [cell.name for cell in pool_by_seed([small, large])] == names
    # Of one buffer, and with other policies: of plan files of one name.
    folder = write_run(tmp_path / "other", plans=[("H2O", 64), ("R-KV", 64)], n=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    for cell in manifest["run"]["cells"]:
        cell["series"] = "mine"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    complete_edit(folder)
    assert [cell.name for cell in pool([read_run(folder)])] == [
        f"mine, plan={cell['plan'][:8]}@64" for cell in manifest["run"]["cells"]
    ]


def test_an_interrupted_cell_leaves_no_timing(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a"), _run(tmp_path / "b", seeds=(1,), timed=False)]
    assert pool(runs)[0].timing is None


def test_a_question_of_two_seeds_is_one_question(tmp_path: Path) -> None:
    """Each seed asks the same eight questions in another order."""
    folder = write_run(
        tmp_path, seeds=(0, 1), outcome=lambda cell, item, attempt: {"correct": item < 4}
    )
    _change_items(
        folder,
        prompt=lambda r: f"question {(r['item'] + r['seed']) % 8}",
        answer=lambda r: "",
    )
    first = pool([read_run(folder)])[0]
    assert Counter(sample.item for sample in first.samples) == dict.fromkeys(range(8), 2)
    found = ACCURACY.estimate(first.samples)
    assert found is not None
    assert found.value == 0.5
    assert found.high - found.low > wilson(8, 16).high - wilson(8, 16).low, "8 questions, not 16"


def test_questions_of_different_seeds_are_different(tmp_path: Path) -> None:
    first = pool([_run(tmp_path, seeds=(0, 1))])[0]
    assert Counter(sample.item for sample in first.samples) == dict.fromkeys(range(16), 1)


def test_a_question_with_the_prompts_of_two_models_is_one_question(tmp_path: Path) -> None:
    folder = write_run(tmp_path, models=("a", "b"), seeds=(0, 1))
    _change_items(folder, prompt=lambda r: f"<{r['model']}>{r['prompt']}")
    cells = pool([read_run(folder)])
    numbers = [{sample.item for sample in cell.samples} for cell in cells]
    assert numbers == [set(range(16))] * 6


def test_passages_that_two_tokenizers_cut_are_no_pairs(tmp_path: Path) -> None:
    """They have no answer, and a reference only where one is scored."""
    folder = write_run(tmp_path, models=("a", "b"))
    _change_items(
        folder,
        prompt=lambda r: r["prompt"] + ", and more" * (r["model"] == "b" and r["item"] > 4),
        answer=lambda r: "",
        reference=lambda r: None,
    )
    cells = pool([read_run(folder)])
    a, b = (
        {sample.item for cell in cells if cell.group.model == model for sample in cell.samples}
        for model in ("a", "b")
    )
    assert len(a) == len(b) == 8
    assert len(a & b) == 5, "equal prompts are one question"


def test_questions_of_two_models_differ_if_the_task_was_changed(tmp_path: Path) -> None:
    """Somebody edited the file of questions, and asked another model what stands there now."""
    runs = [write_run(tmp_path / model, models=(model,)) for model in ("a", "b")]
    _change_items(
        runs[1],
        prompt=lambda r: f"<b>{r['prompt']}",
        answer=lambda r: r["answer"] if r["item"] < 3 else f"-{r['answer']}",
        reference=lambda r: "because" if r["item"] == 0 else None,
    )
    a, *_, b = pool([read_run(folder) for folder in runs])
    shared = {sample.item for sample in a.samples} & {sample.item for sample in b.samples}
    assert {a.items[number].item for number in shared} == {1, 2}
    assert len({sample.item for sample in b.samples}) == 8


def test_a_task_changed_between_two_runs_has_other_questions(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "old"), write_run(tmp_path / "new", prompt_hash="0" * 16, slots=9)]
    _change_items(runs[1], prompt=lambda r: r["prompt"] + " Now!" * (r["item"] > 2))
    old, *_, new = pool([read_run(folder) for folder in runs])
    shared = {sample.item for sample in old.samples} & {sample.item for sample in new.samples}
    assert {old.items[number].item for number in shared} == {0, 1, 2}


def test_items_without_a_record_are_identified_by_their_number(tmp_path: Path) -> None:
    folder = write_run(tmp_path, seeds=(0, 1), models=("a", "b"))
    (folder / "items.jsonl").unlink()
    numbers = [{sample.item for sample in cell.samples} for cell in pool([read_run(folder)])]
    assert numbers == [set(range(16))] * 6


@given(
    seeds=st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True),
    done=st.integers(0, 60),
    attempts=st.integers(1, 3),
)
def test_no_sample_is_lost_or_doubled_whatever_is_finished(
    seeds: list[int], done: int, attempts: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    run = _run(folder, seeds=seeds, n=3, attempts=attempts, only_first=done)
    pooled = pool([run])
    _check_adds_up(run, pooled)


def _check_adds_up(run: RunFolder, pooled: list[PooledCell]) -> None:
    assert sum(len(cell.samples) for cell in pooled) == len(run.samples)
    assert sum(cell.num_expected for cell in pooled) == run.num_expected
    for cell in pooled:
        for sample in cell.samples:
            original = run.samples[sample.key]
            assert sample.cell == cell.id
            assert original.cell in cell.cells
            assert cell.items[sample.item].item == original.item


def test_only_selected_cells_are_pooled(tmp_path: Path) -> None:
    run = _run(tmp_path, seeds=(0, 1))
    wanted = pool([run], lambda group, cell: group.seed == 1 and cell.budget == 96)
    assert [(cell.name, cell.seeds, len(cell.samples)) for cell in wanted] == [("H2O@96", (1,), 8)]
