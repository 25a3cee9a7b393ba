"""Files of users: each that cannot be read is named with the reason, whatever it holds."""

from collections.abc import Callable
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy import files
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.files import (
    MAX_NESTING,
    parse_json,
    parse_toml,
    read_json,
    read_text,
    read_toml,
    text_lines,
)

Reader = Callable[..., Any]


def nested_json(levels: int) -> str:
    return "[" * levels + "]" * levels


@pytest.mark.parametrize("read", [read_text, read_toml, read_json])
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("none", "No such file or directory"),
        ("", "Is a directory"),
        ("a" * 300, "File name too long"),
        ("a/" * 3000, "File name too long"),
        ("a\0b", "embedded null byte"),
        ("a\ud800b", "surrogates not allowed"),
        ("/dev/null/a", "Not a directory"),
        ("latin", "is not UTF-8 text (byte 1)"),
        ("/dev/zero", "it is larger than"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_reason(
    read: Reader, path: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_TOML_BYTES", 2**20)
    (tmp_path / "latin").write_bytes(b"a\xe9")
    with pytest.raises(PlanError, match=r"^plan 'x' ") as caught:
        read(tmp_path / path, "plan 'x'", error=PlanError)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("read", "text", "reason"),
    [
        (read_toml, "a = ", "plan 'x' is not TOML: Invalid value"),
        (read_toml, "a = 1\na = 2", "is not TOML: Cannot overwrite a value"),
        (read_toml, f"a = {nested_json(101)}", "more than 100 levels"),
        (read_toml, f"a = {nested_json(9999)}", "more than 100 levels"),
        (read_toml, f"{'a.' * 200}a = 1", "more than 100 levels"),
        (read_toml, f"a = {'9' * 5000}", "a number has too many digits"),
        (read_toml, "#" * (files.MAX_TOML_BYTES + 1), "it is larger than 1 MiB"),
        (read_json, "{", "plan 'x' is not JSON: Expecting property name"),
        (read_json, "", "is not JSON: Expecting value"),
        (read_json, "[1] [2]", "Extra data"),
        (read_json, nested_json(101), "more than 100 levels"),
        (read_json, nested_json(100_000), "more than 100 levels"),
        (read_json, '{"a":' * 100_000, "more than 100 levels"),
        (read_json, "9" * 5000, "a number has too many digits"),
        (read_json, '{"a": {"b": 1, "c": 2, "b": 3}}', "an object has the key 'b' twice"),
    ],
)
def test_a_file_that_is_malformed_is_named_with_the_reason(
    read: Reader, text: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "x").write_text(text, encoding="utf-8")
    with pytest.raises(KVPolicyError, match=r"^plan 'x' ") as caught:
        read(tmp_path / "x", "plan 'x'")
    assert reason in str(caught.value)


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfa = 1")
    assert read_text(path, "x") == "a = 1"
    assert read_toml(path, "x") == {"a": 1}
    path.write_bytes(b"\xef\xbb\xbf[1]")
    assert read_json(path, "x") == [1]
    assert parse_json(path.read_bytes()) == [1]


def test_data_may_be_nested_as_deeply_as_the_limit_says() -> None:
    parse_json(nested_json(MAX_NESTING))
    parse_toml(f"a = {nested_json(MAX_NESTING - 1)}")
    assert len(parse_json(f"[{'[],' * 1000}[]]")) == 1001


def test_nan_and_infinity_are_numbers_as_python_writes_them() -> None:
    assert str(parse_json("[NaN, Infinity, -Infinity, 1e400]")) == "[nan, inf, -inf, inf]"


@given(st.text() | st.binary())
def test_any_text_is_parsed_or_refused_with_a_value_error(content: str | bytes) -> None:
    parsers: list[Reader] = [parse_json]
    parsers += [parse_toml] if isinstance(content, str) else []
    for parse in parsers:
        with suppress(ValueError):
            parse(content)


def test_lines_end_at_line_feeds_only() -> None:
    text = 'a\u2028b\x85c\x0cd\n\n  \n{"e"}\r\nf'
    lines = list(text_lines(BytesIO(text.encode("utf-8-sig")), "it"))
    assert [(line.number, line.text) for line in lines] == [
        (1, "a\u2028b\x85c\x0cd"),
        (4, '{"e"}'),
        (5, "f"),
    ]
    file = BytesIO(text.encode())
    for line in text_lines(BytesIO(text.encode()), "it"):
        begin = file.seek(line.begin)
        assert next(text_lines(file, "it", begin=begin)).text == line.text
