"""How likely a model finds given continuations while rows are evicted.

A sequence is led along its continuation through the engine, as in `kvpolicy.lab.tasks.perplexity`:
the context enters as a prompt does, every further token in a decode step of its own, and
compactions fall where they would fall if the model had written the text. One forward over
context and continuation would evict nothing before its end, and say nothing about a plan.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import attrs
from torch import Tensor

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.request import Request
from kvpolicy.engine.results import Result
from kvpolicy.engine.run import Run
from kvpolicy.lab.lm_eval.journal import Answer, key_of

if TYPE_CHECKING:
    from kvpolicy.engine.sequence import LiveSequence


@attrs.frozen
class Continuation:
    """What is to be scored, and after what.

    Attributes:
        given: Token ids of the context, at least one.
        scored: Token ids of the continuation.
        task: Name of the task that asks.
    """

    given: tuple[int, ...]
    scored: tuple[int, ...]
    task: str = ""


class Score(NamedTuple):
    """Summed log-likelihood in nats, and whether greedy decoding would say the same."""

    log_likelihood: float
    is_greedy: bool


@attrs.define
class Branch:
    """Continuations of one context that part at their last token: one sequence scores them all.

    Attributes:
        task: Name of the task that asks.
        given: Token ids of the context.
        led: Token ids that they share.
        ends: Number of each continuation, and its last token.
    """

    task: str
    given: tuple[int, ...]
    led: tuple[int, ...]
    ends: list[tuple[int, int]] = attrs.field(factory=list)
    log_likelihood: float = 0.0
    is_greedy: bool = True

    @property
    def request(self) -> Request:
        """Nothing stops it but its end: a stop token in the middle is scored as well."""
        return Request(self.given, max_new_tokens=len(self.led) + 1, stop_ids=())

    def token_at(self, place: int) -> int:
        """Where the sequence is led; any of the last tokens will do at the end."""
        return self.led[place] if place < len(self.led) else self.ends[0][1]


def branches_of(continuations: Iterable[Continuation]) -> list[Branch]:
    """Put continuations together that one sequence can score; empty ones need none."""
    found: dict[object, Branch] = {}
    for number, one in enumerate(continuations):
        if one.scored:
            key = one.task, one.given, one.scored[:-1]
            found.setdefault(key, Branch(*key)).ends.append((number, one.scored[-1]))
    return list(found.values())


class Scoring:
    """Continuations being scored.

    Attributes:
        branches: What one sequence each scores.
        keys: What tells the answer of each branch from all others of a run.
        scores: Of each continuation, in their order; complete when every branch is scored.
    """

    def __init__(self, engine: Engine, continuations: Sequence[Continuation]) -> None:
        """Put the continuations together; nothing is computed yet."""
        self._engine = engine
        self._led: list[Branch] = []
        self.scores = [Score(0.0, True)] * len(continuations)
        self.branches = branches_of(continuations)
        self.keys = [
            key_of(one.given, one.led, [token for _, token in one.ends]) for one in self.branches
        ]

    def begin(self, which: Sequence[int]) -> Run:
        """Score branches; request ``i`` of the run serves branch ``which[i]``."""
        self._led = [self.branches[number] for number in which]
        return Run(self._engine, [branch.request for branch in self._led], self._draw)

    def answer(self, number: int, result: Result) -> Answer:
        """What is to be kept of a branch that has been scored."""
        scores = [self.scores[owner] for owner, _ in self.branches[number].ends]
        return Answer(result, tuple(scores))

    def recall(self, number: int, answer: Answer) -> None:
        """Take the scores of a branch from what was kept of it."""
        for (owner, _), score in zip(self.branches[number].ends, answer.scores, strict=True):
            self.scores[owner] = Score(*score)

    def _draw(self, sequences: "Sequence[LiveSequence]", logits: Tensor) -> list[int]:
        log_probs = logits.float().log_softmax(dim=-1)
        branches = [self._led[served.id] for served in sequences]
        tokens = [
            branch.token_at(len(served.tokens))
            for served, branch in zip(sequences, branches, strict=True)
        ]
        values = log_probs[range(len(tokens)), tokens].tolist()
        likeliest = log_probs.argmax(dim=-1).tolist()
        for row, (served, branch) in enumerate(zip(sequences, branches, strict=True)):
            if len(served.tokens) == len(branch.led):
                self._end(branch, log_probs[row], likeliest[row])
            else:
                branch.log_likelihood += values[row]
                branch.is_greedy = branch.is_greedy and likeliest[row] == tokens[row]
        return tokens

    def _end(self, branch: Branch, log_probs: Tensor, likeliest: int) -> None:
        for number, token in branch.ends:
            likelihood = branch.log_likelihood + float(log_probs[token])
            self.scores[number] = Score(likelihood, branch.is_greedy and likeliest == token)
