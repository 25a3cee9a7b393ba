"""The results folder of a run: written line by line, gone on with after any interruption.

A folder belongs to one run, of groups (a model asked a task with a seed) and cells (a group
under a plan), and holds::

    manifest.json   {"format": 2, "run": ..., "sessions": [...]}
                    run: everything the samples depend on; another run is refused
                    sessions: when, with which command and versions it was worked on
    samples.jsonl   one `Sample` per line, in the order in which they were done
    items.jsonl     one `ItemRecord` per line: what was asked, once for each group
    timings.jsonl   one `CellTiming` per line: what a cell cost that was run in one go
    kept.jsonl      one `Kept` per line: what compactions kept of a recorded sample; written
                    before the sample, so that no sample is done without its record
    table.json/csv  the comparison, plot.png/svg the same as a picture
"""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import attrs

from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write
from kvpolicy.lab.store.folderlock import FolderLock
from kvpolicy.lab.store.jsonl import JsonLines, read_lines
from kvpolicy.lab.store.samples import CellTiming, ItemRecord, Sample
from kvpolicy.lab.sweep.recording import Kept

FORMAT = 2

# All that a folder can hold whose run was killed before it had a manifest.
_LEFT_BY_A_KILL = {".lock", "manifest.json.new"}


class Store:
    """One results folder, opened by one process.

    Attributes:
        folder: Where everything is.
        samples: What is done, by `Sample.key`.
        timings: Costs of the cells that were run in one go, by id of the cell.
        recorded: Keys of the samples of which it is recorded what compactions kept.
        notes: What a user wants to know about how the folder was found.
    """

    def __init__(self, folder: Path, run: dict[str, Any]) -> None:
        """Open the folder of a run, or make it.

        Args:
            folder: Where the results are to be; created if need be.
            run: Everything the samples depend on, as plain data.

        Raises:
            OutputError: The folder holds another run or something else, is in use, or cannot
                be written. Nothing in it has been changed then.
        """
        self.folder = folder
        self.notes: list[str] = []
        with ExitStack() as undo:
            self._lock = _take(folder, run)
            undo.callback(self._lock.release)
            self._samples = self._open("samples.jsonl")
            undo.callback(self._samples.close)
            self._items = self._open("items.jsonl")
            undo.callback(self._items.close)
            self._timings = self._open("timings.jsonl")
            undo.callback(self._timings.close)
            self._kept = self._open("kept.jsonl")
            undo.callback(self._kept.close)
            self.recorded = {str(record.get("key")) for record in self._kept.records}
            self._kept.records.clear()  # they may be large, and nobody reads them here
            samples = [Sample.from_dict(record) for record in self._samples.records]
            items = [ItemRecord.from_dict(record) for record in self._items.records]
            timings = [CellTiming.from_dict(record) for record in self._timings.records]
            self.samples = {sample.key: sample for sample in samples}
            self.timings = {timing.cell: timing for timing in timings}
            self._known_items = {(item.group, item.item) for item in items}
            self._undo = undo.pop_all()

    def begin(self, session: dict[str, Any]) -> None:
        """Note in the manifest that work on this run begins.

        Args:
            session: When, how and with which versions.
        """
        manifest = _read_manifest(self.folder)
        assert manifest is not None, "written when the store was opened"
        sessions = manifest["sessions"]
        if sessions and sessions[-1]["versions"] != session["versions"]:
            self.notes.append(
                "this run was begun with other versions of Python or its packages; "
                f"{self.folder / 'manifest.json'} lists them"
            )
        _write_manifest(self.folder, manifest["run"], [*sessions, session])

    def add(self, sample: Sample) -> None:
        """Keep one finished sample."""
        self._samples.append(attrs.asdict(sample))
        self.samples[sample.key] = sample

    def add_kept(self, kept: Kept) -> None:
        """Keep what compactions kept of a sample, before the sample; once is enough."""
        if kept.key not in self.recorded:
            self._kept.append(kept.to_dict())
            self.recorded.add(kept.key)

    def add_items(self, items: Iterable[ItemRecord]) -> None:
        """Keep what a group is asked; what is there already is left as it is."""
        for item in items:
            if (item.group, item.item) not in self._known_items:
                self._items.append(attrs.asdict(item))
                self._known_items.add((item.group, item.item))

    def add_timing(self, timing: CellTiming) -> None:
        """Keep what a whole cell cost."""
        self._timings.append(attrs.asdict(timing))
        self.timings[timing.cell] = timing

    def close(self) -> None:
        """Close the files and let other processes have the folder."""
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: str) -> JsonLines:
        lines = JsonLines(self.folder / name)
        if lines.was_torn:
            self.notes.append(
                f"the last line of {lines.path} was incomplete (the run before this one was "
                "killed while writing it) and has been cut off"
            )
        return lines


def done_keys(folder: Path, run: dict[str, Any]) -> set[str]:
    """Keys of the samples that are done, read without touching anything.

    Args:
        folder: Where the results of a run are, or are to be.
        run: Everything its samples depend on.

    Raises:
        OutputError: The folder holds another run or something else, or is damaged.
    """
    _check_is_ours_or_new(folder, run)
    return {Sample.from_dict(record).key for record in read_lines(folder / "samples.jsonl")}


def _take(folder: Path, run: dict[str, Any]) -> FolderLock:
    """Make the folder ours, or find that it is; leave any other as it is."""
    _check_is_ours_or_new(folder, run)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            # Once more: somebody else may have begun and ended here in the meantime.
            _check_is_ours_or_new(folder, run)
            if _read_manifest(folder) is None:
                _write_manifest(folder, run, [])
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


def _check_is_ours_or_new(folder: Path, run: dict[str, Any]) -> None:
    if folder.exists() and not folder.is_dir():
        msg = f"output folder {folder} is a file; choose another one with --output."
        raise OutputError(msg)
    manifest = _read_manifest(folder)
    if manifest is None:
        if folder.exists() and {path.name for path in folder.iterdir()} - _LEFT_BY_A_KILL:
            msg = (
                f"output folder {folder} is not empty and holds no run of ours; "
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


def _write_manifest(folder: Path, run: dict[str, Any], sessions: list[dict[str, Any]]) -> None:
    manifest = {"format": FORMAT, "run": run, "sessions": sessions}
    atomic_write(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    path = folder / "manifest.json"
    if not path.exists():
        return None
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read ({error}); choose another folder with --output."
        raise OutputError(msg) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        msg = (
            f"{path} is not a manifest of this version of kvpolicy; "
            "choose another folder with --output."
        )
        raise OutputError(msg)
    return manifest


def _differences(theirs: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    """Name the settings that differ, with both values where they are short."""
    there, here = _settings(theirs), _settings(ours)
    found = []
    for key in sorted(there.keys() | here.keys()):
        a, b = there.get(key), here.get(key)
        if a != b:
            short = all(isinstance(value, (int, float, str)) for value in (a, b))
            found.append(f"{key} is {a} there and {b} here" if short else f"{key} differ")
    return found


def _settings(run: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run; those of its group by themselves, where it has just one."""
    run = {key: value for key, value in run.items() if key != "name"}  # decides nothing
    groups = run.get("groups", [])
    if len(groups) != 1:
        return run
    (group,) = groups
    return {k: v for k, v in {**run, **group}.items() if k not in ("groups", "group")}
