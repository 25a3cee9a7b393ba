"""Records of kept rows, read from the folders of runs and packed as far as there is room."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.lab.report.gather import GroupView
from kvpolicy.lab.report.kept_rows import PackedKept, pack_kept
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.sweep.recording import KeptRecord

_FILE = "kept.jsonl"


def pack_recorded(
    runs: Sequence[RunFolder], views: Sequence[GroupView], most_bytes: int
) -> PackedKept:
    """Pack what was recorded of samples that a page shows.

    Args:
        runs: Where to look.
        views: What the page shows.
        most_bytes: What the records may take.

    Raises:
        ResultsError: A record is damaged.
    """
    of_key = {
        sample.key: (sample.attempt, sample.item, number)
        for number, view in enumerate(views)
        if not view.is_pooled
        for sample in view.samples
    }
    found = {kept.key: kept for run in runs for kept in _read(run) if kept.key in of_key}
    # What the cells of one group did with one item is compared; every group's first items are
    # better than all items of the first group.
    bundles: dict[tuple[int, int, int], list[KeptRecord]] = {}
    for key, kept in found.items():
        bundles.setdefault(of_key[key], []).append(kept)
    return pack_kept([bundles[place] for place in sorted(bundles)], most_bytes)


def name_records(
    views: Sequence[GroupView],
    groups: Sequence[dict[str, Any]],
    packed: PackedKept,
    first_block: int,
) -> list[str]:
    """Tell each cell which blocks have its records: by place of the item and attempt.

    Args:
        views: The groups.
        groups: What the page says of them; is added to.
        packed: The records.
        first_block: Number that the first of them gets.

    Returns:
        The blocks, in the order of their numbers.
    """
    numbers = {key: first_block + i for i, key in enumerate(packed.blocks)}
    for view, group in zip(views, groups, strict=True):
        places = {number: place for place, number in enumerate(view.numbers)}
        for cell, content in zip(view.cells, group["cells"], strict=True):
            content["kept"] = {
                str(places[sample.item] * group["attempts"] + sample.attempt): numbers[sample.key]
                for sample in cell.samples
                if sample.key in numbers and not view.is_pooled
            }
    return list(packed.blocks.values())


def _read(run: RunFolder) -> Iterator[KeptRecord]:
    """The records of a run; a last line without its end is one that is being written."""
    path = run.path / _FILE
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            yield KeptRecord.from_dict(json.loads(line))
        except (ValueError, OutputError) as error:
            msg = f"{path}, line {number}, is damaged ({error}); delete that line."
            raise ResultsError(msg) from error
