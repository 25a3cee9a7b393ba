"""JSON lines that survive truncation at any byte."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import ResultsError
from kvpolicy.lab.store.jsonl import JsonLines

RECORDS = [{"text": "a\nb\r\u2028c"}, {"text": "ü\x00"}, {"n": 3}]


def written(path: Path) -> bytes:
    lines = JsonLines(path)
    for record in RECORDS:
        lines.append(record)
    lines.close()
    return path.read_bytes()


def test_appended_records_are_read_back(tmp_path: Path) -> None:
    written(tmp_path / "a.jsonl")
    found = JsonLines(tmp_path / "a.jsonl")
    assert found.records == RECORDS
    assert not found.was_torn
    found.close()


def test_truncated_at_any_byte_complete_lines_are_kept_and_appending_continues(
    tmp_path: Path,
) -> None:
    content = written(tmp_path / "a.jsonl")
    path = tmp_path / "cut.jsonl"
    for end in range(len(content) + 1):
        path.write_bytes(content[:end])
        lines = JsonLines(path)
        whole = content[:end].count(b"\n")
        assert lines.records == RECORDS[:whole]
        assert lines.was_torn == (end > 0 and content[end - 1 : end] != b"\n")
        lines.append({"last": end})
        lines.close()
        again = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
        assert again == [*RECORDS[:whole], {"last": end}]


@given(st.dictionaries(st.text(), st.text() | st.integers() | st.none()))
def test_any_text_stays_on_its_line(record: dict[str, object]) -> None:
    """Line separators of Unicode and escapes of JSON do not break a line in two."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.jsonl"
        lines = JsonLines(path)
        lines.append(record)
        lines.append({})
        lines.close()
        found = JsonLines(path)
        found.close()
        assert found.records == [record, {}]


@pytest.mark.parametrize("bad", [b"{]", b"[1]", b"\x00\x00", b"\xff"])
def test_a_broken_line_in_the_middle_is_named(tmp_path: Path, bad: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\n' + bad + b'\n{"a": 2}\n')
    with pytest.raises(ResultsError, match=r"a\.jsonl, line 2"):
        JsonLines(path)
    assert path.read_bytes().endswith(b'{"a": 2}\n')
