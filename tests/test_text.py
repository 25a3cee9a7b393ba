"""Control characters are shown and have no effect; other characters stay as they are."""

import json
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.text import visible, visible_json, visible_lines


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred", r"a\u001b[31mred"),
        ("\x1b]52;c;aGk=\x07", r"\u001b]52;c;aGk=\u0007"),
        ("\x9b31m", r"\u009b31m"),
        ("a\x7f", r"a\u007f"),
        ("a\x00b", r"a\u0000b"),
        ("one\ntwo\r\tthree", r"one\ntwo\r\tthree"),
        ("a\u202eb\u2066c\u200f", r"a\u202eb\u2066c\u200f"),
        ("a\u200bb\u2060\ufeff", r"a\u200bb\u2060\ufeff"),
        ("a\u2028b\u2029\x85", r"a\u2028b\u2029\u0085"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("\u115f\u3164\U000e0100", r"\u115f\u3164\U000e0100"),
        ("C:\\new", "C:\\new"),
        ("naïve 日本語 \xa0 ❤\ufe0f 🎈", "naïve 日本語 \xa0 ❤\ufe0f 🎈"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


def has_effect(text: str) -> bool:
    return any(category(char) in {"Cc", "Cf", "Zl", "Zp", "Cs"} for char in text)


@given(st.text(st.characters()))
def test_no_character_with_an_effect_is_left(text: str) -> None:
    assert not has_effect(visible(text))
    assert not has_effect(visible_lines(text).replace("\n", "").replace("\t", ""))
    if not has_effect(text) and text.isascii():
        assert visible(text) == text


@given(st.text(st.characters()), st.sampled_from([None, 2]))
def test_json_keeps_its_value(text: str, indent: int | None) -> None:
    written = visible_json(json.dumps({"a": [text]}, ensure_ascii=False, indent=indent))
    assert json.loads(written) == {"a": [text]}
    assert not has_effect(written.replace("\n", ""))
