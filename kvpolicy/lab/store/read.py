"""Run folders for readers: what an ablation left, or leaves while it goes on.

Nothing is written here and no lock is taken, so that a run can be looked at while it works.
`docs/reference/results.md` tells every file and field.
"""

import json
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.lab.store.recordcheck import Record, record_of
from kvpolicy.lab.store.records import Cell, ColumnInfo, Group
from kvpolicy.lab.store.samples import CellTiming, ItemRecord, Sample
from kvpolicy.lab.store.store import FORMAT


@attrs.frozen
class RunFolder:
    """One run, read from its folder; samples, items and timings when they are first asked for.

    Attributes:
        path: The folder.
        name: What the run is called.
        version: Version of kvpolicy that computes it.
        groups: By id, in the order of the run.
        cells: By id, in the order of the run.
        sessions: When, how and with which versions it was worked on, as plain data.
    """

    path: Path
    name: str
    version: str
    groups: Mapping[str, Group]
    cells: Mapping[str, Cell]
    sessions: tuple[dict[str, Any], ...]

    @cached_property
    def samples(self) -> dict[str, Sample]:
        """What is done, by `Sample.key`, in the order in which it was done."""
        found = {}
        for where, sample in _records(self.path / "samples.jsonl", Sample):
            _check_known(where, "cell", sample.cell, self.cells)
            found[sample.key] = sample
        return found

    @cached_property
    def samples_of(self) -> dict[str, list[Sample]]:
        """The same by id of the cell; of every cell, also where nothing is done."""
        found: dict[str, list[Sample]] = {cell: [] for cell in self.cells}
        for sample in self.samples.values():
            found[sample.cell].append(sample)
        return found

    @cached_property
    def items(self) -> dict[tuple[str, int], ItemRecord]:
        """What is asked, by id of the group and number of the item."""
        lines = _records(self.path / "items.jsonl", ItemRecord)
        return {(item.group, item.item): item for _, item in lines}

    @cached_property
    def timings(self) -> dict[str, CellTiming]:
        """Costs of the cells that were run in one go, by id of the cell."""
        return {one.cell: one for _, one in _records(self.path / "timings.jsonl", CellTiming)}

    @property
    def num_expected(self) -> int:
        """Samples that the run will have when it is complete."""
        groups = (self.groups[cell.group] for cell in self.cells.values())
        return sum(group.n * group.attempts for group in groups)


def read_run(folder: Path) -> RunFolder:
    """Read what the manifest of a run says.

    Args:
        folder: The run's folder.

    Raises:
        ResultsError: It holds no run, one of another format, or a damaged one. What is wrong
            with a file of lines is told when it is first asked for.
    """
    path = folder / "manifest.json"
    manifest = _manifest(folder, path)
    number = manifest.get("format")
    if number != FORMAT:
        older = isinstance(number, int) and number < FORMAT
        advice = "run it again into a new folder" if older else "read it with a newer version"
        msg = f"{folder} holds a run of format {number!r}, and this is format {FORMAT}; {advice}."
        raise ResultsError(msg)
    run = manifest.get("run")
    lists = [manifest.get("sessions"), *(run.get(k) for k in ("groups", "cells"))] if run else []
    if not run or not all(isinstance(one, list) for one in lists):
        msg = f"{path} is damaged: it lacks sessions, or groups and cells of a run."
        raise ResultsError(msg)
    groups = [_group(f"{path}, group {i}", one) for i, one in enumerate(run["groups"])]
    cells = [record_of(Cell, one, f"{path}, cell {i}") for i, one in enumerate(run["cells"])]
    found = RunFolder(
        path=folder,
        name=str(run.get("name", folder.name)),
        version=str(run.get("version", "")),
        groups={group.group: group for group in groups},
        cells={cell.cell: cell for cell in cells},
        sessions=tuple(manifest["sessions"]),
    )
    for i, cell in enumerate(cells):
        _check_known(f"{path}, cell {i}", "group", cell.group, found.groups)
    return found


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs below a folder, which may be one itself, in alphabetical order.

    Damaged ones and those of other formats are among them; a ``manifest.json`` of something
    else is not.

    Args:
        folder: Where to look; links are not followed.

    Raises:
        ResultsError: There is no such folder.
    """
    if not folder.is_dir():
        msg = f"there is no folder {folder}; name one that holds runs, such as kvpolicy-ablate."
        raise ResultsError(msg)
    found = []
    for path, folders, files in os.walk(folder):
        folders.sort()
        if "manifest.json" in files and _may_be_ours(Path(path)):
            found.append(Path(path))
            folders.clear()  # what lies in the folder of a run is part of it
    return found


def _may_be_ours(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return (folder / "samples.jsonl").exists()
    return isinstance(manifest, dict) and {"format", "run"} <= manifest.keys()


def _manifest(folder: Path, path: Path) -> dict[str, Any]:
    if not path.is_file():
        what = "is not there" if not folder.exists() else "holds no run (it has no manifest.json)"
        msg = f"{folder} {what}; `kvpolicy results list FOLDER` shows the runs below a folder."
        raise ResultsError(msg)
    try:
        manifest = json.loads(path.read_bytes())
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}."
        raise ResultsError(msg) from error
    except ValueError as error:
        msg = f"{path} is damaged ({error}); the lines of {folder / 'samples.jsonl'} are readable."
        raise ResultsError(msg) from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("run", {}), dict):
        msg = f"{path} is not the manifest of a run; name the folder that `kvpolicy ablate` wrote."
        raise ResultsError(msg)
    return manifest


def _group(where: str, record: Any) -> Group:
    columns = record.get("columns") if isinstance(record, dict) else None
    if isinstance(columns, list):
        said = tuple(record_of(ColumnInfo, one, f"{where}, columns") for one in columns)
        record = {**record, "columns": said}
    return record_of(Group, record, where)


def _records(path: Path, cls: type[Record]) -> Iterator[tuple[str, Record]]:
    """The records of a file of JSON lines, each with its place; none if there is no file.

    A last line without its end is one that is being written, or was when its writer died.
    """
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}."
        raise ResultsError(msg) from error
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except ValueError as error:
            msg = f"{where}, is damaged: it is not JSON; delete that line, or repeat the run."
            raise ResultsError(msg) from error
        yield where, record_of(cls, record, where)


def _check_known(where: str, what: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        msg = f"{where}, is damaged: the manifest knows no {what} {name!r}."
        raise ResultsError(msg)
