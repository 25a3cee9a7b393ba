"""Problem sets of the bundled reasoners by name. Generating problems needs no model."""

import difflib
import random
from collections.abc import Callable

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.task import Split
from kvpolicy_reasoner import REASONER, REASONER_VERBOSE, SMOLLM2_REASONER, chat, task, verbose
from kvpolicy_reasoner.task import Difficulty, Problem


@attrs.frozen
class ProblemSet:
    """The problems of one reasoner.

    Attributes:
        name: The reasoner's name.
        make: Generates one problem.
        standard: Difficulty of the problems used for reported results.
        max_depth: Longest chain that the reasoner was trained on.
        max_new_tokens: Generation limit with which the reasoner is evaluated; no trace is as long.
    """

    name: str
    make: Callable[[random.Random, Difficulty], Problem]
    standard: Difficulty
    max_depth: int
    max_new_tokens: int

    def draw(
        self, n: int, *, seed: int, split: Split = "test", difficulty: Difficulty | None = None
    ) -> list[Problem]:
        """Generate distinct problems of a split; equal arguments give equal problems.

        Args:
            n: Number of problems.
            seed: Random seed for the problems.
            split: ``"test"`` for reported results, ``"tune"`` for choosing settings, ``"train"``
                for training.
            difficulty: Ranges of depth and number of facts; the standard ranges if not given.

        Returns:
            ``n`` problems with ``n`` different prompts. The first ``k`` of them equal those
            returned for ``n=k``.

        Raises:
            KVPolicyError: ``n`` is negative, or the split does not exist.
        """
        difficulty = self.standard if difficulty is None else difficulty
        return task.make_problems(n, seed=seed, split=split, difficulty=difficulty, make=self.make)


_SETS = {
    problems.name: problems
    for problems in (
        ProblemSet(REASONER, task.make_problem, task.STANDARD, 7, 700),
        ProblemSet(REASONER_VERBOSE, verbose.make_verbose_problem, verbose.STANDARD, 6, 1300),
        ProblemSet(SMOLLM2_REASONER, chat.make_chat_problem, task.STANDARD, 10, 1200),
    )
}


def problems_of(name: str) -> ProblemSet:
    """Look up the problem set of a bundled reasoner.

    Args:
        name: Name of the reasoner.

    Returns:
        Its problem set.

    Raises:
        KVPolicyError: The reasoner does not exist.
    """
    if name not in _SETS:
        near = difflib.get_close_matches(name, _SETS)
        hint = f"did you mean {near[0]}? " if near else ""
        msg = f"there is no bundled reasoner {name!r}; {hint}choose {' or '.join(_SETS)}"
        raise KVPolicyError(msg)
    return _SETS[name]
