"""Rows of a data set: from the hub, from a folder with the layout of the hub, or from a file.

Rows of JSON lines are read on access, so that large files need not fit into memory.
"""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvpolicy.errors import TaskError, error_summary
from kvpolicy.extras import install_extra
from kvpolicy.files import MAX_BYTES, open_binary, parse_json, read_text
from kvpolicy.model.hub import hub_reachable

Row = Mapping[str, Any]
Rows = Sequence[Row]

# Formats of the package `datasets`, by suffix.
_TABLES = {".parquet": "parquet", ".csv": "csv"}

# A paragraph may begin with spaces, which belong to it.
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*\n)+")


def read_rows(source: str, *, config: str | None = None, split: str = "test") -> Rows:
    """Open the rows of a data set.

    Args:
        source: A file (``.jsonl``, ``.json``, ``.txt``, ``.csv``, ``.parquet``), a folder, or
            a hub id. A text file has a row ``{"text"}`` for each paragraph, as blank lines
            separate them.
        config: Configuration of a data set that has several.
        split: Split of a data set; ignored for files.

    Returns:
        The rows, in order.

    Raises:
        TaskError: The data set does not exist or cannot be read, or a package is missing.
    """
    path = Path(source)
    if path.suffix == ".jsonl":
        return JsonRows([path])
    if path.suffix in (".json", ".txt"):
        return _read_whole(path)
    if path.suffix in _TABLES:
        with open_binary(path, f"task file {path}", error=TaskError):
            pass  # it exists
        return _load(source, _TABLES[path.suffix], data_files=source, split="train")
    return _load(source, source, config, split=split)


def require(module: str, what: str, *, extra: str = "tasks") -> None:
    """Check that an optional package is installed.

    Args:
        module: Name of its module.
        what: What needs it, for the message.
        extra: The extra of kvpolicy that brings it.

    Raises:
        TaskError: It is not installed.
    """
    if importlib.util.find_spec(module) is None:
        package = module.replace("_", "-")
        msg = f"{what} needs the package {package}; {install_extra(extra)} installs it"
        raise TaskError(msg)


class JsonRows(Sequence[Row]):
    """Files of JSON lines, one row per line; only the offsets of the lines are in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Index the lines; raises `TaskError` if a file cannot be read."""
        self._lines: list[tuple[Path, int, int]] = []
        for path in paths:
            with open_binary(path, f"task file {path}", error=TaskError) as file:
                start = 0
                for number, line in enumerate(iter(partial(file.readline, MAX_BYTES + 1), b""), 1):
                    if len(line) > MAX_BYTES:
                        msg = f"line {number} of {path} is longer than {MAX_BYTES >> 20} MiB"
                        raise TaskError(msg)
                    if line.strip():
                        self._lines.append((path, number, start))
                    start += len(line)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        path, number, start = self._lines[index]
        with open_binary(path, f"task file {path}", error=TaskError) as file:
            file.seek(start)
            line = file.readline()
        where = f"line {number} of {path}"
        try:
            row = parse_json(line)
        except ValueError as error:
            msg = f"{where} is not a JSON object ({error}); expected one on each line"
            raise TaskError(msg) from error
        if not isinstance(row, dict):
            msg = f"{where} is not a JSON object; expected one on each line"
            raise TaskError(msg)
        return row


def _read_whole(path: Path) -> Rows:
    name = f"task file {path}"
    if path.suffix == ".txt":
        text = read_text(path, name, error=TaskError).replace("\r\n", "\n")
        paragraphs = _BLANK_LINES.split(text)
        return [{"text": part.strip("\n")} for part in paragraphs if part.strip()]
    try:
        rows = parse_json(read_text(path, name, error=TaskError))
    except ValueError as error:
        msg = f"{name} is not JSON ({error}); name it .jsonl if each line is"
        raise TaskError(msg) from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        msg = f"task file {path} does not contain a list of JSON objects"
        raise TaskError(msg)
    return rows


def _load(source: str, kind: str, config: str | None = None, **options: Any) -> Rows:
    """Read rows with the package `datasets`."""
    require("datasets", f"reading {source}")
    is_local = Path(source).exists()
    import datasets

    if not is_local and not hub_reachable() and not _is_cached(source):
        msg = (
            f"data set '{source}' is not a file or folder, it has not been downloaded before, and "
            "the hub cannot be reached from here; give the task the option source=FILE"
        )
        raise TaskError(msg)
    verbosity = datasets.utils.logging.get_verbosity()
    try:
        datasets.disable_progress_bars()
        datasets.utils.logging.set_verbosity_error()
        rows: Rows = datasets.load_dataset(kind, config, **options)
    except Exception as error:  # many types, also of pyarrow and the hub
        msg = f"data set '{source}' cannot be loaded: {error_summary(error)}"
        raise TaskError(msg) from error
    finally:
        datasets.utils.logging.set_verbosity(verbosity)
        datasets.enable_progress_bars()
    return rows


def _is_cached(source: str) -> bool:
    import datasets

    return (Path(datasets.config.HF_DATASETS_CACHE) / source.replace("/", "___").lower()).exists()
