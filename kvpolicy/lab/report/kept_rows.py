"""Records of kept rows in the form that a page holds: one letter for each row.

A letter says after which compaction a row was gone. Letters of the KV heads of one position stand
side by side, as heads often agree; compressed, that takes less room than a list of numbers, and a
browser reads it many times faster. ``assets/keptdata.js`` reads both forms.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import numpy as np

from kvpolicy.lab.report.packing import AROUND, pack
from kvpolicy.lab.sweep.recording import NEVER, KeptRecord

# Of the letter for -1: the first ones need no escape in JSON, but for the backslash.
_FIRST_LETTER = 0x23
# Numbers in UTF-16 that are no letters by themselves.
_SURROGATES, _NUM_SURROGATES = 0xD800, 0x800
# The last compaction that has a letter; who has more keeps lists.
_MOST = 0xFFFF - _NUM_SURROGATES - _FIRST_LETTER + NEVER


def compact(kept: KeptRecord) -> dict[str, Any]:
    """A record as `KeptRecord.to_dict` makes it, but ``left_at`` of each layer is one text.

    Args:
        kept: The record.

    Returns:
        Plain data. Letter ``p * H_kv + h`` of ``left_at`` stands for position ``p`` and head ``h``.
    """
    record = kept.to_dict()
    for layer in record["layers"]:
        if len(layer["at"]) <= _MOST:
            layer["left_at"] = _letters(layer["left_at"])
    return record


def _letters(left_at: list[list[int]]) -> str:
    codes = (np.array(left_at, dtype=np.int64) - NEVER + _FIRST_LETTER).T.ravel()
    codes[codes >= _SURROGATES] += _NUM_SURROGATES
    return codes.astype("<u4").tobytes().decode("utf-32-le")


@attrs.frozen
class PackedKept:
    """Records that fit into a page.

    Attributes:
        blocks: Packed records, by the key of their sample.
        num_left_out: Records that found no room.
    """

    blocks: dict[str, str]
    num_left_out: int


def pack_kept(bundles: Iterable[Sequence[KeptRecord]], most_bytes: int) -> PackedKept:
    """Pack records, bundle by bundle, until there is no more room.

    Args:
        bundles: Records that are compared with each other, the first ones first: a bundle goes
            in as a whole or not at all.
        most_bytes: What they may take.
    """
    blocks: dict[str, str] = {}
    num_left_out, room = 0, most_bytes
    for together in bundles:
        packed = {kept.key: pack(compact(kept)) for kept in together}
        size = sum(len(block) + AROUND for block in packed.values())
        if size > room:
            num_left_out += len(together)
            continue
        room -= size
        blocks |= packed
    return PackedKept(blocks, num_left_out)
