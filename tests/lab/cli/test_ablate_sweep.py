"""``kvpolicy ablate`` with lists on the command line, and with ``--dry-run``."""

import csv
import json
from pathlib import Path

import pytest
from shell import Shell, refusal

SMALL = (
    *("--n", 2, "--slots", 2, "--max-new-tokens", 12),
    *("--budgets", "12,20", "--buffer", 6, "--workers", 1),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.nightly
def test_each_task_has_a_table_and_a_plot_and_seeds_are_pooled(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full,h2o")
    words += ("--task", "reasoner", "--task", "perplexity:of=reasoner", "--seeds", "0,1")
    words += ("--grid", "h2o.n_recent=2,4", "--output", "out")
    answer = kvpolicy(*words)
    assert answer.status == 0, answer.err
    first, second = answer.out.split("\n\n")
    assert first.startswith("tiny on reasoner\n")
    assert second.startswith("tiny on perplexity:of=reasoner\n")
    assert "accuracy" in first
    assert "perplexity" in second
    out = tmp_path / "out"
    plots = sorted(path.name for path in out.glob("plot*"))
    assert plots == ["plot-1.png", "plot-1.svg", "plot-2.png", "plot-2.svg"]
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    with (out / "table.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [(row["task"], row["series"], row["budget"]) for row in table] == [
        (task, series, budget)
        for task in ("reasoner", "perplexity:of=reasoner")
        for series, budget in [
            ("full", None),
            ("h2o, n_recent=2", 12),
            ("h2o, n_recent=2", 20),
            ("h2o, n_recent=4", 12),
            ("h2o, n_recent=4", 20),
        ]
    ]
    assert all(row["seeds"] == [0, 1] and row["n"] == 4 for row in table)
    assert [line["seeds"] for line in lines] == ["0 1"] * 10
    assert lines[0]["accuracy"] != "" == lines[0]["perplexity"]
    assert lines[9]["perplexity"] != "" == lines[9]["accuracy"]
    message = answer.err.splitlines()
    assert "20 cells, 40 samples" in message[0]
    assert any(line.startswith("20/20  perplexity:of=reasoner, seed ") for line in message)


def test_a_dry_run_lists_the_cells_and_writes_nothing(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full,h2o")
    plain = kvpolicy(*words, "--dry-run")
    assert plain.status == 0, plain.err
    lines = [line.split() for line in plain.out.splitlines()[2:5]]
    assert [(line[-5], *line[-2:]) for line in lines] == [
        ("all", "2", "2"),
        ("12", "2", "2"),
        ("20", "2", "2"),
    ]
    assert "3 cells, 6 samples" in plain.out
    assert "Nothing was written." in plain.out
    found = kvpolicy(*words, "--dry-run", "--json", "--output", "out").json
    assert (found["cells"], found["samples"], found["left"]) == (3, 6, 6)
    assert (found["folder"], found["workers"]) == ("out", 1)
    (group,) = found["groups"]
    assert (group["task"], group["cells"], group["left"]) == ("reasoner", 3, 6)
    assert [(row["series"], row["budget"], row["left"]) for row in found["table"]] == [
        ("full", None, 2),
        ("h2o", 12, 2),
        ("h2o", 20, 2),
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.nightly
def test_a_dry_run_counts_finished_samples(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "h2o", "--output", "out")
    kvpolicy(*words)
    before = {p.name: p.read_bytes() for p in Path("out").iterdir()}
    found = kvpolicy(*words, "--dry-run", "--json").json
    assert (found["samples"], found["left"]) == (4, 0)
    assert "4 of them done in out" in kvpolicy(*words, "--dry-run").out
    assert {p.name: p.read_bytes() for p in Path("out").iterdir()} == before
    other = kvpolicy(*words, "--n", 3, "--dry-run")
    assert "n is 2" in refusal(other)


@pytest.mark.nightly
def test_a_dry_run_refuses_a_damaged_folder(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "h2o", "--output", "out")
    kvpolicy(*words)
    samples = Path("out", "samples.jsonl")
    samples.write_bytes(b"no JSON\n" + samples.read_bytes())
    assert "out/samples.jsonl, line 1" in refusal(kvpolicy(*words, "--dry-run"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--grid", "h2o.n_recent"), "--grid 'h2o.n_recent' is not KEY=V1,V2"),
        (("--grid", "h2o.n_recent="), "is not KEY=V1,V2"),
        (("--grid", "a.b=1", "--grid", "a.b=2"), "'a.b' twice"),
        (("--grid", "h2o.n_rcent=1,2"), "n_recent"),
        (("--grid", "tova.x=1"), "uses no policy 'tova'"),
        (("--seeds", "0,x"), "--seeds was given 'x'"),
        (("--seeds", ""), "--seeds was given no number"),
        (("--zip", "--seeds", "0,1,2"), "3 of seeds, 2 of budgets"),
    ],
    ids=str,
)
def test_malformed_lists_are_refused(
    kvpolicy: Shell, model_folder: Path, words: tuple[str, ...], message: str
) -> None:
    fixed = ("ablate", "--model", model_folder, *SMALL, "--policies", "h2o")
    assert message in refusal(kvpolicy(*fixed, *words, "--output", "out"))
    assert not Path("out").exists()
