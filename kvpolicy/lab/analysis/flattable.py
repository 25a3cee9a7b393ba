"""A table of plain values with typed columns, as CSV and as Parquet."""

import io
import json
from pathlib import Path
from typing import Any, Literal

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.csvtext import csv_text

Kind = Literal["text", "whole", "number", "truth"]
SUFFIXES = (".csv", ".parquet")


@attrs.frozen
class Table:
    """Rows of plain values under named and typed columns.

    Attributes:
        kinds: What each column holds, by name, in order; ``None`` may stand in any.
        rows: Values in the order of the columns.
    """

    kinds: dict[str, Kind]
    rows: list[list[Any]]


def in_kind(value: Any, kind: Kind) -> Any:
    """A value as its column holds it: what is no text, in a column of texts, as JSON.

    Args:
        value: A plain value, or ``None``.
        kind: What the column holds.
    """
    if value is None:
        return None
    if kind == "text":
        return value if isinstance(value, str) else json.dumps(value)
    return float(value) if kind == "number" else value


def write_table(table: Table, path: Path) -> None:
    """Write a table to a file, whole or not at all.

    Args:
        table: The table.
        path: Where it goes; CSV or Parquet, by its ending.

    Raises:
        OutputError: It cannot be written.
        ResultsError: It is to be Parquet, and pyarrow is not installed.
    """
    atomic_write(path, _parquet(table) if path.suffix == ".parquet" else _csv(table))


def check_can_write(path: Path) -> None:
    """Refuse an ending that means neither CSV nor Parquet, or Parquet without pyarrow.

    Args:
        path: The file that is to be written.

    Raises:
        ResultsError: It cannot be written like that.
    """
    if path.suffix not in SUFFIXES:
        msg = f"--to was given {str(path)!r}; a file whose name ends in .csv or .parquet is wanted."
        raise ResultsError(msg)
    if path.suffix == ".parquet":
        _pyarrow()


def _csv(table: Table) -> str:
    # `true` is a truth to pandas, to duckdb and to spreadsheets.
    words = {True: "true", False: "false"}
    rows = ([words[v] if isinstance(v, bool) else v for v in row] for row in table.rows)
    return csv_text(list(table.kinds), rows)


def _parquet(table: Table) -> bytes:
    pyarrow, parquet = _pyarrow()
    types = {
        "text": pyarrow.string(),
        "whole": pyarrow.int64(),
        "number": pyarrow.float64(),
        "truth": pyarrow.bool_(),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in table.kinds.items()])
    columns = list(zip(*table.rows, strict=True)) or [()] * len(schema)
    arrays = [
        pyarrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)
    ]
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(arrays, schema=schema), out)
    return out.getvalue()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        msg = (
            "Parquet is written by pyarrow, which cannot be imported here; "
            "pip install 'kvpolicy[results]', or choose a file that ends in .csv."
        )
        raise ResultsError(msg) from error
    return pyarrow, pyarrow.parquet
