"""``kvpolicy results``: what it lists, tabulates, compares and exports, and what it refuses."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run
from shell import Shell, refusal

from kvpolicy.lab.statistics import paired_proportions, wilson


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _worse(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """The full cache is always correct, other plans on items 0 to 3; item 5 is truncated."""
    if cell["budget"] is None:
        return {"correct": True}
    failed = {"correct": False, "finish_reason": "error", "error": "too long", "num_tokens": 0}
    special: dict[int, dict[str, Any]] = {
        5: {"correct": False, "finish_reason": "length"},
        6: {"correct": None, "ungraded": "no verdict within 20 s"},
        7: failed,
    }
    return special.get(item, {"correct": item < 4})


# list


def test_runs_are_listed_with_their_progress(kvpolicy: Shell) -> None:
    write_run(Path("kvpolicy-ablate/a"), outcome=_worse, seeds=(0, 1))
    write_run(Path("kvpolicy-ablate/b"), models=("x", "y"), only_first=5)
    answer = kvpolicy("results", "list")
    _, _, a, b = answer.out.splitlines()
    assert a.split()[0] == "kvpolicy-ablate/a"
    assert a.split()[-3:] == ["6", "48", "4"], "cells, samples, failed"
    assert "x, y" in b
    assert "5 of 48" in b
    first, second = kvpolicy("results", "list", "--json").json
    assert first["started"] == "2026-01-02T03:04:05+00:00"
    assert (first["num_samples"], first["num_expected"], first["num_errors"]) == (48, 48, 4)
    assert (second["models"], second["num_cells"]) == (["x", "y"], 6)


def test_a_damaged_run_does_not_hide_others(kvpolicy: Shell) -> None:
    write_run(Path("kvpolicy-ablate/a"))
    write_run(Path("kvpolicy-ablate/b"))
    Path("kvpolicy-ablate/a/samples.jsonl").write_text("nonsense\n")
    answer = kvpolicy("results", "list")
    assert answer.status == 0
    assert "line 1, is damaged" in answer.err
    assert "kvpolicy-ablate/b" in answer.out
    assert [one["problem"] is None for one in kvpolicy("results", "list", "--json").json] == [
        False,
        True,
    ]


def test_a_folder_without_runs_is_reported(kvpolicy: Shell, tmp_path: Path) -> None:
    answer = kvpolicy("results", "list", tmp_path)
    assert (answer.status, answer.out) == (0, "")
    assert "no run in" in answer.err
    assert kvpolicy("results", "list", tmp_path, "--json").json == []
    assert "nowhere" in refusal(kvpolicy("results", "list", "nowhere"))


# table


def test_a_table_counts_failed_and_ungraded_samples(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse, seeds=(0, 1))
    full, small, _ = kvpolicy("results", "table", "run", "--json").json
    assert (full["n"], full["num_correct"]) == (16, 16)
    assert (small["n"], small["num_correct"], small["num_errors"]) == (16, 8, 2)
    assert (small["num_ungraded"], small["truncated"]) == (2, 2 / 16)
    plain = wilson(8, 16)
    assert small["accuracy"]["value"] == 0.5
    assert small["accuracy"]["low"] == pytest.approx(plain.low)
    assert small["accuracy"]["high"] == pytest.approx(plain.high)
    assert small["difference"]["value"] == -0.5
    assert (small["seeds"], small["num_expected"]) == ([0, 1], 16)
    text = kvpolicy("results", "table", "run").out
    assert "16 (2 failed) (2 ungraded)" in text
    assert "0,1" in text


def test_a_table_in_latex_has_a_row_for_each_cell(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse)
    answer = kvpolicy("results", "table", "run", "--latex")
    assert answer.status == 0
    rows = [line.split("&")[0].strip() for line in answer.out.splitlines() if "&" in line]
    shown = kvpolicy("results", "table", "run", "--json").json
    assert rows[1:] == [one["series"] for one in shown]
    assert kvpolicy("results", "table", "run", "--latex", "--json").status == 2


def test_csv_and_json_have_the_same_values(kvpolicy: Shell) -> None:
    write_run(Path("a"), outcome=_worse)
    write_run(Path("b"), models=("other",), only_first=8)
    records = kvpolicy("results", "table", "a", "b", "--json").json
    lines = list(csv.DictReader(io.StringIO(kvpolicy("results", "table", "a", "b", "--csv").out)))
    assert len(lines) == len(records) == 4
    for line, record in zip(lines, records, strict=True):
        assert line["model"] == record["model"]
        assert line["runs"].split() == record["runs"]
        assert float(line["accuracy_high"]) == record["accuracy"]["high"]
        assert line["difference_low"] == str((record["difference"] or {"low": ""})["low"])


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--series", "h2o"], ["H2O@64", "H2O@96"]),
        (["--budget", "64"], ["H2O@64"]),
        (["--budget", "all", "--budget", "96"], ["full cache@None", "H2O@96"]),
        (["--seed", "1", "--budget", "96", "--model", "reasoner"], ["H2O@96"]),
        (["--task", "reasoner", "--series", "full cache"], ["full cache@None"]),
    ],
)
def test_options_select_rows_of_a_table(
    kvpolicy: Shell, words: list[str], names: list[str]
) -> None:
    write_run(Path("run"), seeds=(0, 1))
    rows = kvpolicy("results", "table", "run", "--json", *words).json
    assert [f"{row['series']}@{row['budget']}" for row in rows] == names
    assert all(row["seeds"] == ([1] if "--seed" in words else [0, 1]) for row in rows)


def test_a_table_by_difficulty_holds_every_sample(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse, seeds=(0, 1))
    rows = kvpolicy("results", "table", "run", "--by", "depth", "--json").json
    assert [row["facet_value"] for row in rows] == [3, 3, 3, 4, 4, 4]
    assert sum(row["n"] for row in rows) == 48
    assert " depth " in kvpolicy("results", "table", "run", "--by", "depth").out


def test_settings_that_differ_between_runs_become_columns(kvpolicy: Shell) -> None:
    write_run(Path("a"))
    write_run(Path("b"), max_new_tokens=50, models=("m",))
    header = kvpolicy("results", "table", "a", "b").out.splitlines()[0]
    assert header.split()[:2] == ["model", "max_new_tokens"]
    assert "seeds" not in header


def test_tasks_with_other_columns_have_separate_tables(kvpolicy: Shell) -> None:
    kl = {"name": "kl", "title": "KL, nats", "heading": "KL", "is_share": False}
    own = {"name": "own", "title": "my own", "heading": "Own", "is_share": True}
    write_run(Path("a"))
    write_run(
        Path("b"),
        measure="agreement",
        columns=[kl, own],
        outcome=lambda *_: {"correct": None, "values": {"kl": 0.25, "own": 0.5}},
    )
    first, second = kvpolicy("results", "table", "a", "b").out.split("\n\n")
    assert "accuracy" in first
    assert "KL" not in first
    assert "KL, nats" in second
    assert "0.25..0.25" in second
    assert "50-50%" in second
    answer = kvpolicy("results", "compare", "a", "b", "a:H2O@64", "b:H2O@64")
    assert "'kl'" in refusal(answer)


def test_a_running_run_is_reported_as_incomplete(kvpolicy: Shell) -> None:
    write_run(Path("run"), only_first=10)
    answer = kvpolicy("results", "table", "run")
    assert "2 of 8 samples" in answer.err
    assert [row["n"] for row in kvpolicy("results", "table", "run", "--json").json] == [8, 2]
    write_run(Path("begun"), only_first=0)
    assert kvpolicy("results", "table", "begun").status == 0


# compare


def test_two_cells_are_compared_item_by_item(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse)
    words = ("results", "compare", "run", "H2O@64", "full cache")
    answer = kvpolicy(*words)
    assert "A - B: -50.0 points" in answer.out
    assert "both correct 4, only A 0, only B 4, neither 0" in answer.out
    assert "McNemar's exact test: p = 0.12" in answer.out
    found = kvpolicy(*words, "--json").json
    (one,) = found["comparisons"]
    expected = paired_proportions(4, 0, 4, 0)
    assert one["difference"] == {
        "value": expected.value,
        "low": expected.low,
        "high": expected.high,
    }
    assert one["p_value"] == pytest.approx(0.125)
    assert (one["a"]["num_errors"], one["a"]["num_ungraded"], one["a"]["num_truncated"]) == (
        1,
        1,
        1,
    )
    assert found["interval"] == "95 %, Newcombe's for paired proportions"
    lengths = (*words, "--column", "length", "--json")
    found = kvpolicy(*lengths).json
    assert found["interval"] == "95 %, BCa bootstrap over items, 10,000 resamples, seed 0"
    assert kvpolicy(*lengths).out == kvpolicy(*lengths).out
    assert kvpolicy(*lengths, "--bootstrap-seed", 5).json["interval"].endswith("seed 5")


def test_items_on_which_cells_differ_are_shown_without_control_characters(kvpolicy: Shell) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {**_worse(cell, item, attempt), "text": "\x1b[2Jgone\n\n" + "x" * 999 + " end"}

    write_run(Path("run"), outcome=outcome)
    words = ("results", "compare", "run", "h2o@64", "full", "--items")
    answer = kvpolicy(*words)
    text = answer.out
    assert "\x1b" not in text
    heads = [line for line in text.splitlines() if line.startswith("── item")]
    assert len(heads) == 4
    assert heads[0] == "── item 4, seed 0: depth 3, kind chains: A 0%, B 100% ──"
    assert text.count(" end\n") == 7, "of eight texts one failed"
    assert "A (too long)" in answer.words
    parted = kvpolicy(*words, "--json").json["comparisons"][0]["parted"]
    assert [one["item"] for one in parted] == [4, 5, 6, 7]
    assert parted[0]["prompt"] == "reasoner 0: what is 4?"
    assert parted[0]["a_texts"][0].startswith("\x1b[2Jgone")


def test_all_cells_are_compared_with_one_of_their_model(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse, models=("m", "n"), seeds=(0, 1))
    found = kvpolicy("results", "compare", "run", "--with", "full cache", "--json").json
    pairs = [
        (one["a"]["model"], one["a"]["budget"], one["b"]["model"], one["b"]["series"])
        for one in found["comparisons"]
    ]
    assert pairs == [(m, b, m, "full cache") for m in ("m", "n") for b in (64, 96)]
    for one in found["comparisons"]:
        assert one["p_value"] == pytest.approx(2 / 2**8)
        assert one["p_holm"] == pytest.approx(4 * 2 / 2**8)
    some = kvpolicy("results", "compare", "run", "--with", "full cache", "--budget", 64, "--json")
    holm = [one["p_holm"] for one in some.json["comparisons"]]
    assert holm == pytest.approx([2 * 2 / 2**8] * 2)
    text = kvpolicy("results", "compare", "run", "--with", "full cache").out
    assert "Holm" in text
    assert text.count("0.031") == 4


SERIES = (("H2O", 64), ("H2O", 96), ("R-KV", 64), ("R-KV", 96), ("full cache", None))


def _pairs(answer: Any) -> list[tuple[str, str]]:
    sides = [(one["a"], one["b"]) for one in answer.json["comparisons"]]
    return [(f"{a['series']}@{a['budget']}", f"{b['series']}@{b['budget']}") for a, b in sides]


def test_cells_are_compared_with_a_series_at_their_own_budget(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse, plans=SERIES)
    compare = ("results", "compare", "run", "--json", "--with")
    assert _pairs(kvpolicy(*compare, "H2O")) == [
        ("R-KV@64", "H2O@64"),
        ("R-KV@96", "H2O@96"),
    ]
    answer = kvpolicy("results", "compare", "run", "--with", "H2O")
    assert [line.split()[:2] for line in answer.out.splitlines()[2:4]] == [
        ["R-KV@64", "H2O@64"],
        ["R-KV@96", "H2O@96"],
    ]


def test_several_baselines_are_corrected_together(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse, plans=SERIES)
    several = ("results", "compare", "run", "--with", "R-KV", "--with", "H2O", "--with", "full")
    only_h2o = kvpolicy(*several, "--series", "H2O", "--json")
    rivals = [("H2O@64", "R-KV@64"), ("H2O@96", "R-KV@96")]
    with_full = [("H2O@64", "full cache@None"), ("H2O@96", "full cache@None")]
    assert _pairs(only_h2o) == rivals + with_full
    found = only_h2o.json["comparisons"]
    assert [one["p_holm"] for one in found] == pytest.approx([1, 1, *[4 * 2 / 2**4] * 2])
    pairs = _pairs(kvpolicy(*several, "--json"))
    assert len({frozenset(pair) for pair in pairs}) == len(pairs) == 6, "no pair twice"


def test_comparing_with_a_baseline_drops_no_count(kvpolicy: Shell) -> None:
    """The second cell has four of its samples, and of those that are done some have no answer."""
    write_run(Path("run"), outcome=_worse, plans=(("H2O", 64), ("full cache", None)), only_first=12)
    answer = kvpolicy("results", "compare", "run", "--with", "full cache")
    head, _, row, blank, *gaps = answer.out.splitlines()
    assert head.split()[:4] == ["cell", "baseline", "items", "unpaired"]
    assert row.split()[:5] == ["H2O@64", "full", "cache", "4", "4"]
    assert blank == ""
    assert gaps == ["H2O@64: of 8 samples 1 truncated, 1 failed, 1 ungraded"]
    assert "4 of 8 samples" in answer.err
    two = kvpolicy("results", "compare", "run", "H2O@64", "full cache")
    assert "4 of 8 samples" in two.err
    by_kind = kvpolicy("results", "compare", "run", "--with", "full", "--by", "kind").out
    chains, sums = by_kind.splitlines()[-2:]
    assert chains.split()[3:6] == ["chains", "0", "4"]
    assert sums.split()[3:6] == ["sums", "4", "0"]


def test_incomplete_cells_have_unique_labels(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse, models=("m", "n"), plans=(("H2O", 64),))
    write_run(Path("full"), models=("m", "n"), plans=(("full cache", None),), only_first=10)
    answer = kvpolicy("results", "compare", "run", "full", "--with", "full cache")
    gaps = "of 8 samples 1 truncated, 1 failed, 1 ungraded"
    assert answer.out.splitlines()[-2:] == [f"H2O@64, model {model}: {gaps}" for model in "mn"]
    assert "2 of 8 samples" in answer.err
    assert "model m is not complete" not in answer.err


def test_a_table_shows_the_bytes_of_the_largest_sample(kvpolicy: Shell) -> None:
    write_run(Path("run"))
    assert "max KV/sample" in kvpolicy("results", "table", "run").out
    row, *_ = kvpolicy("results", "table", "run", "--json").json
    assert row["peak_bytes"] == 1024 * (10 + 20 + 7)


def _compacted(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """The first five items are compacted; every policy is wrong on the first."""
    is_compacted = cell["budget"] is not None and item < 5
    return {"correct": not (is_compacted and item == 0), "compactions": int(is_compacted)}


def test_accuracies_are_shown_for_the_samples_whose_cache_was_compacted(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_compacted)
    lines = kvpolicy("results", "table", "run").out.splitlines()
    assert "compacted (n)" in lines[0]
    assert [line.split()[-7:-5] for line in lines[2:]] == [["-", "8"]] + [["(5)", "8"]] * 2
    assert "88% 53-98% 80% (5)" in " ".join(lines[3].split())
    full, small, _ = kvpolicy("results", "table", "run", "--json").json
    assert (full["compacted"], full["num_compacted"]) == (None, 0)
    assert (small["compacted"]["value"], small["num_compacted"]) == (0.8, 5)
    broken_down = kvpolicy("results", "table", "run", "--by", "kind", "--json").json
    assert [row["num_compacted"] for row in broken_down] == [0, 1, 1, 0, 4, 4]
    text = kvpolicy("results", "compare", "run", "H2O@64", "full").out
    assert "5 items with a compacted cache: A 80%, B 100%, A - B: -20.0 points" in text
    several = kvpolicy("results", "compare", "run", "--with", "full").out.splitlines()
    assert several[2].split()[3:6] == ["8", "0", "5"], "items, unpaired, compacted"


def test_a_comparison_can_be_broken_down(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse)
    words = ("results", "compare", "run", "H2O@64", "full", "--by", "kind")
    lines = kvpolicy(*words).out.splitlines()[-2:]
    assert [line.split()[3] for line in lines] == ["chains", "sums"]
    facets = kvpolicy(*words, "--json").json["comparisons"][0]["facets"]
    assert [(one["value"], one["difference"]["value"]) for one in facets] == [
        ("chains", -1.0),
        ("sums", 0.0),
    ]


def test_lengths_can_be_compared(kvpolicy: Shell) -> None:
    write_run(Path("run"), outcome=_worse)
    text = kvpolicy("results", "compare", "run", "H2O@64", "full", "--column", "length").out
    assert "A - B: +0, 95 % CI +0..+0, over 7 items" in text
    assert "A more 0, B more 0, equal 7" in text
    assert "Exact sign test: p = 1" in text


def test_cells_of_two_runs_are_compared(kvpolicy: Shell) -> None:
    write_run(Path("a"), outcome=_worse, slots=2)
    write_run(Path("b"), models=("other",))
    answer = kvpolicy("results", "compare", "a", "b", "a:H2O@64", "b:h2o@64")
    assert "over 8 items" in answer.out
    cell = json.loads(Path("b/manifest.json").read_text())["run"]["cells"][1]["cell"]
    assert kvpolicy("results", "compare", "a", "b", "a:H2O@64", cell[:8]).out == answer.out


def test_cells_without_an_item_in_common_are_no_error(kvpolicy: Shell) -> None:
    write_run(Path("a"))
    write_run(Path("b"), tasks=("other",))
    answer = kvpolicy("results", "compare", "a", "b", "a:H2O@64", "b:H2O@64", "--items")
    assert answer.status == 0
    assert "no item" in answer.out


REFUSED = {
    "no run": (["table", "nothing"], "nothing does not exist"),
    "a folder without runs": (["table", "empty"], "holds no run"),
    "an unknown series": (["table", "run", "--series", "H20"], "did you mean h2o?"),
    "an unknown budget": (["table", "run", "--budget", "65"], "no budget '65'"),
    "an unknown seed": (["export", "run", "--to", "a.csv", "--seed", "4"], "no seed 4"),
    "an unknown facet": (["table", "run", "--by", "dept"], "did you mean depth?"),
    "csv and json": (["table", "run", "--csv", "--json"], "give one of them"),
    "no cells": (["compare", "run"], "write run A B, cells being SERIES@BUDGET, or run --with"),
    "one cell": (["compare", "run", "H2O@64"], "given run H2O@64, which is not a run and two"),
    "an unknown cell": (["compare", "run", "H2O@65", "full"], "did you mean"),
    "several cells": (["compare", "run", "H2O", "full"], "may be any of 2 cells: H2O@64; H2O@96"),
    "a base nobody has": (["compare", "run", "--with", "rkv"], "no cell 'rkv'"),
    "no other cell at its budgets": (
        ["compare", "run", "--with", "h2o"],
        "no other cell can be compared with 'h2o'",
    ),
    "an unknown column": (["compare", "run", "h2o@64", "full", "--column", "x"], "not measured"),
    "items of many": (["compare", "run", "--with", "full", "--items"], "RUN A B"),
    "an ending": (["export", "run", "--to", "a.xlsx"], "ends in .csv or .parquet"),
    "a file that is there": (["export", "run", "--to", "there.csv"], "exists; choose another"),
    "a folder that is not": (["export", "run", "--to", "no/a.csv"], "there is no folder no"),
    "a folder": (["export", "run", "--to", "dir.csv", "--overwrite"], "exists; choose another"),
}


@pytest.mark.parametrize(("words", "sentence"), REFUSED.values(), ids=REFUSED)
def test_wrong_input_is_reported_in_a_sentence(
    kvpolicy: Shell, words: list[str], sentence: str
) -> None:
    write_run(Path("run"))
    Path("empty").mkdir()
    Path("dir.csv").mkdir()
    Path("there.csv").write_text("mine")
    assert sentence in refusal(kvpolicy("results", *words))
    assert Path("there.csv").read_text() == "mine"


# export


def test_samples_are_exported_and_only_replaced_on_demand(kvpolicy: Shell) -> None:
    write_run(Path("run"))
    words = ("results", "export", "run", "--to", "out.csv", "--items")
    answer = kvpolicy(*words)
    assert answer.status == 0
    assert "24 samples" in answer.err
    with Path("out.csv").open(newline="") as file:
        assert [row["prompt"] for row in csv.DictReader(file)][:1] == ["reasoner 0: what is 0?"]
    assert "exists" in refusal(kvpolicy(*words))
    assert kvpolicy(*words, "--overwrite", "--budget", 64).status == 0
    with Path("out.csv").open(newline="") as file:
        assert [row["budget"] for row in csv.DictReader(file)] == ["64.0"] * 8


# what ablate writes


@pytest.mark.slow
def test_tables_of_results_equal_those_of_ablate(kvpolicy: Shell, model_folder: Path) -> None:
    small = ("--n", 3, "--slots", 3, "--max-new-tokens", 20, "--budgets", "12", "--buffer", 6)
    words = ("--model", model_folder, *small, "--policies", "full,h2o", "--workers", 1)
    table = kvpolicy("ablate", *words, "--output", "kvpolicy-ablate/out", "--json").json["table"]
    (listed,) = kvpolicy("results", "list", "--json").json
    assert (listed["num_samples"], listed["num_expected"], listed["problem"]) == (6, 6, None)
    rows = kvpolicy("results", "table", "out", "--json").json
    for row, its in zip(rows, table, strict=True):
        assert {name: row[name] for name in its} == its
    assert kvpolicy("results", "compare", "out", "h2o", "full").status == 0
    assert kvpolicy("results", "export", "out", "--to", "out.csv", "--items").status == 0
