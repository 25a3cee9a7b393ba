"""A file of prompts is checked as a whole, and read line by line with the same prompts."""

import json
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cli import prompts as module
from kvpolicy.cli.prompts import PromptFile, read_prompts
from kvpolicy.errors import KVPolicyError, RequestError

RECORDS = [
    {"id": "a", "prompt": "x\u2028y", "seed": 3},
    {"prompt": [1, 2], "max_new_tokens": 4},
    {"id": 7, "messages": [{"role": "user", "content": "ü\ud800"}], "stop": ["a", "b"]},
]

lines = st.lists(st.text().map(lambda text: text.replace("\n", "")), min_size=1).filter(
    lambda found: any(line.strip() for line in found)
)


def write(path: Path, *records: object) -> str:
    path.write_text("\n\n".join(map(json.dumps, records)), encoding="utf-8-sig")
    return str(path)


@given(lines, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_its_prompts_are_those_that_are_read_at_once(
    found: list[str], end: str, has_mark: bool
) -> None:
    """Texts in any order of reading, with and without a byte order mark."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.txt"
        coding = "utf-8-sig" if has_mark else "utf-8"
        content = end.join(found).encode(coding, "surrogatepass")
        path.write_bytes(content)
        try:
            whole = read_prompts(str(path))
        except KVPolicyError as error:
            with pytest.raises(KVPolicyError, match=f"^{re.escape(str(error))}$"):
                PromptFile(str(path))
            return
        with PromptFile(str(path)) as prompts:
            assert len(prompts) == len(whole)
            assert [prompts[i] for i in reversed(range(len(whole)))] == whole[::-1]
            assert prompts[:] == whole


def test_json_lines_are_read_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *RECORDS)
    with PromptFile(path) as prompts:
        assert [prompts[i] for i in (2, 0, 1)] == [read_prompts(path)[i] for i in (2, 0, 1)]
        assert [one.id for one in prompts] == ["a", 1, 7]
        assert prompts[2].place == f"line 5 of '{path}'"
        assert prompts[2].own == {"stop": ["a", "b"]}
        with pytest.raises(IndexError):
            prompts[3]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    def digest(*records: object) -> str:
        with PromptFile(write(tmp_path / "p.jsonl", *records)) as prompts:
            return prompts.digest

    assert digest(*RECORDS) == digest(*RECORDS) != digest(*RECORDS[:2])


def test_a_file_that_is_changed_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", *RECORDS)
    with PromptFile(path) as prompts:
        assert prompts[0].id == "a"
        write(tmp_path / "p.jsonl", *RECORDS, {"prompt": "more"})
        with pytest.raises(KVPolicyError, match=r"p\.jsonl"):
            prompts[1]
    with PromptFile(path) as prompts:
        Path(path).write_text("")
        with pytest.raises(KVPolicyError, match=r"p\.jsonl"):
            prompts[1]


def test_equal_ids_are_found_among_equal_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Constant:
        def __init__(self, text: bytes, *, digest_size: int) -> None: ...

        def digest(self) -> bytes:
            return bytes(8)

    monkeypatch.setattr(module.hashlib, "blake2b", Constant)
    path = write(tmp_path / "p.jsonl", *({"id": i, "prompt": "x"} for i in range(5)))
    PromptFile(path).__exit__()
    path = write(tmp_path / "p.jsonl", *({"id": i % 5, "prompt": "x"} for i in range(6)))
    with pytest.raises(RequestError, match=r"line 1 .*line 11"):
        PromptFile(path)


def test_what_cannot_be_read_twice_is_refused() -> None:
    for file in ("-", "/dev/zero"):
        with pytest.raises(KVPolicyError, match="--output"):
            PromptFile(file)
