"""The problems of each bundled reasoner, under its name; drawing them takes no model."""

import difflib
import random
from collections.abc import Callable

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.task import Split
from kvpolicy_reasoner import REASONER, REASONER_VERBOSE, task, verbose
from kvpolicy_reasoner.task import Difficulty, Problem


@attrs.frozen
class ProblemSet:
    """The problems of one reasoner.

    Attributes:
        name: The reasoner's name.
        make: Draws one problem.
        standard: Difficulty of the problems that are reported on.
    """

    name: str
    make: Callable[[random.Random, Difficulty], Problem]
    standard: Difficulty

    def draw(
        self, n: int, *, seed: int, split: Split = "test", difficulty: Difficulty | None = None
    ) -> list[Problem]:
        """Draw distinct problems of a split; the same arguments give the same problems.

        Args:
            n: How many problems.
            seed: Chooses the problems.
            split: ``"test"`` to report on, ``"tune"`` to choose settings on, ``"train"`` to learn
                from.
            difficulty: Ranges of depth and number of facts; the standard ones if not given.

        Returns:
            ``n`` problems with ``n`` different prompts. The first ``k`` of them are the answer to
            ``n=k``.

        Raises:
            KVPolicyError: ``n`` is negative, or there is no such split.
        """
        difficulty = self.standard if difficulty is None else difficulty
        return task.make_problems(n, seed=seed, split=split, difficulty=difficulty, make=self.make)


_SETS = {
    problems.name: problems
    for problems in (
        ProblemSet(REASONER, task.make_problem, task.STANDARD),
        ProblemSet(REASONER_VERBOSE, verbose.make_verbose_problem, verbose.STANDARD),
    )
}


def problems_of(name: str) -> ProblemSet:
    """Find the problems of a bundled reasoner.

    Args:
        name: Name of the reasoner.

    Returns:
        Its problems.

    Raises:
        KVPolicyError: There is no such reasoner.
    """
    if name not in _SETS:
        near = difflib.get_close_matches(name, _SETS)
        hint = f"did you mean {near[0]}? " if near else ""
        msg = f"no bundled reasoner named {name!r}; {hint}there are {' and '.join(_SETS)}."
        raise KVPolicyError(msg)
    return _SETS[name]
