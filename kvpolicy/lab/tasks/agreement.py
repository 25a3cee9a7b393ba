"""Agreement with the full cache, for models and prompts without a task.

The model under a plan is led along the answer of the same model with the full cache, through
the engine and in one regime, as in `kvpolicy.lab.tasks.perplexity`.
"""

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvpolicy.engine.results import Result
from kvpolicy.lab.tasks.measures import Asked, Column, Outcome, Trial, mean_of

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.request import Request
    from kvpolicy.engine.run import Run
    from kvpolicy.engine.sequence import LiveSequence

# Values of an outcome.
MATCH = "match"
KL = "kl"
FIRST_DIFFERENCE = "first_difference"


@attrs.frozen
class Agreement:
    """How far a model under a plan agrees with the same model and the full cache.

    The model with the full cache answers greedily; the same model under the plan is led along
    that answer, and asked at every token what it would have said. No answer has to be known.

    * ``match``: share of the tokens at which both find the same one likeliest;
    * ``kl``: mean over the tokens of the divergence of the plan's distribution of the next
      token from the full cache's, ``KL(full || plan)``, in nats;
    * ``first_difference``: tokens before the first at which they part, which is as far as the
      plan's own greedy text would be the same; all tokens, if they never part.

    The full cache's side is computed beside each cell, token by token as it is needed: no
    distributions are stored, whatever the size of the vocabulary. It holds the rows of as many
    sequences as there are slots.
    """

    name: str = attrs.field(default="agreement", init=False)
    reads_reference: bool = attrs.field(default=False, init=False)
    runs_code: bool = attrs.field(default=False, init=False)

    @property
    def columns(self) -> Sequence[Column]:
        """Matching tokens, divergence, and where texts part."""
        return (
            mean_of(MATCH, "same token", "Tokens that match the full cache's", is_share=True),
            mean_of(KL, "KL, nats", "KL from the full cache, nats per token"),
            mean_of(FIRST_DIFFERENCE, "parts after", "Tokens before the first difference"),
        )

    def begin(self, engine: "Engine", asked: Sequence[Asked]) -> Trial:
        """Lead every sequence along what the full cache says."""
        from kvpolicy.engine.engine import Engine
        from kvpolicy.engine.request import Sampling
        from kvpolicy.engine.run import Run
        from kvpolicy.plan.plan import Plan

        requests = [attrs.evolve(one.request, sampling=Sampling()) for one in asked]
        model, tokenizer = engine.adapter.model, engine.tokenizer
        full = Engine(model, tokenizer, Plan.uniform("full"), slots=engine.num_slots)
        guide = _Guide(full, requests)
        return _AgreementTrial(Run(engine, requests, guide.draw), guide)


class _Guide:
    """Leads sequences along the greedy answers of the full cache, and compares as they go."""

    def __init__(self, full: "Engine", requests: "Sequence[Request]") -> None:
        from kvpolicy.engine.run import Run

        self._said: dict[int, deque[tuple[int, Tensor]]] = defaultdict(deque)
        self._full = Run(full, requests, self._say)
        self.matches: dict[int, list[bool]] = defaultdict(list)
        self.kl: dict[int, float] = defaultdict(float)

    def draw(self, sequences: "Sequence[LiveSequence]", logits: "Tensor") -> list[int]:
        ours = _log_probs(logits)
        tokens = []
        for served, log_probs in zip(sequences, ours, strict=True):
            token, theirs = self._next(served.id)
            tokens.append(token)
            self.matches[served.id].append(int(log_probs.argmax()) == token)
            # A token that the full cache rules out (its logit is -inf) adds nothing.
            terms = theirs.exp() * (theirs - log_probs)
            self.kl[served.id] += float(terms[theirs > -math.inf].sum())
        return tokens

    def _next(self, number: int) -> "tuple[int, Tensor]":
        """What the full cache says next in a sequence; it goes on until it has."""
        while not self._said[number]:
            assert not self._full.done, "both sides end a sequence at the same token"
            self._full.step()
        return self._said[number].popleft()

    def _say(self, sequences: "Sequence[LiveSequence]", logits: "Tensor") -> list[int]:
        log_probs = _log_probs(logits)
        tokens: list[int] = log_probs.argmax(dim=-1).tolist()
        for served, token, row in zip(sequences, tokens, log_probs, strict=True):
            self._said[served.id].append((token, row))
        return tokens


@attrs.frozen
class _AgreementTrial:
    run: "Run"
    guide: _Guide

    def outcome(self, result: Result) -> Outcome:
        if result.finish_reason == "error":
            return Outcome(result)
        matches = self.guide.matches.pop(result.id)
        values: Mapping[str, float] = {
            MATCH: sum(matches) / len(matches),
            KL: self.guide.kl.pop(result.id) / len(matches),
            FIRST_DIFFERENCE: float(matches.index(False) if False in matches else len(matches)),
        }
        return Outcome(result, values=values)


def _log_probs(logits: "Tensor") -> "Tensor":
    return logits.float().log_softmax(dim=-1)
