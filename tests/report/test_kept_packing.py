"""Records of kept rows go into a page as far as they fit, item by item."""

import base64
import json
import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.kept import Kept, KeptLayer, KeptRows
from kvpolicy.lab.report.keptpacking import compact, pack_kept


def record(item: int, cell: str, num_tokens: int = 40, attempt: int = 0) -> Kept:
    rng = np.random.default_rng(item)
    left_at = rng.integers(-1, 3, (2, num_tokens)).tolist()
    tokens = [f"w{p} " for p in range(num_tokens)]
    rows = KeptRows(3, tokens, [KeptLayer(0, None, [9, 19, 29], left_at)])
    return Kept.of(rows, key=f"{cell}-{item}-{attempt}", cell=cell, item=item, attempt=attempt)


RECORDS = [record(item, cell) for cell in "ab" for item in (4, 2)]


def opened(block: str) -> object:
    return json.loads(zlib.decompress(base64.b64decode(block)))


def test_all_records_that_fit_are_packed_whole() -> None:
    packed = pack_kept(RECORDS, 100_000)
    assert packed.num_left_out == 0
    assert {key: opened(block) for key, block in packed.blocks.items()} == {
        kept.key: compact(kept) for kept in RECORDS
    }


@given(st.integers(0, 6000))
def test_what_is_packed_fits_and_can_be_compared(most_bytes: int) -> None:
    packed = pack_kept([*RECORDS, record(1, "a", num_tokens=2000)], most_bytes)
    assert sum(map(len, packed.blocks.values())) <= most_bytes
    assert len(packed.blocks) + packed.num_left_out == 5
    for item in (2, 4):  # both cells' or nobody's
        assert (f"a-{item}-0" in packed.blocks) == (f"b-{item}-0" in packed.blocks)


def test_first_attempts_and_first_items_go_first() -> None:
    sizes = [sum(map(len, pack_kept([one], 10**6).blocks.values())) for one in RECORDS]
    later = record(1, "a", attempt=1)
    packed = pack_kept([later, *RECORDS], sizes[1] + sizes[3] + 10)
    assert set(packed.blocks) == {"a-2-0", "b-2-0"}
    assert packed.num_left_out == 3


def test_letters_take_less_room_than_numbers() -> None:
    """Rows that leave sooner or later after they joined, in heads that often agree."""
    rng = np.random.default_rng(0)
    stays = rng.geometric(0.3, 3000) - 1
    heads = [stays, np.where(rng.random(3000) < 0.7, stays, rng.geometric(0.3, 3000) - 1)]
    left_at = [(np.arange(3000) // 50 + stays).tolist() for stays in heads]
    rows = KeptRows(1, ["w"] * 3000, [KeptLayer(0, None, list(range(200)), left_at)])
    kept = Kept.of(rows, key="key", cell="a", item=0, attempt=0)
    plain = len(zlib.compress(json.dumps(kept.to_dict()).encode()))
    packed = len(base64.b64decode(pack_kept([kept], 10**6).blocks["key"]))
    assert packed < plain
