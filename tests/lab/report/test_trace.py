"""The first difference of two texts, of which middles may be left out."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import pytest
from chromium import browser_of_tests
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.lab.report.page import bundle
from kvpolicy.lab.report.texts import Piece, shorten

_MAIN = 'import { parting } from "./trace.js";\nwindow.parting = parting;\n'
_ASSETS = files("kvpolicy.lab.report") / "assets"

# Letters of one unit of UTF-16 and of two, of which the first units are the same.
words = st.text("ab\N{GRINNING FACE}\N{SMILING FACE WITH OPEN MOUTH}", max_size=9)


pytestmark = pytest.mark.nightly  # runs a browser


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    read = lambda name: _MAIN if name == "dev" else (_ASSETS / f"{name}.js").read_text()  # noqa: E731
    with browser_of_tests() as browser:
        page = browser.new_page()
        page.set_content(f"<!doctype html><script>{bundle('dev', read)}</script>")
        yield page


def pieces_of(text: str, cap: int | None) -> list[Piece]:
    """A text as a page has it, in pieces of two letters."""
    return shorten([Piece("", text[i : i + 2]) for i in range(0, len(text), 2)], cap)


def parting(page: Any, *texts: str, cap: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(
        "sides => parting(...sides)", [pieces_of(text, cap) for text in texts]
    )
    return found


@given(words, words, words, st.none() | st.integers(1, 12))
def test_the_first_difference_of_two_texts_is_found(
    page: Any, shared: str, one: str, other: str, cap: int | None
) -> None:
    a, b = shared + one, shared + other
    found = parting(page, a, b, cap=cap)
    if found["place"] is not None:
        assert found["note"] is None
        before, also = (
            text.encode("utf-16-le")[: 2 * found["place"]].decode("utf-16-le") for text in (a, b)
        )
        assert before == also
        assert a[len(before) : len(before) + 1] != b[len(before) : len(before) + 1]
    elif "left out" in found["note"]:
        assert cap is not None
        assert max(len(a), len(b)) > cap
        head = cap - cap // 3
        assert a[:head] == b[:head]
    else:
        assert a == b
        assert cap is None or len(a) <= cap


def test_texts_equal_where_shown_are_not_called_equal(page: Any) -> None:
    texts = ["x" * 9 + middle + "y" * 9 for middle in ("1", "2")]
    assert parting(page, *texts) == {"place": 9, "note": None}
    for cap in (6, 9, 12):
        assert "same up to what is left out" in parting(page, *texts, cap=cap)["note"]
    assert parting(page, texts[0], texts[0])["note"] == "The two texts are the same."


def test_a_surrogate_pair_is_not_split(page: Any) -> None:
    texts = ("a\N{GRINNING FACE}", "a\N{SMILING FACE WITH OPEN MOUTH}")
    assert parting(page, *texts) == {"place": 1, "note": None}
