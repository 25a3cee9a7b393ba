"""Log-likelihoods of given continuations while rows are evicted.

The engine decodes each continuation as `kvpolicy.lab.tasks.likelihood` does: the context is
prefilled like any prompt, each further token takes one decode step, and compactions happen where
they would happen if the model had generated the text. A single forward over context and
continuation would evict nothing before its end, so every plan would score alike.
"""

from collections import abc
from typing import NamedTuple

import attrs
from torch import Tensor

from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.sampler import teacher_forced


@attrs.frozen
class Continuation:
    """A continuation to score.

    Attributes:
        given: Token ids of the context, at least one.
        scored: Token ids of the continuation.
        task: Name of the task it belongs to.
        shortened: Whether the context has lost its beginning.
    """

    given: tuple[int, ...]
    scored: tuple[int, ...]
    task: str = ""
    shortened: bool = False


class Score(NamedTuple):
    """Summed log-likelihood in nats, and whether greedy decoding gives the same tokens."""

    log_likelihood: float
    is_greedy: bool


@attrs.define
class Branch:
    """Continuations that differ in their last token only; one sequence scores them all.

    Attributes:
        task: Name of the task they belong to.
        given: Token ids of the context.
        shortened: Whether the context has lost its beginning.
        shared: Token ids that all continuations begin with.
        ends: Index and last token of each continuation.
        log_likelihood: Sum over the shared tokens scored so far, in nats.
        is_greedy: Whether every shared token so far was the most likely one.
    """

    task: str
    given: tuple[int, ...]
    shortened: bool
    shared: tuple[int, ...]
    ends: list[tuple[int, int]] = attrs.field(factory=list)
    log_likelihood: float = 0.0
    is_greedy: bool = True

    @property
    def request(self) -> Request:
        """The engine's request; a stop token within the continuation is scored as well."""
        return Request(self.given, max_new_tokens=len(self.shared) + 1, stop_ids=())

    def token_at(self, position: int) -> int:
        """The token to decode; at the end, any of the last tokens will do."""
        return self.shared[position] if position < len(self.shared) else self.ends[0][1]


def branches_of(continuations: abc.Iterable[Continuation]) -> list[Branch]:
    """Group continuations that one sequence can score; empty ones need no sequence."""
    found: dict[object, Branch] = {}
    for index, one in enumerate(continuations):
        if one.scored:
            key = one.task, one.given, one.shortened, one.scored[:-1]
            found.setdefault(key, Branch(*key)).ends.append((index, one.scored[-1]))
    return list(found.values())


class Scoring:
    """Scores continuations in one run of an engine.

    Attributes:
        branches: Groups of continuations; request ``i`` of the run scores ``branches[i]``.
        run: The run; iterate over it to compute the scores.
        scores: The score of each continuation. It is valid once the result of its branch has
            been yielded; an empty continuation has log-likelihood 0.
    """

    def __init__(self, engine: Engine, continuations: abc.Sequence[Continuation]) -> None:
        """Group the continuations; nothing is computed yet."""
        self.scores = [Score(0.0, True)] * len(continuations)
        self.branches = branches_of(continuations)
        self.run = Run(engine, [branch.request for branch in self.branches], self._next_tokens)

    def _next_tokens(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
        log_probs = logits.float().log_softmax(dim=-1)
        branches = [self.branches[seq.id] for seq in sequences]
        tokens = [
            branch.token_at(len(seq.tokens))
            for seq, branch in zip(sequences, branches, strict=True)
        ]
        values = log_probs[range(len(tokens)), tokens].tolist()
        likeliest = log_probs.argmax(dim=-1).tolist()
        for row, (seq, branch) in enumerate(zip(sequences, branches, strict=True)):
            if len(seq.tokens) == len(branch.shared):
                self._finish(branch, log_probs[row], likeliest[row])
            else:
                branch.log_likelihood += values[row]
                branch.is_greedy = branch.is_greedy and likeliest[row] == tokens[row]
        return teacher_forced(tokens, logits)

    def _finish(self, branch: Branch, log_probs: Tensor, likeliest: int) -> None:
        for index, token in branch.ends:
            likelihood = branch.log_likelihood + float(log_probs[token])
            self.scores[index] = Score(likelihood, branch.is_greedy and likeliest == token)
