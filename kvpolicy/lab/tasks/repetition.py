"""Repetition: whether what a model writes by itself ends in a loop, and how much of it is new.

Under greedy decoding nothing but the model breaks a loop, and what a policy evicts may be what
would have broken it. No answers are needed.
"""

from collections import abc
from typing import TYPE_CHECKING

import attrs

from kvpolicy.engine.requests.results import Result
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.tasks.derived import DerivedTask, PassageTask, derived
from kvpolicy.lab.tasks.prose import PROSE
from kvpolicy.lab.tasks.task import (
    Column,
    EvalOutcome,
    EvalRequest,
    Evaluation,
    PlainMetric,
    mean_of,
    share_of,
)

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine, Run

# Values of an outcome; the last two only of an output that ends in a loop.
REPEATED = "repeated_4_grams"
LOOPS = "loops"
PERIOD = "loop_period"
START = "loop_start"

# A loop goes round so often, and has so many tokens in all.
ROUNDS = 3
LOOP_TOKENS = 16

_GRAM = 4


def repetition(of: str = PROSE, prompt_tokens: int | None = None) -> DerivedTask | PassageTask:
    """Loops and repeated 4-grams of greedy outputs, on any prompts."""
    return derived("repetition", of, Repetition(), prompt_tokens=prompt_tokens)


@attrs.frozen
class Loop:
    """The end of a sequence that repeats itself.

    Attributes:
        period: Tokens of one round.
        start: Index of the first token of the first round.
    """

    period: int
    start: int


def find_loop(tokens: abc.Sequence[int]) -> Loop | None:
    """The loop that a sequence ends in.

    The end from ``start`` on is a loop of period ``p`` if each token in it equals the one ``p``
    before, as far as that is in it, and it has at least `ROUNDS` ``* p`` tokens and `LOOP_TOKENS`.
    The last round may be incomplete.

    Args:
        tokens: The sequence.

    Returns:
        The loop with the smallest period, and with the earliest start for it.
    """
    for period in range(1, len(tokens) // ROUNDS + 1):
        start = len(tokens) - period
        while start > 0 and tokens[start - 1] == tokens[start - 1 + period]:
            start -= 1
        if len(tokens) - start >= max(ROUNDS * period, LOOP_TOKENS):
            return Loop(period, start)
    return None


def share_repeated(tokens: abc.Sequence[int], size: int = _GRAM) -> float | None:
    """The share of n-grams that occurred before: 1 - distinct n-grams / n-grams.

    It is seq-rep-n of Welleck et al. (1908.04319).

    Args:
        tokens: The sequence.
        size: Tokens of an n-gram.

    Returns:
        The share; ``None`` if there is no n-gram.
    """
    num = len(tokens) - size + 1
    if num < 1:
        return None
    return 1 - len({tuple(tokens[i : i + size]) for i in range(num)}) / num


@attrs.frozen
class Repetition(PlainMetric):
    """Loops and repeated 4-grams of the tokens that a model writes greedily.

    A stop token at the end does not count; an output that stops after a loop has ended in one. Only
    a loop has a period and a start.
    """

    name = "repetition"
    is_greedy = True

    @property
    def columns(self) -> abc.Sequence[Column]:
        """Loops, repeated 4-grams, and the periods and first tokens of loops."""
        return (
            share_of(LOOPS, "loops", "Outputs that end in a loop", more_is_better=False),
            mean_of(
                REPEATED, "4-grams again", "Repeated 4-grams", is_share=True, more_is_better=False
            ),
            mean_of(PERIOD, "period", "Period of loops, tokens", least=1),
            mean_of(START, "loop from", "Tokens before the loop", least=0, more_is_better=True),
        )

    def begin(
        self, engine: "Engine", requests: abc.Sequence[EvalRequest], shared: Shared
    ) -> Evaluation:
        """Generate greedily."""
        from kvpolicy.engine.requests.request import Sampling

        greedy = [attrs.evolve(one.request, sampling=Sampling()) for one in requests]
        return _RepetitionEvaluation(engine.generate(greedy))


@attrs.frozen
class _RepetitionEvaluation:
    run: "Run"

    def outcome(self, result: Result) -> EvalOutcome:
        if result.finish_reason == "error":
            return EvalOutcome(result)
        tokens = result.tokens[:-1] if result.finish_reason == "stop" else result.tokens
        loop, repeated = find_loop(tokens), share_repeated(tokens)
        values = {LOOPS: float(loop is not None)}
        if loop is not None:
            values |= {PERIOD: float(loop.period), START: float(loop.start)}
        if repeated is not None:
            values[REPEATED] = repeated
        return EvalOutcome(result, values=values)
