"""Exports: every sample once, in typed columns that do not depend on their contents."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from run_folders import write_run

from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.export import (
    SampleTable,
    check_can_write,
    fixed_columns,
    flatten_samples,
    write_table,
)
from kvpolicy.lab.analysis.table import csv_line, csv_text
from kvpolicy.lab.store.read import RunFolder, read_run

# Each by itself: what one of them needs must not hide what another one needs.
HOSTILES = ("b\rc", "b\nc", "b\r\nc", "\r", "a,b", 'say "b"', "", "\x00", "=SUM(A1)\t🎈")
HOSTILE = '"quoted", comma\nand line\r\n=SUM(A1)\t\x00 🎈'


def _run(folder: Path, **how: Any) -> RunFolder:
    return read_run(write_run(folder, **how))


def test_every_sample_is_a_row_with_its_values(tmp_path: Path) -> None:
    run = _run(tmp_path, seeds=(0, 1), outcome=lambda *_: {"values": {"loss": 2, "kl": 0.5}})
    rows = flatten_samples([run], items=True).rows
    assert [row["key"] for row in rows] == list(run.samples)
    for row, sample in zip(rows, run.samples.values(), strict=True):
        for name in ("item", "correct", "error", "text", "decode_s", "budget"):
            assert row[name] == getattr(sample, name)
        assert {n: row[f"facet_{n}"] for n in sample.facets} == sample.facets
        assert {n: row[f"value_{n}"] for n in sample.values} == sample.values
        group, item = run.groups[sample.group], run.items[sample.group, sample.item]
        assert (row["split"], row["slots"]) == (group.split, group.slots)
        assert (row["prompt"], row["answer"], row["reference"]) == (item.prompt, item.answer, None)
        assert row["run"] == tmp_path.name


def test_the_columns_do_not_depend_on_the_finished_samples(tmp_path: Path) -> None:
    done, begun = _run(tmp_path / "a"), _run(tmp_path / "b", only_first=0)
    assert flatten_samples([done]).kinds == flatten_samples([begun]).kinds
    assert flatten_samples([begun]).rows == []
    assert list(flatten_samples([done]).kinds)[: len(fixed_columns())] == list(fixed_columns())


def test_only_selected_cells_are_exported(tmp_path: Path) -> None:
    run = _run(tmp_path)
    rows = flatten_samples([run], lambda group, cell: cell.budget == 64).rows
    assert [row["series"] for row in rows] == ["H2O"] * 8


def test_a_column_holds_one_kind_of_value(tmp_path: Path) -> None:
    facets = [{"depth": 3}, {"depth": "deep"}, {"depth": 3, "big": 2**70}, {"share": 0.5}]
    run = _run(tmp_path, n=4, outcome=lambda cell, item, attempt: {"facets": facets[item]})
    (tmp_path / "items.jsonl").unlink()
    table = flatten_samples([run])
    assert [table.kinds[f"facet_{name}"] for name in ("depth", "big", "share")] == [
        "text",
        "text",
        "number",
    ]
    first = table.rows[:4]
    assert [row["facet_depth"] for row in first] == ["3", "deep", "3", None]
    assert first[2]["facet_big"] == str(2**70)


def test_knobs_are_columns_without_dots(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    cells = manifest["run"]["cells"]
    cells[1]["knobs"] = {"h2o.n_recent": 4, "h2o.kind": "sum", "mix.share": 0.5, "mix.on": True}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    table = flatten_samples([read_run(folder)])
    kinds = {name: kind for name, kind in table.kinds.items() if name.startswith("knob_")}
    assert kinds == {
        "knob_h2o__kind": "text",
        "knob_h2o__n_recent": "whole",
        "knob_mix__on": "truth",
        "knob_mix__share": "number",
    }
    assert [row["knob_h2o__n_recent"] for row in table.rows] == [None] * 8 + [4] * 8 + [None] * 8


@given(st.lists(st.sampled_from(HOSTILES) | st.text(max_size=5), min_size=1, max_size=4))
@example(list(HOSTILES))
def test_csv_gives_every_field_back(fields: list[str]) -> None:
    lines: list[list[str | None]] = [
        ["a,\r", *fields],
        [None, *fields],
        fields[:1] + [None] * len(fields),
    ]
    text = "".join(map(csv_line, lines))
    read = list(csv.reader(io.StringIO(text, newline="")))
    # A text that could be a formula has an apostrophe before it.
    found = [[field.removeprefix("'") for field in line] for line in read]
    given = [field.removeprefix("'") for field in fields]
    assert found == [["a,\r", *given], ["", *given], given[:1] + [""] * len(fields)]
    assert text.endswith("\n")
    assert not text.endswith("\r\n")


@pytest.mark.parametrize(
    ("field", "written"),
    [
        ("=1+1", "'=1+1"),
        ("+1+1", "'+1+1"),
        ("-1+1", "'-1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("\n=1", "'\n=1"),
        ("\uff1d1", "'\uff1d1"),
        ("-", "'-"),
        ("-inf", "'-inf"),
        ("-0.5", "-0.5"),
        ("+3", "+3"),
        ("-1e-5", "-1e-5"),
        (-0.5, "-0.5"),
        (-3, "-3"),
        ("a=1", "a=1"),
        ("", ""),
    ],
)
def test_csv_has_no_formulas(field: object, written: str) -> None:
    text = csv_text([{"=name": field, "b": 1}])
    ((name, _), (found, _)) = csv.reader(io.StringIO(text, newline=""))
    assert (name, found) == ("'=name", written)


def test_csv_carries_a_bare_carriage_return_in_both_tables(tmp_path: Path) -> None:
    table = SampleTable(
        {"text": "text", "whole": "whole"},
        [{"text": "b\rc", "whole": 1}, {"text": None, "whole": None}],
    )
    write_table(table, tmp_path / "out.csv")
    assert (tmp_path / "out.csv").read_bytes() == b'text,whole\n"b\rc",1\n,\n'
    assert csv_text([{"text": "b\rc"}, {"whole": 1}]) == 'text,whole\n"b\rc",\n,1\n'


def test_csv_carries_any_text(tmp_path: Path) -> None:
    table = flatten_samples([_run(tmp_path, outcome=lambda *_: {"text": HOSTILE, "error": "x"})])
    write_table(table, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 24
    assert {row["text"] for row in read} == {HOSTILE}
    assert {row["correct"] for row in read} == {"true", "false"}
    assert {row["ungraded"] for row in read} == {""}


def test_parquet_carries_values_and_types_also_of_empty_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    whole = flatten_samples(
        [_run(tmp_path / "a", outcome=lambda *_: {"text": HOSTILE})], items=True
    )
    empty = flatten_samples([_run(tmp_path / "b", only_first=0)], items=True)
    for table in (whole, empty):
        write_table(table, tmp_path / "out.parquet")
        read = parquet.read_table(tmp_path / "out.parquet")
        types = {"text": "string", "whole": "int64", "number": "double", "truth": "bool"}
        assert {field.name: str(field.type) for field in read.schema} == {
            name: types[kind] for name, kind in table.kinds.items()
        }
        assert read.to_pylist() == table.rows


def test_without_pyarrow_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ResultsError, match=r"\[results\]"):
        check_can_write(Path("out.parquet"))
    check_can_write(Path("out.csv"))
    with pytest.raises(ResultsError, match=r"\.csv"):
        check_can_write(Path("out.xlsx"))
