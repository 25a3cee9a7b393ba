"""Packing of kept-row records: as many as fit, item by item of each group."""

import base64
import json
import zlib
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from run_folders import write_run

from kvpolicy.lab.report.encoding import BLOCK_OVERHEAD
from kvpolicy.lab.report.gather import gather
from kvpolicy.lab.report.kept_rows import PackedKept, compact, pack_kept, pack_recorded
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.sweep.recording import KeptLayer, KeptRecord, KeptRows


def record(item: int, cell: str, num_tokens: int = 40, attempt: int = 0) -> KeptRecord:
    rng = np.random.default_rng(item)
    left_at = rng.integers(-1, 3, (2, num_tokens)).tolist()
    tokens = [f"w{p} " for p in range(num_tokens)]
    rows = KeptRows(3, tokens, [KeptLayer(0, None, [9, 19, 29], left_at)])
    return KeptRecord.of(
        rows, key=f"{cell}-{item}-{attempt}", cell=cell, item=item, attempt=attempt
    )


BUNDLES = [[record(item, cell) for cell in "ab"] for item in (2, 4)]
RECORDS = [kept for bundle in BUNDLES for kept in bundle]


def opened(block: str) -> object:
    return json.loads(zlib.decompress(base64.b64decode(block)))


def size_of(packed: PackedKept) -> int:
    return sum(len(block) + BLOCK_OVERHEAD for block in packed.blocks.values())


def test_all_records_that_fit_are_packed() -> None:
    packed = pack_kept(BUNDLES, 100_000)
    assert packed.num_left_out == 0
    assert {key: opened(block) for key, block in packed.blocks.items()} == {
        kept.key: compact(kept) for kept in RECORDS
    }


@given(st.integers(0, 6000))
def test_packed_records_fit_and_are_complete_per_item(max_bytes: int) -> None:
    packed = pack_kept([[record(1, "a", num_tokens=2000)], *BUNDLES], max_bytes)
    assert size_of(packed) <= max_bytes
    assert len(packed.blocks) + packed.num_left_out == 5
    for item in (2, 4):  # both cells' or nobody's
        assert (f"a-{item}-0" in packed.blocks) == (f"b-{item}-0" in packed.blocks)


def test_first_bundles_are_packed_first() -> None:
    packed = pack_kept(BUNDLES, size_of(pack_kept(BUNDLES[:1], 10**6)) + 10)
    assert set(packed.blocks) == {"a-2-0", "b-2-0"}
    assert packed.num_left_out == 2


def test_first_items_of_all_groups_are_packed_before_second_items(tmp_path: Path) -> None:
    """Cells of one group are compared with each other, and with those of no other group."""
    run = read_run(write_run(tmp_path / "run", seeds=(0, 1, 2), n=2, recorded=2))
    views = gather([run])
    whole = pack_recorded([run], views, 10**7)
    assert whole.num_left_out == 0
    places = {key: (one.item, one.group) for key, one in run.samples.items()}
    assert len(whole.blocks) == len(places)
    sizes: dict[tuple[int, str], int] = {}
    for key, block in whole.blocks.items():
        sizes[places[key]] = sizes.get(places[key], 0) + len(block) + BLOCK_OVERHEAD
    order = [(item, group) for item in (0, 1) for group in run.groups]
    for num in range(len(order) + 1):
        packed = pack_recorded([run], views, sum(sizes[place] for place in order[:num]))
        assert {places[key] for key in packed.blocks} == set(order[:num])
        assert len(packed.blocks) == 3 * num, "all cells of a group, or none"
        assert packed.num_left_out == len(places) - 3 * num


def test_letters_take_less_space_than_numbers() -> None:
    """Rows that leave sooner or later after they joined, in heads that often agree."""
    rng = np.random.default_rng(0)
    stays = rng.geometric(0.3, 3000) - 1
    heads = [stays, np.where(rng.random(3000) < 0.7, stays, rng.geometric(0.3, 3000) - 1)]
    left_at = [(np.arange(3000) // 50 + stays).tolist() for stays in heads]
    rows = KeptRows(1, ["w"] * 3000, [KeptLayer(0, None, list(range(200)), left_at)])
    kept = KeptRecord.of(rows, key="key", cell="a", item=0, attempt=0)
    plain = len(zlib.compress(json.dumps(kept.to_dict()).encode()))
    packed = len(base64.b64decode(pack_kept([[kept]], 10**6).blocks["key"]))
    assert packed < plain
