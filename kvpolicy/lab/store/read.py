"""Read run folders of finished and running sweeps, without a lock and without changing them.

`docs/reference/results.md` documents every file and field.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    sample_key,
    structure_record,
    structure_records,
)

# Entries of a session that are read, where it has them.
_SESSION_KINDS = {"started": str, "record": int, "versions": dict}

# The files of lines of a run folder; all of them exist once work on the run has begun.
LINES_FILES = ("samples.jsonl", "items.jsonl", "timings.jsonl", "kept.jsonl")

_SAME_COMMAND = "the `kvpolicy ablate` command of the run, with --output,"


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
        """Finished samples by `Sample.key`, in the order in which they finished.

        Raises:
            ResultsError: A line is damaged, or was changed so that it is not the sample of its key.
        """
        found, changed = self.check_samples(self.items.values())
        if changed:
            msg = f"{changed[0]}; {_SAME_COMMAND} computes that sample again."
            raise ResultsError(msg)
        return found

    def check_samples(self, items: Iterable[ItemRecord]) -> tuple[dict[str, Sample], list[str]]:
        """Read the samples, and check that each is the one that its key stands for.

        Args:
            items: The items; a sample without its item is checked against the manifest only.

        Returns:
            Samples by key in the order of the file, a later line instead of an earlier one of the
            same key, and a message for each sample that was changed, which is left out.

        Raises:
            ResultsError: A line is damaged.
        """
        path = self.path / "samples.jsonl"
        samples = structure_records(Sample, read_lines(path), path)
        lines: dict[str, tuple[int, Sample]] = {}
        for number, sample in enumerate(samples, 1):
            _check_known(f"{path}, line {number}", "cell", sample.cell, self.cells)
            lines[sample.key] = number, sample
        known = {(item.group, item.item): item for item in items}
        changed = {
            key: f"{path}, line {number}, was changed: {problem}"
            for key, (number, sample) in lines.items()
            if (problem := self._find_change(sample, known))
        }
        found = {key: sample for key, (_, sample) in lines.items() if key not in changed}
        return found, list(changed.values())

    def _find_change(self, sample: Sample, items: Mapping[tuple[str, int], ItemRecord]) -> str:
        """Say how a sample differs from the one that its key stands for; empty if it does not."""
        cell = self.cells[sample.cell]
        group = self.groups[cell.group]
        copies = [
            *((name, group) for name in ("group", "model", "task", "seed")),
            *((name, cell) for name in ("series", "budget", "buffer", "plan")),
        ]
        for name, record in copies:
            if getattr(sample, name) != getattr(record, name):
                return f"its {name} is not that of its cell"
        item = items.get((sample.group, sample.item))
        if item is None:
            num_known = sum(id == group.group for id, _ in items)
            return "its item is not one of its task" if num_known >= group.n else ""
        keys = [
            sample_key(
                group,
                cell.plan,
                (item.prompt, item.answer, reference),
                item=sample.item,
                attempt=sample.attempt,
                version=self.version,
            )
            # The manifest does not say whether the metric reads the reference.
            for reference in dict.fromkeys((None, item.reference))
        ]
        if sample.key not in keys:
            return "cell, item, attempt, or the record in items.jsonl do not belong to its key"
        return ""

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

    @cached_property
    def problems(self) -> list[str]:
        """What is missing in the folder though it has been written, as sentences.

        Raises:
            ResultsError: A file is damaged.
        """
        missing = missing_files(self.path, self.sessions)
        lost = [self._lost_items(), self._lost_samples(), self._lost_records()]
        return [
            *(f"{self.path / name} is missing." for name in missing),
            *(f"{one}; {_SAME_COMMAND} makes up for it." for one in lost if one),
        ]

    def _lost_items(self) -> str:
        begun = [id for id in self.groups if any(s.group == id for s in self.samples.values())]
        expected = sum(self.groups[id].n for id in begun)
        num_lost = expected - sum(group in begun for group, _ in self.items)
        if num_lost <= 0:
            return ""
        return f"{self.path / 'items.jsonl'} lacks {num_lost} of {expected} items"

    def _lost_samples(self) -> str:
        num_lost = 0
        for id in self.timings.keys() & self.cells.keys():  # written after all samples of a cell
            group = self.groups[self.cells[id].group]
            num_lost += max(group.n * group.attempts - len(self.samples_of[id]), 0)
        if not num_lost:
            return ""
        return f"{self.path / 'samples.jsonl'} lacks {num_lost} samples of finished cells"

    def _lost_records(self) -> str:
        """Records of kept rows, of as many items as a session asked for."""
        num = max((one.get("record") or 0 for one in self.sessions), default=0)
        if not num:
            return ""
        path = self.path / "kept.jsonl"
        recorded = {str(record.get("key")) for record in read_lines(path)}
        first: dict[str, list[int]] = {id: [] for id in self.groups}
        for group, item in self.items:
            if group in first:
                first[group].append(item)
        keys = [
            key
            for key, one in self.samples.items()
            if one.attempt == 0 and one.item in first[one.group][:num]
        ]
        num_lost = sum(key not in recorded for key in keys)
        return f"{path} lacks {num_lost} of {len(keys)} records" if num_lost else ""

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
    manifest = read_manifest(folder)
    if manifest is None:
        msg = f"{folder} does not exist; `kvpolicy results list FOLDER` shows the runs in a folder."
        if folder.exists():
            msg = f"{folder} holds no run (it has no manifest.json); "
            msg += (
                f"{_SAME_COMMAND} writes it again."
                if (folder / "samples.jsonl").exists()
                else "`kvpolicy results list FOLDER` shows the runs in a folder."
            )
        raise ResultsError(msg)
    return run_folder(folder, manifest["run"], manifest["sessions"])


def run_folder(folder: Path, run: dict[str, Any], sessions: Iterable[dict[str, Any]]) -> RunFolder:
    """Build a run folder from what its manifest holds.

    Args:
        folder: The folder.
        run: The entry ``run``, as plain data.
        sessions: The entry ``sessions``.

    Raises:
        ResultsError: The run has missing, additional or wrongly typed fields.
    """
    path = folder / "manifest.json"
    read = structure_record(_Run, run, str(path))
    groups = {group.group: group for group in read.groups}
    for group in read.groups:
        if not group.columns:
            msg = f"{path}, group {group.group}, is damaged: it has no 'columns'."
            raise ResultsError(msg)
    for cell in read.cells:
        _check_known(f"{path}, cell {cell.cell}", "group", cell.group, groups)
    return RunFolder(
        path=folder,
        name=read.name,
        version=read.version,
        groups=groups,
        cells={cell.cell: cell for cell in read.cells},
        sessions=tuple(sessions),
    )


def missing_files(folder: Path, sessions: Sequence[object]) -> list[str]:
    """Names of the files of lines that are missing though work on the run has begun.

    Args:
        folder: The run's folder.
        sessions: Sessions of its manifest.
    """
    return [name for name in LINES_FILES if sessions and not (folder / name).exists()]


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
        msg = (
            f"{path} is damaged ({error}); delete it, and {_SAME_COMMAND} writes it again and "
            "keeps the samples."
        )
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
    for number, session in enumerate(manifest["sessions"]):
        if not _is_session(session):
            msg = f"{path} is damaged: session {number}, counted from 0, has wrong entries."
            raise ResultsError(msg)
    return manifest


def _is_session(session: object) -> bool:
    return isinstance(session, dict) and all(
        session.get(key) is None or isinstance(session[key], kind)
        for key, kind in _SESSION_KINDS.items()
    )


def find_runs(folder: Path, *, warn: Callable[[str], None]) -> list[Path]:
    """Find the run folders in a folder, which may be one itself, in alphabetical order.

    Args:
        folder: Where to search; links are not followed.
        warn: Is called with a sentence for every folder that cannot be read.

    Returns:
        Folders of runs, also of damaged runs and of other formats. A ``manifest.json`` of
        something else does not count.

    Raises:
        ResultsError: There is no such folder.
    """
    if not folder.is_dir():
        msg = f"there is no folder {folder}; name one that holds runs, such as kvpolicy-ablate."
        raise ResultsError(msg)

    def report(error: OSError) -> None:
        warn(f"{error.filename} cannot be read: {error.strerror}; runs in it are left out.")

    found = []
    for path, folders, files in os.walk(folder, onerror=report):
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
