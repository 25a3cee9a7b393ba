"""Records of kept rows in a page: read from run folders, encoded as one letter per row, packed.

A letter says after which compaction a row was gone. Letters of the KV heads of one position are
adjacent, as heads often agree: compressed, that takes less space than a list of numbers, and a
browser reads it many times faster. ``assets/keptdata.js`` reads both forms.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.lab.report.encoding import BLOCK_OVERHEAD, pack
from kvpolicy.lab.report.gather import GroupView
from kvpolicy.lab.store.jsonl import read_lines
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.sweep.recording import NEVER, KeptRecord

# Letter for -1. The letters from here on need no escape in JSON, except the backslash.
_FIRST_LETTER = 0x23
# UTF-16 surrogates, which are no letters by themselves.
_SURROGATES, _NUM_SURROGATES = 0xD800, 0x800
# The last compaction that has a letter; records with more keep lists.
_MAX_COMPACTIONS = 0xFFFF - _NUM_SURROGATES - _FIRST_LETTER + NEVER


@attrs.frozen
class PackedKept:
    """Records that fit into a page.

    Attributes:
        blocks: Packed records, by the key of their sample.
        num_left_out: Records that did not fit.
    """

    blocks: dict[str, str]
    num_left_out: int


def compact(kept: KeptRecord) -> dict[str, Any]:
    """A record as `KeptRecord.to_dict` returns it, with ``left_at`` of each layer as one text.

    Args:
        kept: The record.

    Returns:
        Plain data. Letter ``p * H_kv + h`` of ``left_at`` stands for position ``p`` and head ``h``.
    """
    record = kept.to_dict()
    for layer in record["layers"]:
        if len(layer["at"]) <= _MAX_COMPACTIONS:
            layer["left_at"] = _letters(layer["left_at"])
    return record


def pack_kept(bundles: Iterable[Sequence[KeptRecord]], max_bytes: int) -> PackedKept:
    """Pack as many bundles of records as fit.

    Args:
        bundles: Records that are compared with each other, the most important bundle first. A
            bundle is packed as a whole or not at all.
        max_bytes: The most bytes they may take.
    """
    blocks: dict[str, str] = {}
    num_left_out, free = 0, max_bytes
    for bundle in bundles:
        packed = {kept.key: pack(compact(kept)) for kept in bundle}
        size = sum(len(block) + BLOCK_OVERHEAD for block in packed.values())
        if size > free:
            num_left_out += len(bundle)
            continue
        free -= size
        blocks |= packed
    return PackedKept(blocks, num_left_out)


def pack_recorded(
    runs: Sequence[RunFolder], views: Sequence[GroupView], max_bytes: int
) -> PackedKept:
    """Read and pack the records of the samples that a page shows.

    Args:
        runs: The runs to read.
        views: What the page shows.
        max_bytes: The most bytes the records may take.

    Raises:
        ResultsError: A record is damaged.
    """
    order = {
        sample.key: (sample.attempt, sample.item, number)
        for number, view in enumerate(views)
        if not view.is_pooled
        for sample in view.samples
    }
    found = {kept.key: kept for run in runs for kept in _read(run) if kept.key in order}
    # A bundle is what all cells of one group did with one item. The first items of every group
    # come before later items of the first group.
    bundles: dict[tuple[int, int, int], list[KeptRecord]] = {}
    for key, kept in found.items():
        bundles.setdefault(order[key], []).append(kept)
    return pack_kept([bundles[key] for key in sorted(bundles)], max_bytes)


def number_records(
    views: Sequence[GroupView],
    groups: Sequence[dict[str, Any]],
    packed: PackedKept,
    first_block: int,
) -> list[str]:
    """Add to each cell the numbers of its record blocks, by index of item and attempt.

    Args:
        views: The groups.
        groups: Their content on the page; is changed.
        packed: The records.
        first_block: Number of the first record block.

    Returns:
        The blocks, in the order of their numbers.
    """
    numbers = {key: first_block + i for i, key in enumerate(packed.blocks)}
    for view, group in zip(views, groups, strict=True):
        indices = {item: index for index, item in enumerate(view.numbers)}
        for cell, content in zip(view.cells, group["cells"], strict=True):
            content["kept"] = {
                str(indices[sample.item] * group["attempts"] + sample.attempt): numbers[sample.key]
                for sample in cell.samples
                if sample.key in numbers and not view.is_pooled
            }
    return list(packed.blocks.values())


def _letters(left_at: list[list[int]]) -> str:
    codes = (np.array(left_at, dtype=np.int64) - NEVER + _FIRST_LETTER).T.ravel()
    codes[codes >= _SURROGATES] += _NUM_SURROGATES
    return codes.astype("<u4").tobytes().decode("utf-32-le")


def _read(run: RunFolder) -> Iterator[KeptRecord]:
    path = run.path / "kept.jsonl"
    for number, line in enumerate(read_lines(path), 1):
        try:
            yield KeptRecord.from_dict(line)
        except OutputError as error:
            msg = f"{path}, line {number}, is damaged; delete that line: {error}."
            raise ResultsError(msg) from error
