"""Export samples as one flat table, as CSV or Parquet.

The fixed columns are always present with the same types, even where they are empty. Columns for
facets, values and knobs follow, as the runs have them.
"""

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.extras import install_extra
from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.pooling import Keep
from kvpolicy.lab.analysis.table import csv_text
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import EvalSettingRecord, Sample

Kind = Literal["text", "whole", "number", "truth"]

_KINDS: dict[type, Kind] = {str: "text", int: "whole", float: "number", bool: "truth"}
_SETTING_COLUMNS = (
    *("model_fingerprint", "device", "dtype", "split", "sampling", "temperature", "top_p"),
    *("max_new_tokens", "slots", "measure"),
)
_ITEM_COLUMNS = ("prompt", "answer", "reference")
_INT64_LIMIT = 2**63


@attrs.frozen
class SampleTable:
    """One row for each sample, in typed columns.

    Attributes:
        kinds: Type of each column, by name, in order; any column may contain ``None``.
        rows: The value of every column, by name.
    """

    kinds: dict[str, Kind]
    rows: list[dict[str, Any]]


def flatten_samples(
    runs: Sequence[RunFolder],
    keep: Keep = lambda group, cell: True,
    *,
    items: bool = False,
) -> SampleTable:
    """Build a table with one row for each sample.

    Args:
        runs: The runs, in order. A sample of two runs has a row for each.
        keep: Selects cells.
        items: Add prompt, answer and reference of the item.

    Returns:
        Columns ``run`` and ``version``; the fields of `Sample` except ``facets`` and ``values``;
        settings; ``bytes_per_sequence`` of the cell; ``prompt``, ``answer`` and ``reference`` on
        request; then ``facet_NAME``,
        ``value_NAME`` and ``knob_POLICY__KNOB``, each in alphabetical order.
    """
    records = [
        _record(run, sample)
        for run in runs
        for cell in run.cells.values()
        if keep(run.groups[cell.group], cell)
        for sample in run.samples_of[cell.cell]
    ]
    kinds = {**fixed_columns(items=items), **_open_columns(runs)}
    rows = [
        {name: _convert(record.get(name), kind) for name, kind in kinds.items()}
        for record in records
    ]
    return SampleTable(kinds, rows)


def fixed_columns(*, items: bool = False) -> dict[str, Kind]:
    """The columns of every export, with their types.

    Args:
        items: Whether prompt, answer and reference are included.
    """
    sample, setting = _kinds_of(Sample), _kinds_of(EvalSettingRecord)
    return {
        "run": "text",
        "version": "text",
        **sample,
        **{name: setting[name] for name in _SETTING_COLUMNS},
        "bytes_per_sequence": "whole",
        **(dict.fromkeys(_ITEM_COLUMNS, "text") if items else {}),
    }


def check_can_write(path: Path) -> None:
    """Refuse a file name that ends in neither .csv nor .parquet, or Parquet without pyarrow.

    Args:
        path: The file to write.

    Raises:
        ResultsError: It cannot be written.
    """
    if path.suffix not in (".csv", ".parquet"):
        msg = f"--to was given {str(path)!r}; expected a file name that ends in .csv or .parquet."
        raise ResultsError(msg)
    if path.suffix == ".parquet":
        _import_pyarrow()


def write_table(table: SampleTable, path: Path) -> None:
    """Write a table to a file, completely or not at all.

    Args:
        table: The table.
        path: The file; its suffix selects CSV or Parquet.

    Raises:
        OutputError: The file cannot be written.
        ResultsError: Parquet was selected and pyarrow is not installed.
    """
    is_parquet = path.suffix == ".parquet"
    atomic_write(path, _parquet(table) if is_parquet else csv_text(table.rows, table.kinds))


def _record(run: RunFolder, sample: Sample) -> dict[str, Any]:
    group, cell = run.groups[sample.group], run.cells[sample.cell]
    item = run.items.get((sample.group, sample.item))
    return {
        "run": run.path.name,
        "version": run.version,
        **attrs.asdict(sample, recurse=False),
        **{name: getattr(group, name) for name in _SETTING_COLUMNS},
        "bytes_per_sequence": cell.bytes_per_sequence,
        **({name: getattr(item, name) for name in _ITEM_COLUMNS} if item is not None else {}),
        **_facets(sample.facets),
        **{f"value_{name}": value for name, value in sample.values.items()},
        **_knobs(cell.knobs),
    }


def _facets(facets: Mapping[str, Any]) -> dict[str, Any]:
    return {f"facet_{name}": value for name, value in facets.items()}


def _knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Without the dot, which SQL would need quoted."""
    return {f"knob_{name.replace('.', '__')}": value for name, value in knobs.items()}


def _open_columns(runs: Sequence[RunFolder]) -> dict[str, Kind]:
    """Columns for facets, values and knobs; all items of the runs count, not only finished ones."""
    facets = [_facets(item.facets) for run in runs for item in run.items.values()]
    facets += [_facets(sample.facets) for run in runs for sample in run.samples.values()]
    names = {name for run in runs for sample in run.samples.values() for name in sample.values}
    values: dict[str, Kind] = {f"value_{name}": "number" for name in sorted(names)}
    knobs = [_knobs(cell.knobs) for run in runs for cell in run.cells.values()]
    return {**_common_kinds(facets), **values, **_common_kinds(knobs)}


def _common_kinds(records: Iterable[Mapping[str, Any]]) -> dict[str, Kind]:
    """One type for each name, in alphabetical order; text where the types differ."""
    found: dict[str, set[Kind]] = {}
    for record in records:
        for name, value in record.items():
            found.setdefault(name, set()).add(_kind_of_value(value))
    return {name: _common_kind(found[name]) for name in sorted(found)}


def _kind_of_value(value: object) -> Kind:
    kind = _KINDS.get(type(value), "text")
    is_large = type(value) is int and not -_INT64_LIMIT <= value < _INT64_LIMIT
    return "text" if is_large else kind


def _common_kind(kinds: set[Kind]) -> Kind:
    if kinds == {"whole", "number"}:
        return "number"
    return kinds.pop() if len(kinds) == 1 else "text"


def _kinds_of(cls: Any) -> dict[str, Kind]:
    """Types of the plain fields of a record class; its other fields are left out."""
    found: dict[str, Kind] = {}
    for name, hint in get_type_hints(cls).items():
        if get_origin(hint) in (None, UnionType):
            kinds = [_KINDS[part] for part in (hint, *get_args(hint)) if part in _KINDS]
            found[name] = kinds[0]
    return found


def _convert(value: Any, kind: Kind) -> Any:
    """A value for a column; in a column of texts, other values become JSON."""
    if value is None:
        return None
    if kind == "text":
        return value if isinstance(value, str) else json.dumps(value)
    return float(value) if kind == "number" else value


def _parquet(table: SampleTable) -> bytes:
    pyarrow, parquet = _import_pyarrow()
    types = {
        "text": pyarrow.string(),
        "whole": pyarrow.int64(),
        "number": pyarrow.float64(),
        "truth": pyarrow.bool_(),
    }
    arrays = {
        name: pyarrow.array([row[name] for row in table.rows], types[kind])
        for name, kind in table.kinds.items()
    }
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays), out)
    return out.getvalue()


def _import_pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        msg = (
            "Parquet is written by pyarrow, which cannot be imported here; "
            f"{install_extra('results')}, or choose a file that ends in .csv."
        )
        raise ResultsError(msg) from error
    return pyarrow, pyarrow.parquet
