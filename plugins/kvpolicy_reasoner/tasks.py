"""The training tasks of the bundled reasoners, and retrieval tasks with their vocabulary.

A needle is a pair of sentences, ``wax is 9. tea = wax + 4.``; the haystack around it consists of
leaf facts with other names, repeated up to the given length. The question asks for the second name
of one needle, in the form of the training data: a chain of one step. The reasoners cannot answer a
question about a number stated in the prompt (``What is wax?``), even with the full cache, because
every training question needed at least one step; docs/reference/tasks.md has the figures.

With several needles (``keys``), the model must select one among sentences of the same form: the
multi-key test of RULER (2404.06654, section 3.1).
"""

import random
from collections.abc import Mapping, Sequence

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.task import Example, Graded, Split, spell
from kvpolicy_reasoner import REASONER, REASONER_VERBOSE, SMOLLM2_REASONER
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.task import NAMES, Difficulty, Fact, derive, draw_leaf, split_of

STANDARD = "standard"
NEEDLE = "reasoner-needle"
MULTIKEY = "multikey"

# A reasoner's task has those levels that are within the ranges of its training. No problem is in
# two splits, whatever its level.
LEVELS: Mapping[str, Difficulty | None] = {
    "easy": Difficulty(min_depth=1, max_depth=2, min_facts=6, max_facts=14),
    "medium": Difficulty(min_depth=3, max_depth=4, min_facts=6, max_facts=14),
    "hard": Difficulty(min_depth=5, max_depth=6, min_facts=10, max_facts=14),
    "long": Difficulty(min_depth=8, max_depth=10, min_facts=12, max_facts=16),
    STANDARD: None,
}


def levels_of(reasoner: str) -> list[str]:
    """The levels of a reasoner's task.

    Args:
        reasoner: Name of the reasoner.
    """
    longest = problems_of(reasoner).max_depth
    return [name for name, level in LEVELS.items() if level is None or level.max_depth <= longest]


@attrs.frozen
class ReasonerTask:
    """A reasoner's problems; an answer is correct if its last box contains the expected number.

    Attributes:
        reasoner: Name of the reasoner.
        level: A name of `levels_of`; ``"standard"`` is the reasoner's standard difficulty.
    """

    reasoner: str
    level: str = attrs.field(default=STANDARD)

    @level.validator
    def _check_level(self, _: object, level: str) -> None:
        if level not in levels_of(self.reasoner):
            choices = ", ".join(levels_of(self.reasoner))
            msg = f"task '{self.reasoner}' has no level '{level}'; choose one of {choices}"
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        return spell(self.reasoner, {"level": self.level}, {"level": STANDARD})

    @property
    def metric(self) -> Graded:
        """Accuracy."""
        return Graded(self.grade)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Generate ``n`` problems of a split; no problem is in two splits."""
        difficulty = LEVELS[self.level]
        drawn = problems_of(self.reasoner).draw(n, seed=seed, split=split, difficulty=difficulty)
        return [
            Example(
                index=index,
                prompt=problem.prompt,
                answer=problem.answer,
                facets=problem.facets,
                reference=problem.trace,
            )
            for index, problem in enumerate(drawn)
        ]

    def grade(self, text: str, item: Example) -> bool:
        """Whether the last box of ``text`` contains the expected answer."""
        return extract_answer(text) == item.answer


def reasoner(level: str = STANDARD) -> ReasonerTask:
    """Follow a chain of sums through shuffled facts; the training task of `reasoner`."""
    return ReasonerTask(REASONER, level)


def reasoner_verbose(level: str = STANDARD) -> ReasonerTask:
    """The same questions with many re-checks; the training task of `reasoner-verbose`."""
    return ReasonerTask(REASONER_VERBOSE, level)


def smollm2_reasoner(level: str = STANDARD) -> ReasonerTask:
    """The questions of `reasoner` as turns of SmolLM2's chat; the training task of its adapter."""
    return ReasonerTask(SMOLLM2_REASONER, level)


# Tokens of the reasoners' tokenizer: one per word, number and mark.
_FRAME_TOKENS = 8  # <|user|>, " What is tea?", <|assistant|><think> and the line break
_NEEDLE_TOKENS = 10
_LEAF_TOKENS = 4

LENGTH = 300
KEYS = 8
MAX_KEYS = (len(NAMES) - 1) // 2  # two names each, and at least one name for the haystack
_CONSTANTS = range(1, 10)
_NUM_QUARTERS = 4


@attrs.frozen
class Retrieval:
    """Needles in a haystack; an answer is correct if its last box contains the needle's value.

    Attributes:
        family: Name of the task without options.
        length: Tokens of a prompt, by the reasoners' tokenizer; up to three fewer, because facts
            are not truncated.
        keys: Needles in the haystack; the question is about one of them.
    """

    family: str
    length: int
    keys: int

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.keys <= MAX_KEYS:
            msg = f"task '{self.family}' got keys={self.keys}; expected 1 to {MAX_KEYS}"
            raise TaskError(msg)
        least = _FRAME_TOKENS + _NEEDLE_TOKENS * self.keys + _LEAF_TOKENS
        if self.length < least:
            msg = (
                f"task '{self.family}' got length={self.length}; expected at least {least} tokens "
                f"for {self.keys} keys and a haystack"
            )
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        defaults = {"length": LENGTH, "keys": 1 if self.family == NEEDLE else KEYS}
        return spell(self.family, {"length": self.length, "keys": self.keys}, defaults)

    @property
    def metric(self) -> Graded:
        """Accuracy."""
        return Graded(self.grade)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Generate ``n`` haystacks of a split; no prompt is in two splits."""
        # A haystack with one needle is the same under both names.
        family = "needle" if self.keys == 1 else "multikey"
        rng = random.Random(f"{family} {self.length} {self.keys} {split} {seed}")
        items: dict[str, Example] = {}
        while len(items) < n:
            item = self._draw(rng, len(items))
            if split_of(item.prompt) == split:
                items.setdefault(item.prompt, item)
        return list(items.values())

    def grade(self, text: str, item: Example) -> bool:
        """Whether the last box of ``text`` contains the expected number."""
        return extract_answer(text) == item.answer

    def _draw(self, rng: random.Random, index: int) -> Example:
        names = rng.sample(NAMES, len(NAMES))
        needles = [_draw_needle(rng, names.pop(), names.pop()) for _ in range(self.keys)]
        leaves = [draw_leaf(rng, name) for name in names]
        num_leaves = (self.length - _FRAME_TOKENS - _NEEDLE_TOKENS * self.keys) // _LEAF_TOKENS
        sentences = [rng.choice(leaves).text for _ in range(num_leaves)]
        # Needles are inserted whole between facts, in random order.
        gaps = sorted(rng.randint(0, num_leaves) for _ in needles)
        for gap, (leaf, derived) in zip(reversed(gaps), needles, strict=True):
            sentences.insert(gap, leaf.text + derived.text)
        asked = rng.randrange(self.keys)
        text, needle_start = "".join(sentences), needles[asked][0].text
        depth = text.index(needle_start) / len(text)
        return Example(
            index=index,
            prompt=f"<|user|>{text} What is {needles[asked][1].name}?<|assistant|><think>\n\n",
            answer=str(needles[asked][1].value),
            facets={
                "length": self.length,
                "keys": self.keys,
                "quarter": 1 + int(_NUM_QUARTERS * depth),
            },
        )


def _draw_needle(rng: random.Random, leaf_name: str, name: str) -> tuple[Fact, Fact]:
    leaf = draw_leaf(rng, leaf_name)
    derived = derive(rng, name, leaf, [(n, n) for n in _CONSTANTS])
    assert derived is not None, "one of +1 and -1 always fits"
    return leaf, derived


def reasoner_needle(length: int = LENGTH) -> Retrieval:
    """Find one needle in a haystack of facts, in the language of the bundled reasoners."""
    return Retrieval(NEEDLE, length, 1)


def multikey(length: int = LENGTH, keys: int = KEYS) -> Retrieval:
    """Find one needle among several of the same form, in the language of the reasoners."""
    return Retrieval(MULTIKEY, length, keys)
