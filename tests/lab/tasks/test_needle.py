"""Needles in real text: the haystack, the question, the grade, and a whole sweep."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import r1_tokenizer
from tokenizer_kinds import KINDS

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.prose import open_prose
from kvpolicy.lab.tasks.task import Example, Task, fitted, load_task

CHAT = r1_tokenizer()  # bytes, and a chat template
PLAIN = KINDS["byte-level"]()

NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d{7})\.")


def task(text: str, tokenizer: object = CHAT) -> Task:
    return fitted(load_task(text), tokenizer)


def solve(prompt: str) -> str:
    """Look the answer up, as a reader would."""
    before, _, question = prompt.partition("\nWhat is the special magic number for ")
    found = dict(NEEDLE.findall(before))
    return found[question.split(" ")[0]]


def haystack(prompt: str) -> str:
    """The passage with its needles."""
    return prompt.partition("afterwards.\n")[2].rpartition("\nWhat is the special")[0]


def without_needles(text: str) -> str:
    """A haystack as it was: needles are followed by a space, at the end preceded by one."""
    text = re.sub(rf"(?: {NEEDLE.pattern})+$", "", text)
    return re.sub(rf"{NEEDLE.pattern} ", "", text)


@given(st.integers(0, 99), st.integers(1, 9), st.integers(0, 600), st.integers(1, 12))
def test_a_prompt_has_the_asked_length_keys_and_depth_and_its_answer_is_found(
    seed: int, keys: int, more: int, depths: int
) -> None:
    length = 400 + 90 * keys + more
    name = f"needle:prompt_tokens={length},keys={keys},depths={depths}"
    *_, example = task(name).examples(3, seed=seed)
    assert example.chat
    assert solve(example.prompt) == example.answer
    text = haystack(example.prompt)
    needles = NEEDLE.findall(text)
    assert len({key for key, _ in needles}) == len({value for _, value in needles}) == keys
    # This tokenizer has a token for each byte of a text, and one before it. A passage ends before
    # the word for which there is no room.
    num_tokens = len(CHAT(example.prompt)["input_ids"])
    longest = max(map(len, open_prose().content.split()))
    assert length - longest - 1 <= num_tokens <= length + keys

    percent = example.facets["depth"]
    assert percent == (50 if depths == 1 else round(100 * (2 % depths) / (depths - 1)))
    passage = without_needles(text)
    before = without_needles(text[: text.index(example.answer)].rpartition("One of")[0])
    sentence = max(map(len, re.split(r"(?<=[.!?])\s+|\n\s*\n", passage)))
    assert abs(len(before) - len(passage) * float(percent) / 100) <= sentence + 2


def test_without_its_needles_a_haystack_is_a_passage_of_the_text() -> None:
    content = open_prose().content
    for example in task("needle:keys=6").examples(10, seed=3):
        assert without_needles(haystack(example.prompt)) in content


def test_depths_take_turns_and_seeds_and_splits_draw_others() -> None:
    drawn = [
        task("needle:depths=3").examples(6, seed=seed, split=split)
        for seed, split in ((0, "test"), (1, "test"), (0, "tune"), (0, "train"))
    ]
    for examples in drawn:
        assert [example.facets["depth"] for example in examples] == [0, 50, 100] * 2
        assert [example.index for example in examples] == list(range(6))
    assert len({example.prompt for examples in drawn for example in examples}) == 24
    assert task("needle:depths=3").examples(4, seed=0) == drawn[0][:4]


def test_a_longer_haystack_has_the_same_needles() -> None:
    shorter, longer = (
        task(f"needle:prompt_tokens={length}").examples(4, seed=2) for length in (900, 2000)
    )
    assert [one.answer for one in shorter] == [one.answer for one in longer]


@pytest.mark.parametrize(("name", "tokenizer"), [("needle", PLAIN), ("needle:chat=false", CHAT)])
def test_without_a_chat_the_model_continues_the_answer(name: str, tokenizer: object) -> None:
    (example,) = task(name, tokenizer).examples(1, seed=0)
    assert not example.chat
    key = re.findall(r"number for (\S+) mentioned in the provided text is$", example.prompt)
    assert dict(NEEDLE.findall(example.prompt))[key[0]] == example.answer


def test_a_text_of_ones_own_is_the_haystack(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("The ab one two and do. " * 200, encoding="utf-8")
    name = f"needle:of={tmp_path / 'book.txt'},prompt_tokens=900,keys=2"
    (example,) = task(name).examples(1, seed=0)
    assert task(name).name == name
    assert without_needles(haystack(example.prompt)).startswith("The ab one two and do. The ab")


@pytest.mark.parametrize(
    ("text", "is_correct"),
    [
        ("1234567", True),
        ("The special magic number for calm-river is **1234567**. It is not 7654321.", True),
        ("Magic number 1: 1234567", True),
        ("<think>7654321? No.</think>It is 1234567.", True),
        ("<think>1234567? No.</think>It is 7654321.", False),
        ("It is not 7654321 but 1234567.", False),
        ("12345678", False),
        ("01234567", False),
        ("1,234,567", False),
        ("<think>1234567", True),
        ("", False),
    ],
)
def test_the_first_number_of_seven_digits_is_the_answer(text: str, is_correct: bool) -> None:
    example = Example(0, "", "1234567")
    assert load_task("needle").metric.grade(text, example) is is_correct


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("keys=0", "keys=0"),
        ("keys=901", "900"),
        ("depths=0", "depths=0"),
        ("prompt_tokens=80", "prompt_tokens"),
        ("keys=90", "keys"),
        ("length=300", "'length'"),
        ("of=none.txt", r"none\.txt"),
    ],
)
def test_options_that_make_no_haystack_are_refused(options: str, named: str) -> None:
    with pytest.raises(TaskError, match=named):
        task(f"needle:{options}").examples(1, seed=0)


def test_without_a_tokenizer_nothing_is_drawn() -> None:
    with pytest.raises(TaskError, match="--model"):
        load_task("needle").examples(1, seed=0)
