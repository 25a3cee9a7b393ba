"""How much a trace re-checks: a latent verbosity, visible features, and the trace so far.

Every chance is the logistic of a sum: where the document stands, what can be seen in the step,
and how large a share of the steps before was re-checked, so that re-checking feeds on itself.
Nothing is a flat coin: greedy decoding takes the likelier branch, and would then always or never
re-check.
"""

import math
import random
from typing import Literal

Verbosity = Literal["terse", "normal", "verbose"]

VERBOSITIES: tuple[Verbosity, ...] = ("terse", "normal", "verbose")

_BASE: dict[Verbosity, float] = {"terse": -1.2, "normal": 0.1, "verbose": 1.1}
_FEEDBACK = 2.0
_FEW_FACTS, _MANY_FACTS = 10, 13
_SHARES = {"few": (70, 25, 5), "some": (15, 70, 15), "many": (5, 25, 70)}


def draw_verbosity(rng: random.Random, num_facts: int) -> Verbosity:
    """Draw how verbose a document is; the number of its facts makes one level likely.

    Args:
        rng: Source of all randomness.
        num_facts: Facts in the prompt.

    Returns:
        The verbosity.
    """
    size = "few" if num_facts < _FEW_FACTS else "some" if num_facts < _MANY_FACTS else "many"
    (verbosity,) = rng.choices(VERBOSITIES, weights=_SHARES[size])
    return verbosity


class Mood:
    """What decides on the next re-check: the verbosity and the re-checks so far."""

    def __init__(self, rng: random.Random, verbosity: Verbosity) -> None:
        """Start a trace.

        Args:
            rng: Source of all randomness.
            verbosity: Where the document stands.
        """
        self._rng = rng
        self._base = _BASE[verbosity]
        self._steps = 0
        self._checked = 0

    def note(self, *, checked: bool) -> None:
        """Take note of a step that is over.

        Args:
            checked: Whether it was re-checked.
        """
        self._steps += 1
        self._checked += checked

    def wants(self, evidence: float) -> bool:
        """Draw whether to re-check.

        Args:
            evidence: What visible features add to the logit.

        Returns:
            True for a re-check.
        """
        share = self._checked / self._steps if self._steps else 0.5
        logit = self._base + evidence + _FEEDBACK * (share - 0.5)
        return self._rng.random() < 1 / (1 + math.exp(-logit))
