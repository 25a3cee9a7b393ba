"""Conversations for the bundled reasoners: topics are left and returned to, then asked about.

A topic is a group of names of its own. A visit of a topic consists of utterances about its names:
pairs of leaf facts, ``wax is 9. oak is 3.``, and needles, ``wax is 9. tea = wax + 4.``, whose
second name is asked for, as in `kvpolicy_reasoner.tasks`. Every topic is visited twice, and no
two visits in a row have the same topic; each needle is told once, in one of the two visits.

Each question asks for another needle, and about another topic than the question before. The topic
of a question is thus left for up to ``topics - 1`` visits of others when the history ends.
"""

import random
from collections.abc import Sequence
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.conversation import Conversation, Frame, Question, examples_of
from kvpolicy.lab.tasks.task import Example, Graded, Split, spell
from kvpolicy_reasoner.task import CONSTANTS, NAMES, Fact, derive, draw_leaf, split_of

TOPICS = 4
LENGTH = 352
QUESTIONS = 8

_VISITS = 2  # of each topic
_NEEDLES = 3  # of each topic
_MIN_UTTERANCES = 2  # of a visit: at most two needles are told in one
MAX_TOPICS = len(NAMES) // (2 * _NEEDLES + 2)  # two leaves at least, beside the needles

# Tokens of the reasoners' tokenizer: one per word, number and mark.
_FRAME_TOKENS = 8  # <|user|>, " What is tea?", <|assistant|><think> and the line break
_LEAF_PAIR_TOKENS = 8
_MORE_TOKENS_OF_NEEDLE = 2

_FRAME = Frame(opening="<|user|>", closing="<|assistant|><think>\n\n")


@attrs.frozen
class ReasonerConversations:
    """Conversations about groups of names; correct if the last box contains the needle's value.

    Attributes:
        topics: Number of topics.
        length: Tokens of a prompt, by the reasoners' tokenizer; up to seven fewer, because
            utterances are not truncated.
        questions: Questions of each conversation.
    """

    topics: int = TOPICS
    length: int = LENGTH
    questions: int = QUESTIONS

    def __attrs_post_init__(self) -> None:
        if not 2 <= self.topics <= MAX_TOPICS:
            msg = f"task 'conversation' got topics={self.topics}; expected 2 to {MAX_TOPICS}"
            raise TaskError(msg)
        needles = self.topics * _NEEDLES
        if not 1 <= self.questions <= needles:
            msg = (
                f"task 'conversation' got questions={self.questions}; expected 1 to {needles}, "
                f"which is {_NEEDLES} for each topic"
            )
            raise TaskError(msg)
        least = self._fixed_tokens + _LEAF_PAIR_TOKENS * _MIN_UTTERANCES * self._num_visits
        if self.length < least:
            msg = (
                f"task 'conversation' got length={self.length}; expected at least {least} tokens "
                f"for {self.topics} topics"
            )
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        defaults = {"topics": TOPICS, "length": LENGTH, "questions": QUESTIONS}
        return spell("conversation", attrs.asdict(self), defaults)

    @property
    def metric(self) -> Graded:
        """Accuracy."""
        return Graded(self.grade)

    def frame(self, tokenizer: Any) -> Frame:
        """The form of the reasoners' training prompts."""
        return _FRAME

    def conversations(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Conversation]:
        """Generate ``n`` conversations of a split; no history is in two splits."""
        rng = random.Random(f"conversation {self.topics} {self.length} {split} {seed}")
        found: dict[str, Conversation] = {}
        while len(found) < n:
            conversation = self._draw(rng, len(found))
            history = _FRAME.history(conversation)
            if split_of(history) == split:
                found.setdefault(history, conversation)
        return list(found.values())

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """The questions of the conversations in order, with whole prompts, ``n`` of them."""
        num_conversations = -(-n // self.questions)
        drawn = self.conversations(num_conversations, seed=seed, split=split)
        return examples_of(drawn, _FRAME, n, facets={"length": self.length})

    def grade(self, text: str, item: Example) -> bool:
        """Whether the last box of ``text`` contains the expected number."""
        return extract_answer(text) == item.answer

    @property
    def _num_visits(self) -> int:
        return _VISITS * self.topics

    @property
    def _fixed_tokens(self) -> int:
        return _FRAME_TOKENS + _MORE_TOKENS_OF_NEEDLE * _NEEDLES * self.topics

    def _draw(self, rng: random.Random, index: int) -> Conversation:
        names = rng.sample(NAMES, len(NAMES))
        size = len(NAMES) // self.topics
        groups = [names[start : start + size] for start in range(0, size * self.topics, size)]
        topics = [_Topic.draw(rng, group) for group in groups]
        num_utterances = (self.length - self._fixed_tokens) // _LEAF_PAIR_TOKENS
        # Visits are equally long; what cannot be divided makes the first ones longer by one.
        each, more = divmod(num_utterances, self._num_visits)
        utterances: list[str] = []
        labels: list[str] = []
        for number, topic in enumerate(_in_turns(rng, self.topics, self._num_visits)):
            visit = number // self.topics
            said = topics[topic].visit(rng, visit, each + (number < more))
            utterances += said
            labels += [str(topic)] * len(said)
        return Conversation(
            index=index,
            utterances=tuple(utterances),
            questions=tuple(self._ask(rng, topics)),
            topics=tuple(labels),
        )

    def _ask(self, rng: random.Random, topics: "Sequence[_Topic]") -> list[Question]:
        """All needles are put in an order, so that fewer questions are the first of more."""
        waiting = [rng.sample(topic.needles, _NEEDLES) for topic in topics]
        turns = _in_turns(rng, self.topics, self.topics * _NEEDLES)
        asked = [(topic, waiting[topic].pop()) for topic in turns]
        return [
            Question(f" What is {needle.name}?", str(needle.value), str(topic))
            for topic, (_, needle) in asked[: self.questions]
        ]


@attrs.frozen
class _Topic:
    """A group of names: needles, the visit in which each is told, and leaf facts."""

    needles: list[tuple[Fact, Fact]]
    told_in: list[int]
    leaves: list[Fact]

    @classmethod
    def draw(cls, rng: random.Random, names: list[str]) -> "_Topic":
        needles = []
        for first in range(0, 2 * _NEEDLES, 2):
            leaf = draw_leaf(rng, names[first])
            derived = derive(rng, names[first + 1], leaf, [(n, n) for n in CONSTANTS])
            assert derived is not None, "one of +1 and -1 always fits"
            needles.append((leaf, derived))
        # In every visit at least one is told.
        told_in = [*range(_VISITS), *(rng.randrange(_VISITS) for _ in range(_NEEDLES - _VISITS))]
        rng.shuffle(told_in)
        return cls(needles, told_in, [draw_leaf(rng, name) for name in names[2 * _NEEDLES :]])

    def visit(self, rng: random.Random, number: int, num_utterances: int) -> list[str]:
        """The utterances of a visit in random order."""
        said = [
            leaf.text + derived.text
            for (leaf, derived), told_in in zip(self.needles, self.told_in, strict=True)
            if told_in == number
        ]
        while len(said) < num_utterances:
            said.append("".join(fact.text for fact in rng.sample(self.leaves, 2)))
        rng.shuffle(said)
        return said


def _in_turns(rng: random.Random, num_topics: int, n: int) -> list[int]:
    """Rounds of all topics in random order, ``n`` in all; no two in a row are the same."""
    turns: list[int] = []
    while len(turns) < n:
        order = rng.sample(range(num_topics), num_topics)
        if not turns or turns[-1] != order[0]:
            turns += order
    return turns


def conversation(
    topics: int = TOPICS, length: int = LENGTH, questions: int = QUESTIONS
) -> ReasonerConversations:
    """A long conversation and questions about its topics, in the language of the reasoners."""
    return ReasonerConversations(topics, length, questions)
