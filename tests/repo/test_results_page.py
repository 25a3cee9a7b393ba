"""docs/reference/results.md documents every field that is written, read or printed."""

import re
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import attrs
import pytest
from pages import run_command
from run_folders import write_run

from kvpolicy.lab.analysis.compare import compare_cells
from kvpolicy.lab.analysis.export import fixed_columns
from kvpolicy.lab.analysis.pooling import pool
from kvpolicy.lab.analysis.table import tabulate_runs, to_run_records
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.store.records import (
    CellRecord,
    CellTiming,
    ColumnInfo,
    EvalSettingRecord,
    ItemRecord,
    Sample,
)
from kvpolicy.lab.tasks.task import ACCURACY

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "results.md"
RECORDS = {
    "samples.jsonl": Sample,
    "items.jsonl": ItemRecord,
    "timings.jsonl": CellTiming,
    "Groups": EvalSettingRecord,
    "Cells": CellRecord,
}


def _section(heading: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert found, f"the page has no section '## {heading}'"
    return found[1]


def _format_type(hint: Any) -> str:
    if get_origin(hint) is UnionType:
        (kind,) = [part for part in get_args(hint) if part is not NoneType]
        return f"{_format_type(kind)} or null"
    words = {str: "text", int: "whole", float: "number", bool: "truth"}
    return words.get(hint) or {dict: "object", tuple: "list"}[get_origin(hint)]


@pytest.mark.parametrize("heading", RECORDS)
def test_record_fields_are_documented_with_types(heading: str) -> None:
    cls = RECORDS[heading]
    hints = get_type_hints(cls)
    rows = re.findall(r"^\| `(\w+)` \| ([\w ]+) \| .+ \|$", _section(heading), re.M)
    assert rows == [(field.name, _format_type(hints[field.name])) for field in attrs.fields(cls)]


def test_column_fields_are_documented() -> None:
    (row,) = re.findall(r"^\| `columns` \| .*$", _section("Groups"), re.M)
    assert re.findall(r"`(\w+)`", row)[1:] == [field.name for field in attrs.fields(ColumnInfo)]


def _names(heading: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` \| .+ \|$", _section(heading), re.M)


def test_table_fields_are_documented(tmp_path: Path) -> None:
    cells = pool([read_run(write_run(tmp_path))])
    whole, part = (to_run_records(tabulate_runs(cells, by))[0] for by in (None, "depth"))
    documented = _names("The table")
    facet = ("facet", "facet_value")
    assert list(whole) == [name for name in documented if name not in facet]
    assert list(part) == [name for name in documented if name != "num_expected"]


def test_comparison_fields_are_documented(tmp_path: Path) -> None:
    a, b, _ = pool([read_run(write_run(tmp_path))])
    found = compare_cells(a, b, ACCURACY).to_json()
    assert _names("Comparisons") == list(found)
    (row,) = re.findall(r"^\| `a` \| .*$", _section("Comparisons"), re.M)
    assert re.findall(r"`(\w+)`", row)[1:] == list(found["a"])


def test_export_columns_are_documented() -> None:
    rows = re.findall(r"^\| (`.*?) \| (\w[\w ]*) \| ", _section("The export"), re.M)
    documented: dict[str, str] = {}
    for names, kind in rows:
        if "..." in names:
            documented |= {
                field.name: fixed_columns()[field.name]
                for field in attrs.fields(Sample)
                if field.name not in ("facets", "values", "breakdowns")
            }
        else:
            documented |= dict.fromkeys(re.findall(r"`(\w+)`", names), kind)
    assert documented == fixed_columns(items=True)
    assert list(documented)[:3] == list(fixed_columns())[:3]


@pytest.mark.slow
@pytest.mark.needs_reasoner
def test_run_files_are_documented(tmp_path: Path) -> None:
    small = ["--policies", "full", "--n", "1", "--max-new-tokens", "5"]
    run_command(["ablate", *small, "--output", str(tmp_path)])
    text = PAGE.read_text(encoding="utf-8").partition("## samples.jsonl")[0]
    documented = set(re.findall(r"`([\w.]+\.\w+)`", text))
    written = {path.name for path in tmp_path.iterdir() if not path.name.startswith(".")}
    assert documented == written
