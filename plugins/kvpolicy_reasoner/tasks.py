"""The tasks that the bundled reasoners were trained for, and retrieval on their vocabulary.

A needle is a pair of sentences, ``wax is 9. tea = wax + 4.``; the haystack around it consists of
leaf facts with other names, repeated to the given length. The question asks for the second name of
one needle, in the form that the reasoners were trained on: a chain of one step. They cannot answer
a question for a number that the prompt states (``What is wax?``), even with the full cache, since
every question of their training needed at least one step; docs/reference/tasks.md has the figures.

With several needles (``keys``), the model has to find the right one among sentences of the same
form: the multi-key test of RULER (2404.06654, section 3.1).
"""

import random
from collections.abc import Mapping, Sequence

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.task import Example, Graded, Split, spell
from kvpolicy_reasoner import REASONER, REASONER_VERBOSE
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.task import NAMES, Difficulty, Fact, derive, draw_leaf, split_of

STANDARD = "standard"

# Within what the reasoners were trained on: chains of 1 to 7 steps (6 of the second one) among
# 6 to 14 facts. No problem is in two splits, at whatever level it was drawn.
LEVELS: Mapping[str, Difficulty | None] = {
    "easy": Difficulty(min_depth=1, max_depth=2, min_facts=6, max_facts=14),
    "medium": Difficulty(min_depth=3, max_depth=4, min_facts=6, max_facts=14),
    "hard": Difficulty(min_depth=5, max_depth=6, min_facts=10, max_facts=14),
    STANDARD: None,
}


@attrs.frozen
class ReasonerTask:
    """A reasoner's problems; the last box of a right text holds the answer.

    Attributes:
        reasoner: Which reasoner's problems.
        level: A name in `LEVELS`; ``"standard"`` mixes those that the reasoner was made for.
    """

    reasoner: str
    level: str = attrs.field(default=STANDARD)

    @level.validator
    def _check_level(self, _: object, level: str) -> None:
        if level not in LEVELS:
            msg = f"task '{self.reasoner}' has no level '{level}'; there are {', '.join(LEVELS)}"
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        return spell(self.reasoner, {"level": self.level}, {"level": STANDARD})

    @property
    def measure(self) -> Graded:
        """Right answers."""
        return Graded(self.grade)

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Draw ``n`` problems of a split; no problem is in two of them."""
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
        """Tell whether the last box of ``text`` holds the answer."""
        return extract_answer(text) == item.answer


def reasoner(level: str = STANDARD) -> ReasonerTask:
    """Follow a chain of sums through shuffled facts: what `reasoner` was trained for."""
    return ReasonerTask(REASONER, level)


def reasoner_verbose(level: str = STANDARD) -> ReasonerTask:
    """The same questions, answered with many doubts: what `reasoner-verbose` was trained for."""
    return ReasonerTask(REASONER_VERBOSE, level)


# Tokens of the reasoners' tokenizer: one per word, number and mark.
_FRAME = 8  # <|user|>, " What is tea?", <|assistant|><think> and the line break
_NEEDLE = 10
_LEAF = 4

LENGTH = 300
KEYS = 8
MAX_KEYS = (len(NAMES) - 1) // 2  # two names each, and one at least for the haystack
_CONSTANTS = range(1, 10)
_NUM_PLACES = 4


@attrs.frozen
class Retrieval:
    """Needles in a haystack; the last box of a right text holds the number asked for.

    Attributes:
        family: What the user types.
        length: Tokens of a prompt, by the reasoners' tokenizer; up to three fewer, since facts
            are not cut.
        keys: Needles in the haystack, one of which is asked for.
    """

    family: str
    length: int
    keys: int

    def __attrs_post_init__(self) -> None:
        if not 1 <= self.keys <= MAX_KEYS:
            msg = f"task '{self.family}' was given keys={self.keys}; 1 to {MAX_KEYS} are wanted"
            raise TaskError(msg)
        least = _FRAME + _NEEDLE * self.keys + _LEAF
        if self.length < least:
            msg = (
                f"task '{self.family}' was given length={self.length}; {self.keys} keys and a "
                f"haystack take at least {least} tokens"
            )
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        usual = {"length": LENGTH, "keys": 1 if self.family == "needle" else KEYS}
        return spell(self.family, {"length": self.length, "keys": self.keys}, usual)

    @property
    def measure(self) -> Graded:
        """Right answers."""
        return Graded(self.grade)

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Draw ``n`` haystacks of a split; no prompt is in two of them."""
        rng = random.Random(f"{self.family} {self.length} {self.keys} {split} {seed}")
        items: dict[str, Example] = {}
        while len(items) < n:
            item = self._draw(rng, len(items))
            if split_of(item.prompt) == split:
                items.setdefault(item.prompt, item)
        return list(items.values())

    def grade(self, text: str, item: Example) -> bool:
        """Tell whether the last box of ``text`` holds the number asked for."""
        return extract_answer(text) == item.answer

    def _draw(self, rng: random.Random, index: int) -> Example:
        names = rng.sample(NAMES, len(NAMES))
        needles = [_draw_needle(rng, names.pop(), names.pop()) for _ in range(self.keys)]
        leaves = [draw_leaf(rng, name) for name in names]
        num_leaves = (self.length - _FRAME - _NEEDLE * self.keys) // _LEAF
        sentences = [rng.choice(leaves).text for _ in range(num_leaves)]
        # Needles come whole and in no order, wherever there is a gap between two facts.
        gaps = sorted(rng.randint(0, num_leaves) for _ in needles)
        for gap, (leaf, derived) in zip(reversed(gaps), needles, strict=True):
            sentences.insert(gap, leaf.text + derived.text)
        asked = rng.randrange(self.keys)
        text, before = "".join(sentences), needles[asked][0].text
        place = text.index(before) / len(text)
        return Example(
            index=index,
            prompt=f"<|user|>{text} What is {needles[asked][1].name}?<|assistant|><think>\n\n",
            answer=str(needles[asked][1].value),
            facets={
                "length": self.length,
                "keys": self.keys,
                "quarter": 1 + int(_NUM_PLACES * place),
            },
        )


def _draw_needle(rng: random.Random, leaf_name: str, name: str) -> tuple[Fact, Fact]:
    leaf = draw_leaf(rng, leaf_name)
    derived = derive(rng, name, leaf, [(n, n) for n in _CONSTANTS])
    assert derived is not None, "one of +1 and -1 always fits"
    return leaf, derived


def needle(length: int = LENGTH) -> Retrieval:
    """Find one needle in a haystack of facts."""
    return Retrieval("needle", length, 1)


def multikey(length: int = LENGTH, keys: int = KEYS) -> Retrieval:
    """Find the needle that is asked for among several of the same form."""
    return Retrieval("multikey", length, keys)
