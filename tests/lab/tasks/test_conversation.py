"""Conversations: their file, the frame around history and question, distances, grading."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.chat_template import wrap
from kvpolicy.lab.tasks.conversation import (
    Conversation,
    Frame,
    Question,
    chat_frame,
    conversations_of,
    examples_of,
    read_conversations,
)
from kvpolicy.lab.tasks.task import Example, GradeError, load_task

TALK = Conversation(
    index=0,
    utterances=("Ann: I grow figs.", "Bob: I have a boat.", "Ann: The figs died."),
    questions=(
        Question("What does Bob have?", "a boat", "boats"),
        Question("What died?", "figs", "figs"),
        Question("Who?", "Ann"),
    ),
    topics=("figs", "boats", "figs"),
)
SHORT = Conversation(0, ("Hello.",), (Question("What was said?", "hello"),))

texts = st.text(min_size=1, max_size=8)
talks = st.builds(
    Conversation,
    st.just(0),
    st.lists(texts, min_size=1, max_size=4).map(tuple),
    st.lists(st.builds(Question, texts, texts, st.text(max_size=3)), min_size=1).map(tuple),
)


def distance_by_hand(topics: tuple[str, ...], topic: str) -> int | None:
    """Walk back from the end, and count the changes to other topics."""
    changes, last = 0, None
    for said in reversed(topics):
        if said == topic:
            return changes
        if said != last:
            changes, last = changes + 1, said
    return None


@given(st.lists(st.sampled_from("abc"), max_size=8), st.sampled_from("abcd"))
def test_distance_counts_visits_of_other_topics_since(topics: list[str], topic: str) -> None:
    talk = Conversation(0, tuple("x" * len(topics)), (), tuple(topics))
    expected = distance_by_hand(tuple(topics), topic)
    assert talk.distance(Question("", "", topic)) == expected


def test_distance_is_not_known_without_topics() -> None:
    assert SHORT.distance(SHORT.questions[0]) is None
    assert TALK.distance(TALK.questions[2]) is None


def write_conversations(path: Path, conversations: list[Conversation]) -> None:
    rows = [
        {
            "utterances": talk.utterances,
            **({"topics": talk.topics} if talk.topics else {}),
            "questions": [
                {"question": one.text, "answer": one.answer}
                | ({"topic": one.topic} if one.topic else {})
                for one in talk.questions
            ],
        }
        for talk in conversations
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@given(st.lists(talks, min_size=1, max_size=3))
def test_a_file_gives_back_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, drawn: list[Conversation]
) -> None:
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    write_conversations(path, [TALK, *drawn])
    first, *others = read_conversations(path)
    assert first == TALK
    assert [talk.index for talk in others] == list(range(1, len(drawn) + 1))
    for written, read in zip(drawn, others, strict=True):
        assert (read.utterances, read.questions) == (written.utterances, written.questions)


GOOD = {"utterances": ["a"], "questions": [{"question": "b", "answer": "c"}]}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([], "line 1"),
        ({}, "conversation 1 .*'utterances'"),
        (GOOD | {"utterances": "a"}, "'utterances'"),
        (GOOD | {"utterances": [1]}, "'utterances'"),
        (GOOD | {"utterances": []}, "utterances"),
        (GOOD | {"topics": ["x", "y"]}, "2 topics"),
        (GOOD | {"topics": "x"}, "'topics'"),
        (GOOD | {"questions": []}, "'questions'"),
        (GOOD | {"questions": ["b"]}, "'question'"),
        (GOOD | {"questions": [{"question": "b"}]}, "'answer'"),
        (
            GOOD | {"questions": [{"question": "b", "answer": "c", "topic": []}]},
            "'topic'",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_in_one_sentence(
    tmp_path: Path, row: Any, message: str
) -> None:
    path = tmp_path / "talks.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(TaskError, match=message) as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"\.jsonl"):
        read_conversations(tmp_path / "talks.txt")
    with pytest.raises(TaskError, match="talks"):
        read_conversations(tmp_path / "talks.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TaskError, match="empty"):
        read_conversations(tmp_path / "empty.jsonl")


def test_a_frame_divides_a_prompt_into_history_and_question() -> None:
    frame = Frame("<", "\n", " Q: ", ">")
    assert frame.history(SHORT) == "<Hello.\n"
    assert frame.question(SHORT.questions[0]) == " Q: What was said?>"
    assert frame.prompt(SHORT, SHORT.questions[0]) == "<Hello.\n Q: What was said?>"


@pytest.fixture
def talks_file(tmp_path: Path) -> Path:
    path = tmp_path / "talks.jsonl"
    write_conversations(path, [TALK, SHORT])
    return path


def test_examples_are_histories_with_one_question(talks_file: Path) -> None:
    task = load_task(f"conversations:source={talks_file},chat=false")
    frame = task.frame(None)
    drawn = task.conversations(9, seed=3)
    assert sorted(talk.utterances for talk in drawn) == sorted([TALK.utterances, SHORT.utterances])
    assert [talk.index for talk in drawn] == [0, 1]
    items = task.examples(9, seed=3)
    asked = [(talk, question) for talk in drawn for question in talk.questions]
    assert [item.prompt for item in items] == [frame.prompt(*pair) for pair in asked]
    assert [item.answer for item in items] == [question.answer for _, question in asked]
    assert [item.index for item in items] == [0, 1, 2, 3]
    of_boats = next(item for item in items if item.answer == "a boat")
    assert of_boats.facets == {"topic": "boats", "distance": 1, "length": 3}
    assert task.examples(2, seed=3) == items[:2]


def test_a_chat_holds_history_and_question_in_one_message(talks_file: Path) -> None:
    tokenizer = tiny.r1_tokenizer()
    task = load_task(f"conversations:source={talks_file}")
    frame = task.frame(tokenizer)
    assert frame.has_special_tokens
    items = wrap(task.examples(9, seed=0), tokenizer)
    talks = task.conversations(9, seed=0)
    prompts = [frame.prompt(talk, question) for talk in talks for question in talk.questions]
    assert [item.prompt for item in items] == prompts
    assert all(item.chat for item in items)


def test_a_tokenizer_without_a_usable_chat_template_is_refused() -> None:
    tokenizer = tiny.r1_tokenizer()
    for template in (None, "constant"):
        tokenizer.chat_template = template
        with pytest.raises(TaskError, match="chat=false"):
            chat_frame(tokenizer, Frame())


@pytest.mark.parametrize(
    ("grader", "text", "verdict"),
    [
        ("contains", "It was A Boat, I think.", True),
        ("contains", "<think>A boat, or a car?</think> A car.", False),
        ("contains", "<think>A car?</think> No, a boat.", True),
        ("contains", "a boathouse", False),
        ("contains", "drama boat", False),
        ("box", "\\boxed{a boat}", True),
        ("box", "a boat", False),
        ("box", "\\boxed{a boat} or \\boxed{a car}", False),
    ],
)
def test_graders(talks_file: Path, grader: str, text: str, verdict: bool) -> None:
    task = load_task(f"conversations:source={talks_file},grader={grader}")
    assert task.grade(text, Example(0, "", "a boat")) is verdict
    with pytest.raises(GradeError, match="question 4"):
        task.grade(text, Example(4, "", " "))


def test_wrong_options_of_a_file_are_refused(talks_file: Path) -> None:
    with pytest.raises(TaskError, match="contains"):
        load_task(f"conversations:source={talks_file},grader=kind")
    with pytest.raises(TaskError, match="tune"):
        load_task(f"conversations:source={talks_file}").examples(1, seed=0, split="tune")


def test_a_task_without_conversations_is_refused_where_they_are_needed(talks_file: Path) -> None:
    with pytest.raises(TaskError, match="gsm8k"):
        conversations_of(load_task("gsm8k"), 1, seed=0)
    task = load_task(f"conversations:source={talks_file}")
    assert conversations_of(task, 2, seed=0) == task.conversations(2, seed=0)


def test_the_last_conversation_is_cut_where_enough_questions_are_drawn() -> None:
    items = examples_of([TALK, TALK], Frame(), 4, facets={"length": 7})
    assert [item.answer for item in items] == ["a boat", "figs", "Ann", "a boat"]
    assert [item.facets["length"] for item in items] == [7] * 4
