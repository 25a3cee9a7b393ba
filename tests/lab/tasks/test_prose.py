"""Passages of a text: their lengths in tokens, where they are from, and what is refused."""

import hashlib
import logging
import platform
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import r1_tokenizer
from tokenizer_kinds import KINDS

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.prose import PROSE, Prose, open_prose


def prose(content: str) -> Prose:
    return Prose("a text", content, {"test": (0, len(content))})


def num_tokens(tokenizer: object, text: str) -> int:
    return len(tokenizer(text)["input_ids"])  # type: ignore[operator]


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", ["byte-level", "Llama", "Gemma", "unigram", "WordPiece"])
@settings(max_examples=30)
@given(
    st.lists(
        st.sampled_from(["the", "ab", "one", "two", "do" * 20, "\n\n", "\n", "  "]), min_size=60
    ),
    st.lists(st.integers(20, 60), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_parts_have_as_many_tokens_as_fit_and_passages_do_not_overlap(
    kind: str, words: list[str], lengths: list[int], seed: int
) -> None:
    tokenizer = KINDS[kind]()
    text = prose(" ".join(words).strip() + " end")
    try:
        found = text.passages(5, lengths, tokenizer, seed=seed)
    except TaskError:
        assert num_tokens(tokenizer, text.content) <= sum(lengths)
        return
    for passage in found:
        end, wanted = passage.start, 0
        assert passage.start == 0 or text.content[passage.start - 1] == "\n"
        for part, length in zip(passage.parts, lengths, strict=True):
            assert text.content[end:].startswith(part)
            assert part.strip()
            end, wanted = end + len(part), wanted + length
            rest = text.content[end:]
            word = rest[: len(rest) - len(rest.lstrip())] + rest.split()[0][:16]
            assert num_tokens(tokenizer, text.content[passage.start : end]) <= wanted
            assert num_tokens(tokenizer, text.content[passage.start : end] + word) > wanted
    spans = sorted((one.start, one.start + sum(map(len, one.parts))) for one in found)
    assert all(first_end <= second for (_, first_end), (second, _) in pairwise(spans))
    for k in range(1, len(found)):
        assert text.passages(k, lengths, tokenizer, seed=seed) == found[:k]


def test_the_default_text_says_which_it_is_and_has_splits_without_common_text() -> None:
    tokenizer = r1_tokenizer()
    topics = pytest.importorskip("pydoc_data.topics").topics
    text = open_prose()
    for name, chapter in topics.items():
        assert chapter.strip("\n") in text.content, name
    digest = hashlib.sha256(text.content.encode()).hexdigest()
    borders = sorted(text.splits.values())
    assert borders[0][0] == 0
    assert borders[-1][1] == len(text.content)
    assert all(end == begin for (_, end), (begin, _) in pairwise(borders))
    for split in ("train", "tune", "test"):
        (found,) = text.passages(1, (300,), tokenizer, seed=1, split=split)
        begin, end = text.splits[split]
        assert begin <= found.start < found.start + len(found.parts[0]) <= end
        assert PROSE in str(found.facets["text"])
        assert platform.python_version() in str(found.facets["text"])
        assert digest.startswith(str(found.facets["text"]).split()[-1])


def test_another_seed_draws_other_passages() -> None:
    first, second = (open_prose().passages(3, (200,), r1_tokenizer(), seed=seed) for seed in (0, 1))
    assert not {one.start for one in first} & {one.start for one in second}


def test_a_file_of_any_line_ends_is_one_text_with_a_test_split(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_bytes(b"\r\nOne word.\r\n\r\nTwo words.\r\n")
    text = open_prose(str(tmp_path / "book.txt"))
    assert text.content == "One word.\n\nTwo words."
    assert text.splits == {"test": (0, len(text.content))}
    assert text.name == "book.txt"
    with pytest.raises(TaskError, match="tune"):
        text.passages(1, (5,), r1_tokenizer(), seed=0, split="tune")


def test_a_text_without_blank_lines_is_cut_at_lines_and_one_without_spaces_anywhere() -> None:
    tokenizer = KINDS["byte-level"]()
    indented = prose("\n\n".join([" the ab one\n two"] * 40))
    found = indented.passages(9, (40,), tokenizer, seed=0)
    assert len(found) > 1
    assert all(one.parts[0].startswith(" the") for one in found)
    lines = prose("\n".join(["the ab one two"] * 40))
    assert len(lines.passages(9, (40,), tokenizer, seed=0)) > 1
    (found,) = prose("日本" * 400).passages(9, (120,), tokenizer, seed=0)
    assert 20 < len(found.parts[0]) <= 120


@pytest.mark.parametrize(
    ("content", "lengths"),
    [("the ab one two", (500,)), ("do" * 400, (9,))],
)
def test_a_text_that_is_too_short_and_a_part_without_a_word_are_refused(
    content: str, lengths: tuple[int, ...]
) -> None:
    with pytest.raises(TaskError):
        prose(content).passages(1, lengths, KINDS["Gemma"](), seed=0)


def test_counting_warns_of_no_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = KINDS["byte-level"]()
    tokenizer.model_max_length = 50
    told: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.Logger, "callHandlers", lambda _, record: told.append(record))
    open_prose().passages(1, (40,), tokenizer, seed=0)
    assert told == []


def test_a_tokenizer_that_does_not_know_the_text_is_refused() -> None:
    with pytest.raises(TaskError, match="knows 3%"):
        open_prose().passages(1, (50,), KINDS["words"](), seed=0)


@pytest.mark.parametrize("content", [b"", b" \n\n", b"\xff\xfe\x00"])
def test_a_file_without_text_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "book.txt"
    path.write_bytes(content)
    with pytest.raises(TaskError, match=r"book\.txt"):
        open_prose(str(path))
    with pytest.raises(TaskError, match=r"missing\.txt"):
        open_prose(str(tmp_path / "missing.txt"))


def test_a_python_without_the_text_says_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(TaskError, match="of=FILE"):
        open_prose()
