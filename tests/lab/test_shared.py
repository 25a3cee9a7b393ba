"""What cells share: made once for each key, and released when it is too large."""

import attrs
import pytest

from kvpolicy.lab.shared import Pieces, Shared


@attrs.define(eq=False)
class Made:
    num_bytes: int = 10
    is_reusable: bool = True


def test_it_is_made_once_for_equal_keys() -> None:
    shared = Shared()
    first, other = shared.get(("a", [1, 2]), Made), shared.get(("a", [1, 3]), Made)
    assert first is not other
    assert shared.get(("a", [1, 2]), Made) is first
    assert shared.get(("a", [1, 3]), Made) is other


def test_what_is_not_reusable_is_made_again() -> None:
    shared = Shared()
    first = shared.get("a", lambda: Made(is_reusable=False))
    second = shared.get("a", Made)
    assert second is not first
    assert shared.get("a", Made) is second
    first.is_reusable = True
    assert shared.get("a", Made) is second


def test_what_was_not_asked_for_longest_leaves_when_there_is_no_room() -> None:
    shared = Shared(most_bytes=35)
    a, b, c = (shared.get(name, Made) for name in "abc")
    assert shared.get("a", Made) is a
    shared.get("d", lambda: Made(num_bytes=0)).num_bytes = 15
    shared.get("e", lambda: Made(num_bytes=0))
    assert [shared.get(name, Made) is one for name, one in (("a", a), ("c", c))] == [True, True]
    assert shared.get("b", Made) is not b


def test_pieces_are_kept_for_all_who_read_them() -> None:
    pieces: Pieces[int, str] = Pieces(most_bytes=20)
    for number, text in enumerate(("a", "b")):
        pieces.add(number, text, 10)
    for _ in range(2):
        assert [pieces.read(number) for number in (0, 1)] == ["a", "b"]
    assert pieces.keeps_all
    assert pieces.num_bytes == 20


def test_pieces_that_are_too_large_together_are_released_when_they_were_read() -> None:
    pieces: Pieces[int, str] = Pieces(most_bytes=20)
    pieces.add(0, "a", 10)
    pieces.add(1, "b", 10)
    pieces.read(0)
    assert 0 in pieces
    pieces.add(2, "c", 1)
    assert not pieces.keeps_all
    assert [number in pieces for number in (0, 1, 2)] == [False, True, True]
    assert pieces.read(2) == "c"
    assert 2 not in pieces
    assert pieces.read(1) == "b"
    with pytest.raises(KeyError):
        pieces.read(1)
