"""The problems of the bundled reasoners, at chosen difficulty."""

from collections.abc import Mapping, Sequence

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.task import Example, Graded, Split, spell
from kvpolicy_reasoner import REASONER, REASONER_VERBOSE
from kvpolicy_reasoner.facts import Difficulty
from kvpolicy_reasoner.problems import problems_of

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
