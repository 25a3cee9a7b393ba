"""A sweep records the kept rows of its first examples, and of no others."""

import json
from pathlib import Path
from typing import Any

import pytest
from shell import Shell

from kvpolicy import Engine, Plan
from kvpolicy.errors import OutputError
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.recording import KeptRecord, record_kept_rows
from kvpolicy.lab.tasks.task import load_task
from kvpolicy.model.loading import load_model

SMALL = (
    *("ablate", "--policies", "full,h2o", "--budgets", 16, "--buffer", 6, "--n", 4),
    *("--slots", 3, "--max-new-tokens", 40, "--workers", 1, "--output", "out"),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lines(name: str) -> list[dict[str, Any]]:
    path = Path("out") / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.nightly
def test_a_record_is_what_the_engine_keeps_of_that_item(
    kvpolicy: Shell, model_folder: Path
) -> None:
    assert kvpolicy(*SMALL, "--model", model_folder).status == 0
    samples = {sample["key"]: sample for sample in lines("samples.jsonl")}
    records = [KeptRecord.from_dict(record) for record in lines("kept.jsonl")]
    found = [(samples[one.key]["series"], one.item, one.attempt) for one in records]
    assert sorted(found) == [(name, item, 0) for name in ("full", "h2o") for item in (0, 1)]
    model, tokenizer = load_model(str(model_folder))
    plan = Plan.uniform("h2o", budget=16, buffer=6)
    prompts = [item.prompt for item in load_task("reasoner").examples(4, seed=0)]
    for one in records:
        sample = samples[one.key]
        assert one.cell == sample["cell"]
        assert one.num_prompt == sample["prompt_len"]
        assert len(one.tokens) == one.num_prompt + sample["num_tokens"]
        assert "".join(one.tokens[: one.num_prompt]) == prompts[one.item]
        if sample["series"] == "h2o":
            run = Engine(model, tokenizer, plan).generate([prompts[one.item]], max_new_tokens=40)
            with record_kept_rows(run, [0]) as recorder:
                rows = recorder.pop(*run.results())
            assert one == KeptRecord.of(
                rows, key=one.key, cell=one.cell, item=one.item, attempt=one.attempt
            )
            assert rows.layers[0].at
        else:
            assert all(layer.at == [] for layer in one.layers)


@pytest.mark.nightly
def test_of_several_attempts_the_first_is_recorded(kvpolicy: Shell, model_folder: Path) -> None:
    more = ("--attempts", 3, "--temperature", 1, "--record", 1)
    assert kvpolicy(*SMALL, *more, "--model", model_folder).status == 0
    assert [(one["item"], one["attempt"]) for one in lines("kept.jsonl")] == [(0, 0)] * 2
    assert len(lines("samples.jsonl")) == 24


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["agreement:of=reasoner", "perplexity:of=reasoner"])
def test_samples_of_other_metrics_are_recorded_too(
    kvpolicy: Shell, model_folder: Path, task: str
) -> None:
    """The reference with a full cache runs in another engine, and is not recorded."""
    words = (*SMALL, "--model", model_folder, "--task", task, "--record", 4)
    answer = kvpolicy(*words)
    assert answer.status == 0, answer.err
    samples = {one["key"]: one for one in lines("samples.jsonl")}
    assert {one["key"] for one in lines("kept.jsonl")} == samples.keys()
    for one in lines("kept.jsonl"):
        compactions = {at for layer in one["layers"] for at in layer["at"]}
        assert len(compactions) == samples[one["key"]]["compactions"]


@pytest.mark.nightly
def test_samples_without_a_record_are_run_again_to_make_it(
    kvpolicy: Shell, model_folder: Path
) -> None:
    assert kvpolicy(*SMALL, "--model", model_folder, "--record", 0).status == 0
    assert lines("kept.jsonl") == []
    samples = lines("samples.jsonl")
    for num, left in ((1, 2), (2, 2)):
        dry = kvpolicy(*SMALL, "--model", model_folder, "--record", num, "--dry-run", "--json")
        assert dry.json["left"] == left
        again = kvpolicy(*SMALL, "--model", model_folder, "--record", num)
        assert f"{left} samples of --record {num} have no record" in again.err
        assert [(one["item"], one["attempt"]) for one in lines("kept.jsonl")] == [
            (item, 0) for item in range(num) for _ in range(2)
        ]
        assert lines("samples.jsonl") == samples, "equal samples are not stored twice"
    Path("out/kept.jsonl").write_bytes(b"")
    assert "kept.jsonl lacks 4 of 4 records" in kvpolicy("results", "table", "out").err
    assert kvpolicy(*SMALL, "--model", model_folder, "--record", 2).status == 0
    assert len(lines("kept.jsonl")) == 4
    assert kvpolicy("results", "table", "out").err == ""


@pytest.mark.nightly
def test_samples_do_not_depend_on_record(kvpolicy: Shell, model_folder: Path) -> None:
    texts = []
    for record in (0, 4):
        words = (*SMALL[:-1], f"out{record}", "--model", model_folder, "--record", record)
        assert kvpolicy(*words).status == 0
        found = (Path(f"out{record}") / "samples.jsonl").read_text().splitlines()
        texts.append({one["key"]: one["text"] for one in map(json.loads, found)})
    assert texts[0] == texts[1]


@pytest.mark.nightly
def test_a_record_whose_sample_could_not_be_stored_is_not_doubled(
    kvpolicy: Shell, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Store.add

    def is_full(*_: object) -> None:
        msg = "samples.jsonl cannot be written: No space left on device"
        raise OutputError(msg)

    monkeypatch.setattr(Store, "add", is_full)
    assert kvpolicy(*SMALL, "--model", model_folder).status == 2
    (before,) = lines("kept.jsonl")
    assert lines("samples.jsonl") == []
    monkeypatch.setattr(Store, "add", add)
    assert kvpolicy(*SMALL, "--model", model_folder).status == 0
    keys = [one["key"] for one in lines("kept.jsonl")]
    assert keys[0] == before["key"]
    assert len(keys) == len(set(keys)) == 4
    assert set(keys) <= {one["key"] for one in lines("samples.jsonl")}
