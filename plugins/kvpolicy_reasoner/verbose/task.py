"""The second reasoner's task: the first one's questions, with longer and doubting traces."""

import random

import attrs

from kvpolicy_reasoner.facts import Difficulty
from kvpolicy_reasoner.task import Problem, write_prompt
from kvpolicy_reasoner.verbose.facts import draw_sheet_with_side_steps
from kvpolicy_reasoner.verbose.pieces import Piece, join
from kvpolicy_reasoner.verbose.trace import write_pieces
from kvpolicy_reasoner.verbose.verbosity import Verbosity, draw_verbosity

STANDARD = Difficulty(min_depth=3, max_depth=6, min_facts=6, max_facts=14)


@attrs.frozen
class VerboseProblem(Problem):
    """One question with its reference trace.

    Attributes:
        verbosity: How much the reference trace re-checks.
        pieces: The trace as it was written, with the weights of its tokens.
    """

    verbosity: Verbosity
    pieces: tuple[Piece, ...] = attrs.field(repr=False)

    @property
    def facets(self) -> dict[str, int | str]:
        """What a report may group by."""
        return {**super().facets, "verbosity": self.verbosity}


def make_verbose_problem(rng: random.Random, difficulty: Difficulty = STANDARD) -> VerboseProblem:
    """Draw one problem, whichever split it falls into.

    Args:
        rng: Source of all randomness.
        difficulty: Ranges of depth and number of facts.

    Returns:
        The problem.
    """
    sheet = draw_sheet_with_side_steps(rng, difficulty)
    prompt = write_prompt(rng, sheet)
    verbosity = draw_verbosity(rng, len(sheet.facts))
    pieces = write_pieces(rng, sheet, verbosity)
    return VerboseProblem(
        prompt=prompt,
        trace=join(pieces),
        answer=str(sheet.chain[-1].value),
        depth=len(sheet.chain) - 1,
        num_facts=len(sheet.facts),
        verbosity=verbosity,
        pieces=tuple(pieces),
    )
