"""The run folder of a sweep: appended line by line, resumable after any interruption.

A folder belongs to one run. The run has evaluation settings (a model, a task and a seed; ``groups``
in the files) and cells (an evaluation setting under a plan). The folder holds::

    manifest.json   {"format": 2, "run": ..., "sessions": [...]}
                    run: everything the samples depend on; another run is refused
                    sessions: when, and with which command and versions, the run was worked on
    samples.jsonl   one `Sample` per line, in the order in which they finished
    items.jsonl     one `ItemRecord` per line, of all evaluation settings
    timings.jsonl   one `CellTiming` per line, for each cell that was run without interruption
    kept.jsonl      one record per line of the rows that compactions kept of a sample; written
                    before the sample, so that no finished sample lacks its record
    table.json/csv  the result table; plot.png/svg: the same as a plot
"""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import attrs
from filelock import FileLock

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.files import is_unfinished_write
from kvpolicy.lab.store.jsonl import JsonLines, as_stored, lock_folder, read_lines
from kvpolicy.lab.store.manifest import add_session, write_manifest
from kvpolicy.lab.store.read import LINES_FILES, missing_files, read_manifest, run_folder
from kvpolicy.lab.store.records import (
    FORMAT,
    CellTiming,
    ItemRecord,
    Record,
    Sample,
    structure_records,
)

_LOCK = ".lock"


class Store:
    """One run folder, opened for writing by one process.

    Attributes:
        folder: The folder.
        samples: Finished samples, by `Sample.key`.
        timings: Timings of cells that were run without interruption, by id of the cell.
        recorded: Keys of the samples whose kept rows are recorded.
        notes: Messages for the user about the state in which the folder was found.
    """

    def __init__(self, folder: Path, run: dict[str, Any], items: Iterable[ItemRecord] = ()) -> None:
        """Open the folder of a run, or create it.

        What is missing in the folder, or was changed, and follows from the arguments is written
        again. Samples that were changed are left out, so that they are computed again.

        Args:
            folder: Where the results go; created if missing.
            run: Everything the samples depend on, as plain data.
            items: The items of all evaluation settings.

        Raises:
            OutputError: The folder holds another run or other files, is in use, or cannot be
                written. Nothing in it has been changed.
            ResultsError: A file in it is damaged or of another format.
        """
        self.folder = folder
        self.notes: list[str] = []
        run, items = as_stored(run), list(items)
        with ExitStack() as undo:
            lock = self._claim(run, items)
            undo.callback(lock.release)
            self._note_missing_files()
            self._samples, self._items, self._timings, self._kept = (
                self._open(undo, name) for name in LINES_FILES
            )
            self.recorded = {str(record.get("key")) for record in self._kept.records}
            self._kept.records.clear()  # large, and not needed here
            self.timings = {one.cell: one for one in _structured(CellTiming, self._timings)}
            self._known_items = {
                (item.group, item.item): item for item in _structured(ItemRecord, self._items)
            }
            self.add_items(items)
            opened = run_folder(folder, run, ())
            self.samples, changed = opened.check_samples(self._known_items.values())
            self._note_changed(changed)
            self._undo = undo.pop_all()

    def begin(self, session: dict[str, Any]) -> None:
        """Add a session to the manifest.

        Args:
            session: When, how and with which versions work on this run begins.
        """
        manifest = read_manifest(self.folder)
        assert manifest is not None, "written when the store was opened"
        self.notes += add_session(self.folder, manifest, session)

    def add(self, sample: Sample) -> None:
        """Store a finished sample; one that replaces a stored one of its key is stored, too."""
        self._samples.append(attrs.asdict(sample))
        self.samples[sample.key] = sample

    def add_kept(self, record: Mapping[str, Any]) -> None:
        """Store what compactions kept of a sample, unless it is stored already.

        Args:
            record: Plain data with the sample's ``key``; call this before `add`.
        """
        if record["key"] not in self.recorded:
            self._kept.append(dict(record))
            self.recorded.add(record["key"])

    def add_items(self, items: Iterable[ItemRecord]) -> None:
        """Store items, except those stored already. A later line replaces an earlier one."""
        new = {(item.group, item.item): item for item in items}
        new = {key: item for key, item in new.items() if self._known_items.get(key) != item}
        num_changed = len(new.keys() & self._known_items.keys())
        if num_changed:
            self.notes.append(
                f"{num_changed} items in {self._items.path} were changed; they have been written "
                "again, as they are in the task"
            )
        self._items.append(*map(attrs.asdict, new.values()))
        self._known_items |= new

    def add_timing(self, timing: CellTiming) -> None:
        """Store the timing of a whole cell."""
        self._timings.append(attrs.asdict(timing))
        self.timings[timing.cell] = timing

    def close(self) -> None:
        """Close the files and release the folder."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self, run: dict[str, Any], items: Iterable[ItemRecord]) -> FileLock:
        """Lock the folder, write a missing manifest; leave the folder of another run unchanged."""
        folder = self.folder
        _check_is_ours_or_new(folder, run, items)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = lock_folder(folder)
            try:
                # Again: another process may have begun and ended a run since the first check.
                _check_is_ours_or_new(folder, run, items)
                if read_manifest(folder) is None:
                    if (folder / "samples.jsonl").exists():
                        self.notes.append(
                            f"{folder / 'manifest.json'} was missing; it has been written again, "
                            "without the sessions before this one"
                        )
                    write_manifest(folder, run, [], version=FORMAT)
            except BaseException:
                lock.release()
                raise
        except OSError as error:
            msg = (
                f"output folder {folder} cannot be written: {error.strerror}; "
                "choose another one with --output."
            )
            raise OutputError(msg) from error
        return lock

    def _note_missing_files(self) -> None:
        manifest = read_manifest(self.folder)
        assert manifest is not None, "written when the folder was claimed"
        missing = missing_files(self.folder, manifest["sessions"])
        if missing:
            self.notes.append(
                f"{', '.join(missing)} in {self.folder} had been deleted; what can still be "
                "written is written again"
            )

    def _note_changed(self, changed: list[str]) -> None:
        if changed:
            more = f", and {len(changed) - 1} other lines" if len(changed) > 1 else ""
            self.notes.append(f"{changed[0]}{more}; these samples are computed again")

    def _open(self, undo: ExitStack, name: str) -> JsonLines:
        lines = JsonLines(self.folder / name)
        undo.callback(lines.close)
        if lines.was_torn:
            self.notes.append(
                f"the last line of {lines.path} was incomplete (the previous run was killed "
                "while writing it) and has been removed"
            )
        return lines


def finished(
    folder: Path, run: dict[str, Any], items: Iterable[ItemRecord] = ()
) -> tuple[dict[str, Sample], set[str]]:
    """Read what is finished, without changing anything.

    Args:
        folder: Where the results of a run are, or will be.
        run: Everything its samples depend on.
        items: The items of all evaluation settings.

    Returns:
        Finished samples by key, and the keys of the samples whose kept rows are recorded.

    Raises:
        OutputError: The folder holds another run or other files.
        ResultsError: A line is damaged.
    """
    run, items = as_stored(run), list(items)
    _check_is_ours_or_new(folder, run, items)
    samples, _ = run_folder(folder, run, ()).check_samples(items)
    return samples, {str(record.get("key")) for record in read_lines(folder / "kept.jsonl")}


def _structured(cls: type[Record], lines: JsonLines) -> list[Record]:
    return structure_records(cls, lines.records, lines.path)


def _check_is_ours_or_new(folder: Path, run: dict[str, Any], items: Iterable[ItemRecord]) -> None:
    if folder.exists() and not folder.is_dir():
        msg = f"output folder {folder} is a file; choose another one with --output."
        raise OutputError(msg)
    manifest = read_manifest(folder)
    if manifest is None:
        if not _is_empty(folder) and not _lost_its_manifest(folder, run, items):
            msg = (
                f"output folder {folder} is not empty and holds no kvpolicy run; "
                "choose an empty or new one with --output."
            )
            raise OutputError(msg)
        return
    differences = _differences(manifest["run"], run)
    if differences:
        msg = (
            f"output folder {folder} holds another run ({'; '.join(differences)}); nothing in "
            "it was changed; choose another folder with --output, or give the same settings."
        )
        raise OutputError(msg)


def _is_empty(folder: Path) -> bool:
    """Whether there is nothing but what a run leaves that is killed before it has a manifest."""
    return not folder.exists() or all(
        path.name == _LOCK or is_unfinished_write(path) for path in folder.iterdir()
    )


def _lost_its_manifest(folder: Path, run: dict[str, Any], items: Iterable[ItemRecord]) -> bool:
    """Whether the folder has samples, all of this run, but no manifest."""
    try:
        samples, changed = run_folder(folder, run, ()).check_samples(items)
    except ResultsError:  # a sample of another run, or a damaged one
        return False
    return bool(samples) and not changed


def _differences(stored: dict[str, Any], requested: dict[str, Any]) -> list[str]:
    return differences(_settings(stored), _settings(requested))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Describe the settings that differ, with both values where they are short.

    Args:
        old: Those that are stored.
        new: Those that are requested.
    """
    found = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if a != b:
            short = all(isinstance(value, (int, float, str)) for value in (a, b))
            found.append(f"{key} is {a} there and {b} here" if short else f"{key} differ")
    return found


def _settings(run: dict[str, Any]) -> dict[str, Any]:
    """The settings that decide a run's samples; those of a single group are listed one by one.

    The name of the run and the headings of tables decide nothing.
    """
    groups = [
        {key: value for key, value in group.items() if key != "columns"}
        for group in run.get("groups", [])
    ]
    run = {key: value for key, value in run.items() if key not in ("name", "groups")}
    if len(groups) != 1:
        return {**run, "groups": groups}
    return {key: value for key, value in {**run, **groups[0]}.items() if key != "group"}
