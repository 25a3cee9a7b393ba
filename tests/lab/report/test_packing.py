"""Packing of texts: they round-trip, and lose only their middles to a limit."""

import base64
import json
import random
import zlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.report.encoding import pack
from kvpolicy.lab.report.texts import GAP, Piece, pack_within, shorten

anything = st.text(st.characters(), max_size=20)
pieces = st.lists(st.builds(Piece, st.sampled_from(["a", "b"]), st.text(min_size=1)), max_size=8)


def opened(block: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(block)))


@given(st.lists(anything | st.none() | st.integers()))
def test_a_block_round_trips_any_text(value: list[Any]) -> None:
    block = pack(value)
    assert opened(block) == value
    assert block.isascii()
    assert not set(block) & set("<>&\"'")


def refuse(constant: str) -> None:
    raise AssertionError(f"no browser reads {constant}")


@given(st.dictionaries(anything, st.floats() | st.lists(st.floats(), max_size=2)))
def test_numbers_that_are_not_finite_become_null(value: dict[str, Any]) -> None:
    def finite(one: Any) -> Any:
        if isinstance(one, list):
            return [finite(each) for each in one]
        return one if abs(one) < float("inf") else None

    text = zlib.decompress(base64.b64decode(pack(value)))
    found = json.loads(text, parse_constant=refuse)
    assert found == {name: finite(one) for name, one in value.items()}


def plain(found: list[Piece]) -> str:
    return "".join(text for _, text in found)


@given(pieces, st.integers(1, 60))
def test_a_shortened_text_keeps_its_beginning_and_its_end(found: list[Piece], cap: int) -> None:
    whole = plain(found)
    kept = shorten(found, cap)
    if len(whole) <= cap:
        assert kept == found
        return
    (place,) = [i for i, piece in enumerate(kept) if piece.kind == GAP]
    head, tail = plain(kept[:place]), plain(kept[place + 1 :])
    assert len(head) + len(tail) == cap
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert kept[place].text == f"{len(whole) - cap:,}"
    kinds = [kind for kind, text in found for _ in text]
    actual = [kind for kind, text in kept[:place] + kept[place + 1 :] for _ in text]
    assert actual == kinds[: len(head)] + kinds[len(kinds) - len(tail) :]


def test_without_a_cap_a_text_is_unchanged() -> None:
    found = [Piece("a", "x" * 10_000)]
    assert shorten(found, None) == found


def noise(num_chars: int, seed: int) -> str:
    rng = random.Random(seed)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ,.", k=num_chars))


def test_long_texts_are_shortened_until_they_fit() -> None:
    texts = [noise(20_000, seed) for seed in range(20)]

    def blocks(cap: int | None) -> list[Any]:
        return [shorten([Piece("", text)], cap) for text in texts]

    lengths = list(map(len, texts))
    whole = pack_within(blocks, lengths, 10_000_000)
    assert whole.cap is None
    small = pack_within(blocks, lengths, 100_000)
    assert small.cap is not None
    assert small.num_bytes <= 100_000
    larger = pack_within(lambda cap: blocks(small.cap and 2 * small.cap), [0], 10**9)
    assert larger.num_bytes > 100_000, "no text was cut more than it had to be"
    assert pack_within(blocks, lengths, 10).cap == 512  # as small as it gets
