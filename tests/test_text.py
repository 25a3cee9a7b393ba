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
        ("pay\u200dpal é\u200cé \u200c", r"pay\u200dpal é\u200cé \u200c"),
        ("日\u200d本", r"日\u200d本"),
        ("naïve 日本語 \xa0 ❤\ufe0f 🎈", "naïve 日本語 \xa0 ❤\ufe0f 🎈"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645",  # Persian: mi-khaham
        "\u0915\u094d\u200d\u0937",  # Devanagari: a half form
        "\u09b0\u200d\u09cd\u09af",  # Bengali: a joiner before the virama
        "👩\u200d👩\u200d👧",
        "🏳\ufe0f\u200d🌈 👩🏽\u200d🚀",
    ],
)
def test_joiners_that_shape_what_is_seen_stay(text: str) -> None:
    assert visible(text) == text
    assert visible_json(json.dumps(text, ensure_ascii=False)) == f'"{text}"'


JOINERS = "\u200c\u200d"


def has_effect(text: str) -> bool:
    """Joiners are looked at below."""
    effects = {"Cc", "Cf", "Zl", "Zp", "Cs"}
    return any(category(char) in effects and char not in JOINERS for char in text)


@given(st.text(st.characters()))
def test_no_character_with_an_effect_is_left(text: str) -> None:
    assert not has_effect(visible(text))
    assert not has_effect(visible_lines(text).replace("\n", "").replace("\t", ""))
    if not has_effect(text) and text.isascii():
        assert visible(text) == text


@given(st.text(st.characters() | st.sampled_from(JOINERS)), st.sampled_from(JOINERS))
def test_no_joiner_is_left_at_an_end_or_between_ascii(text: str, joiner: str) -> None:
    assert joiner not in visible(f"{joiner}a{joiner}b{joiner}")
    shown = visible(text)
    assert not set(shown[:1] + shown[-1:]) & set(JOINERS)


@given(st.text(st.characters()), st.sampled_from([None, 2]))
def test_json_keeps_its_value(text: str, indent: int | None) -> None:
    written = visible_json(json.dumps({"a": [text]}, ensure_ascii=False, indent=indent))
    assert json.loads(written) == {"a": [text]}
    assert not has_effect(written.replace("\n", ""))
