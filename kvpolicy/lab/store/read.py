"""Read run folders of finished and running sweeps, without a lock and without changing them.

`docs/reference/results.md` documents every file and field.
"""

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import KVPolicyError, ResultsError
from kvpolicy.files import parse_json, read_json, read_text
from kvpolicy.lab.store.jsonl import read_lines
from kvpolicy.lab.store.records import (
    FORMAT,
    CellRecord,
    CellTiming,
    EvalSettingRecord,
    ItemRecord,
    Sample,
    structure_record,
    structure_records,
)


@attrs.frozen(kw_only=True)
class _Run:
    """The entry ``run`` of a manifest."""

    name: str = ""
    version: str = ""
    groups: tuple[EvalSettingRecord, ...]
    cells: tuple[CellRecord, ...]


@attrs.frozen
class RunFolder:
    """One run, read from its folder; samples, items and timings are read on first use.

    Attributes:
        path: The folder.
        name: Name of the run.
        version: Version of kvpolicy that computes it.
        groups: Evaluation settings by id, in the order of the run.
        cells: Cells by id, in the order of the run.
        sessions: When, and with which command and versions, the run was worked on, as plain data.
    """

    path: Path
    name: str
    version: str
    groups: Mapping[str, EvalSettingRecord]
    cells: Mapping[str, CellRecord]
    sessions: tuple[dict[str, Any], ...]

    @cached_property
    def samples(self) -> dict[str, Sample]:
        """Finished samples by `Sample.key`, in the order in which they finished."""
        path = self.path / "samples.jsonl"
        samples = structure_records(Sample, read_lines(path), path)
        for number, sample in enumerate(samples, 1):
            _check_known(f"{path}, line {number}", "cell", sample.cell, self.cells)
        return {sample.key: sample for sample in samples}

    @cached_property
    def samples_of(self) -> dict[str, list[Sample]]:
        """Finished samples by id of the cell, with an empty list for a cell without samples."""
        found: dict[str, list[Sample]] = {cell: [] for cell in self.cells}
        for sample in self.samples.values():
            found[sample.cell].append(sample)
        return found

    @cached_property
    def items(self) -> dict[tuple[str, int], ItemRecord]:
        """Items by id of the evaluation setting and number of the item."""
        path = self.path / "items.jsonl"
        items = structure_records(ItemRecord, read_lines(path), path)
        return {(item.group, item.item): item for item in items}

    @cached_property
    def timings(self) -> dict[str, CellTiming]:
        """Timings of the cells that were run without interruption, by id of the cell."""
        path = self.path / "timings.jsonl"
        timings = structure_records(CellTiming, read_lines(path), path)
        return {timing.cell: timing for timing in timings}

    @property
    def num_expected(self) -> int:
        """Samples of the complete run."""
        groups = (self.groups[cell.group] for cell in self.cells.values())
        return sum(group.n * group.attempts for group in groups)


def read_run(folder: Path) -> RunFolder:
    """Read the manifest of a run.

    Args:
        folder: The run's folder.

    Raises:
        ResultsError: The folder holds no run, one of another format, or a damaged one. Damage in
            the JSON lines files is reported when they are first used.
    """
    path = folder / "manifest.json"
    manifest = read_manifest(folder)
    if manifest is None:
        problem = "holds no run (it has no manifest.json)" if folder.exists() else "does not exist"
        msg = f"{folder} {problem}; `kvpolicy results list FOLDER` shows the runs in a folder."
        raise ResultsError(msg)
    run = structure_record(_Run, manifest["run"], str(path))
    groups = {group.group: group for group in run.groups}
    for cell in run.cells:
        _check_known(f"{path}, cell {cell.cell}", "group", cell.group, groups)
    return RunFolder(
        path=folder,
        name=run.name,
        version=run.version,
        groups=groups,
        cells={cell.cell: cell for cell in run.cells},
        sessions=tuple(manifest["sessions"]),
    )


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read the manifest of a run folder as plain data.

    Args:
        folder: The folder.

    Returns:
        ``format``, ``run`` and ``sessions``; ``None`` without a manifest.

    Raises:
        ResultsError: It cannot be read, or is no manifest of a run of this format.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    try:
        manifest = parse_json(read_text(path, str(path), error=ResultsError))
    except ValueError as error:
        msg = f"{path} is damaged ({error}); the lines of {folder / 'samples.jsonl'} are readable."
        raise ResultsError(msg) from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        msg = f"{path} is not the manifest of a run; name a folder that `kvpolicy ablate` wrote."
        raise ResultsError(msg)
    number = manifest["format"]
    if number != FORMAT:
        is_older = isinstance(number, int) and number < FORMAT
        advice = "run it again into a new folder" if is_older else "read it with a newer version"
        msg = f"{folder} holds a run of format {number!r}, and this is format {FORMAT}; {advice}."
        raise ResultsError(msg)
    kinds = {"run": dict, "sessions": list}
    if not all(isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        msg = f"{path} is damaged: it has no run, or no list of sessions."
        raise ResultsError(msg)
    return manifest


def find_runs(folder: Path) -> list[Path]:
    """Find the run folders in a folder, which may be one itself, in alphabetical order.

    Args:
        folder: Where to search; links are not followed.

    Returns:
        Folders of runs, also of damaged runs and of other formats. A ``manifest.json`` of
        something else does not count.

    Raises:
        ResultsError: There is no such folder.
    """
    if not folder.is_dir():
        msg = f"there is no folder {folder}; name one that holds runs, such as kvpolicy-ablate."
        raise ResultsError(msg)
    found = []
    for path, folders, files in os.walk(folder):
        folders.sort()
        if "manifest.json" in files and _may_be_run(Path(path)):
            found.append(Path(path))
            folders.clear()  # folders inside a run folder belong to the run
    return found


def _may_be_run(folder: Path) -> bool:
    try:
        manifest = read_json(folder / "manifest.json", "it")
    except KVPolicyError:
        return (folder / "samples.jsonl").exists()
    return isinstance(manifest, dict) and {"format", "run"} <= manifest.keys()


def _check_known(where: str, kind: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        msg = f"{where}, is damaged: the manifest has no {kind} {name!r}."
        raise ResultsError(msg)
