"""Conversations: a long history, and questions that return to its topics.

A prompt is an opening, the utterances of the history, and one question. The parts before the
question are the same for all questions of a conversation, so that an engine can prefill a history
once and ask many questions about it; `Frame` joins the parts in both cases.

A user's conversations are lines of JSON::

    {"utterances": ["Ann: I grow figs.", "Bob: Mine died."], "topics": ["figs", "figs"],
     "questions": [{"question": "What does Ann grow?", "answer": "figs", "topic": "figs"}]}

``topics``, one for each utterance, and the ``topic`` of a question may be left out.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import extract_answer, without_thought
from kvpolicy.lab.tasks.datasets import Row, read_rows
from kvpolicy.lab.tasks.question_sets import draw
from kvpolicy.lab.tasks.task import Example, Graded, GradeError, Split, Task, spell_fields
from kvpolicy.model.chat import has_chat_template

# Graders.
CONTAINS = "contains"
BOX = "box"


@attrs.frozen
class Question:
    """A question about a conversation.

    Attributes:
        text: The question.
        answer: The expected answer.
        topic: The topic that it returns to; empty if not known.
    """

    text: str
    answer: str
    topic: str = ""


@attrs.frozen
class Conversation:
    """A history, and questions that are asked behind it, each on its own.

    Attributes:
        index: Number of the conversation in its task and seed, from 0.
        utterances: What was said, in order.
        questions: The questions.
        topics: The topic of each utterance; empty if not known.
    """

    index: int
    utterances: tuple[str, ...]
    questions: tuple[Question, ...]
    topics: tuple[str, ...] = ()

    def distance(self, question: Question) -> int | None:
        """How far back the question's topic was left: visits of other topics since then.

        A visit is a run of utterances on one topic. 0 is the topic that was talked about last;
        ``None`` if the topics are not known, or none of the utterances is about this one.
        """
        visits = [topic for topic, _ in groupby(self.topics)]
        if not question.topic or question.topic not in visits:
            return None
        return visits[::-1].index(question.topic)


@attrs.frozen
class Frame:
    """What stands around a history and a question in a prompt.

    Attributes:
        opening: Text before the first utterance.
        joint: Text behind each utterance.
        before_question: Text between the history and the question.
        closing: Text behind the question, up to where the answer begins.
        has_special_tokens: Whether these texts contain the special tokens of a prompt, so that
            the tokenizer must not add them.
    """

    opening: str = ""
    joint: str = ""
    before_question: str = ""
    closing: str = ""
    has_special_tokens: bool = False

    def history(self, conversation: Conversation) -> str:
        """The part of a prompt that all questions of a conversation share."""
        return self.opening + "".join(text + self.joint for text in conversation.utterances)

    def question(self, question: Question) -> str:
        """The part of a prompt behind the history."""
        return self.before_question + question.text + self.closing

    def prompt(self, conversation: Conversation, question: Question) -> str:
        """A whole prompt."""
        return self.history(conversation) + self.question(question)


class ConversationTask(Task, Protocol):
    """A task whose prompts are histories with questions."""

    def frame(self, tokenizer: Any) -> Frame:
        """How the task's prompts are put together for a model.

        Raises:
            TaskError: The task asks in a chat, and the tokenizer has no chat template.
        """

    def conversations(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Conversation]:
        """Draw ``n`` conversations of a split, or all if there are fewer.

        The questions of the first ones are, in order, what `examples` of the same seed and split
        gives.

        Raises:
            TaskError: The task has no such split.
        """


def conversations_of(
    task: Task, n: int, *, seed: int, split: Split = "test"
) -> Sequence[Conversation]:
    """Draw conversations of any task, if it has them.

    Args:
        task: The task.
        n: Number of conversations.
        seed: Random seed for the choice.
        split: The split.

    Raises:
        TaskError: The task has no conversations, or no such split.
    """
    if not hasattr(task, "conversations"):
        msg = (
            f"task '{task.name}' has no conversations; expected a task such as "
            "'conversations:source=FILE', whose histories have several questions"
        )
        raise TaskError(msg)
    found: Sequence[Conversation] = task.conversations(n, seed=seed, split=split)
    return found


def chat_frame(tokenizer: Any, frame: Frame) -> Frame:
    """Put a model's chat template around a frame: history and question are one user's message.

    Args:
        tokenizer: The model's tokenizer.
        frame: The frame within the message.

    Raises:
        TaskError: The tokenizer has no chat template, or the template changes messages, so that a
            history and its questions have no texts of their own.
    """
    if not has_chat_template(tokenizer):
        msg = (
            "the task asks its questions in a chat, and this model's tokenizer has no chat "
            "template; give the task the option chat=false to ask without one"
        )
        raise TaskError(msg)
    message = [{"role": "user", "content": _PLACE}]
    text = str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))
    before, place, after = text.partition(_PLACE)
    if not place or _PLACE in after:
        msg = (
            "the chat template of this model's tokenizer does not contain a user's message once "
            "as it is; give the task the option chat=false to ask without one"
        )
        raise TaskError(msg)
    return attrs.evolve(
        frame,
        opening=before + frame.opening,
        closing=frame.closing + after,
        has_special_tokens=True,
    )


_PLACE = "the-message"


def examples_of(
    conversations: Sequence[Conversation],
    frame: Frame,
    n: int,
    *,
    chat: bool = False,
    facets: Mapping[str, int | str] | None = None,
) -> list[Example]:
    """The first ``n`` questions of conversations as examples with whole prompts.

    Args:
        conversations: The conversations.
        frame: What stands around history and question.
        n: Number of examples.
        chat: Whether each prompt is a user's message, see `Example`.
        facets: Facets of all examples, such as the length; by default the number of utterances.
    """
    examples: list[Example] = []
    for conversation in conversations:
        for question in conversation.questions[: n - len(examples)]:
            found: dict[str, int | str] = {"topic": question.topic} if question.topic else {}
            distance = conversation.distance(question)
            if distance is not None:
                found["distance"] = distance
            found.update(facets or {"length": len(conversation.utterances)})
            prompt = frame.prompt(conversation, question)
            examples.append(
                Example(
                    index=len(examples),
                    prompt=prompt,
                    answer=question.answer,
                    facets=found,
                    chat=chat,
                )
            )
    return examples


def read_conversations(path: str | Path) -> list[Conversation]:
    """Read a file of conversations, in the form of this module's docstring.

    Args:
        path: A file of JSON lines (``.jsonl``), or of a list (``.json``).

    Raises:
        TaskError: The file cannot be read, or an entry is not a conversation.
    """
    if Path(path).suffix not in (".jsonl", ".json"):
        msg = f"conversations are read from a .jsonl or .json file, not from '{path}'"
        raise TaskError(msg)
    rows = read_rows(str(path))
    if not len(rows):
        msg = f"'{path}' holds no conversations"
        raise TaskError(msg)
    return [_read(row, index, f"conversation {index + 1} of {path}") for index, row in _all(rows)]


def _all(rows: Sequence[Row]) -> Sequence[tuple[int, Row]]:
    return [(index, rows[index]) for index in range(len(rows))]


def _read(row: Row, index: int, where: str) -> Conversation:
    utterances = _texts(row, "utterances", where)
    topics = _texts(row, "topics", where) if "topics" in row else ()
    if not utterances:
        msg = f"{where} has no utterances; expected at least one"
        raise TaskError(msg)
    if topics and len(topics) != len(utterances):
        msg = (
            f"{where} has {len(topics)} topics for {len(utterances)} utterances; expected one "
            "for each, or none at all"
        )
        raise TaskError(msg)
    questions = row.get("questions")
    if not isinstance(questions, list) or not questions:
        msg = f"{where} has no list 'questions' with at least one question"
        raise TaskError(msg)
    return Conversation(
        index=index,
        utterances=utterances,
        questions=tuple(_read_question(one, where) for one in questions),
        topics=topics,
    )


def _texts(row: Row, key: str, where: str) -> tuple[str, ...]:
    texts = row.get(key)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        msg = f"{where} has no list '{key}' of texts"
        raise TaskError(msg)
    return tuple(texts)


def _read_question(value: object, where: str) -> Question:
    if (
        not isinstance(value, dict)
        or not isinstance(value.get("question"), str)
        or not isinstance(value.get("answer"), str | int | float)
        or not isinstance(value.get("topic", ""), str | int)
    ):
        msg = (
            f"a question of {where} is not an object with 'question', 'answer' and, if known, "
            f"'topic': {json.dumps(value, ensure_ascii=False):.80}"
        )
        raise TaskError(msg)
    return Question(value["question"], str(value["answer"]), str(value.get("topic", "")))


# Utterances of users end without white space, and a question begins a line of its own.
_LINES = Frame(joint="\n", before_question="\n")


@attrs.frozen
class ConversationFile:
    """Conversations of a file.

    Attributes:
        source: The file.
        chat: Whether history and question are wrapped in the model's chat template.
        grader: ``"contains"``: the answer occurs in the text, behind a thought if there is one, as
            whole words, whatever the case; ``"box"``: the last box contains exactly the answer.
    """

    source: str
    chat: bool = True
    grader: str = attrs.field(default=CONTAINS)

    @grader.validator
    def _check_grader(self, _: object, grader: str) -> None:
        if grader not in (CONTAINS, BOX):
            msg = f"task 'conversations' has no grader '{grader}'; there are {CONTAINS} and {BOX}"
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        return spell_fields("conversations", self)

    @property
    def metric(self) -> Graded:
        """Accuracy."""
        return Graded(self.grade)

    def frame(self, tokenizer: Any) -> Frame:
        """One utterance to a line, then the question; in the chat template unless ``chat=false``.

        Raises:
            TaskError: The tokenizer has no chat template, and ``chat`` is true.
        """
        return chat_frame(tokenizer, _LINES) if self.chat else _LINES

    def conversations(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Conversation]:
        """Draw ``n`` conversations, or all if there are fewer, in an order that the seed chooses.

        Raises:
            TaskError: The file cannot be read, or the split is not ``"test"``.
        """
        if split != "test":
            msg = f"task '{self.name}' has no {split} split; it has test"
            raise TaskError(msg)
        found = read_conversations(self.source)
        rows = draw(len(found), n, seed)
        return [attrs.evolve(found[row], index=index) for index, row in enumerate(rows)]

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Questions of the conversations, in the same order; ``n`` of them, or all."""
        # Every conversation has a question, so that n of them have enough.
        return examples_of(self.conversations(n, seed=seed, split=split), _LINES, n, chat=self.chat)

    def grade(self, text: str, example: Example) -> bool:
        """Whether the text gives the answer.

        Raises:
            GradeError: The question comes without an answer.
        """
        answer = example.answer.strip()
        if not answer:
            msg = f"question {example.index} comes without an answer"
            raise GradeError(msg)
        if self.grader == BOX:
            return extract_answer(text) == answer
        found = re.search(
            rf"(?<!\w){re.escape(answer)}(?!\w)", without_thought(text), re.IGNORECASE
        )
        return found is not None


def conversations(source: str, chat: bool = True, grader: str = CONTAINS) -> ConversationFile:
    """Your own conversations: a file of histories with questions about them."""
    return ConversationFile(source, chat, grader)
