"""Perplexity under eviction: a sequence is led along a given text.

The engine serves such a sequence as it serves any other: the prompt enters in the same chunks,
every further token in a decode step of its own, compactions fall where they would fall if the
model had written the text, and slots are shared in the same way. So plans are compared in one
regime, the full cache among them; a forward over the whole text at once would be another one,
in which nothing is evicted before the end.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.engine.results import Result
from kvpolicy.errors import TaskError
from kvpolicy.lab.statistics import Estimate, ratio
from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.tasks.measures import Asked, Column, Outcome, Trial, by_item

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.engine.engine import Engine
    from kvpolicy.engine.run import Run
    from kvpolicy.engine.sequence import LiveSequence

# Values of an outcome: the summed loss in nats, and of how many tokens.
LOSS = "loss"
NUM_SCORED = "num_scored"


def _nll_of(sample: Sample) -> float | None:
    found = sample.values
    return found[LOSS] / found[NUM_SCORED] if found.get(NUM_SCORED) else None


def _nll(samples: Sequence[Sample]) -> Estimate | None:
    texts = by_item(samples, _scored)
    if not texts:
        return None
    sums = [tuple(map(math.fsum, zip(*values, strict=True))) for values in texts]
    return ratio(*zip(*sums, strict=True))


def _scored(sample: Sample) -> tuple[float, float] | None:
    found = sample.values
    return (found[LOSS], found[NUM_SCORED]) if found.get(NUM_SCORED) else None


def _perplexity_of(sample: Sample) -> float | None:
    nll = _nll_of(sample)
    return None if nll is None else math.exp(nll)


def _perplexity(samples: Sequence[Sample]) -> Estimate | None:
    nll = _nll(samples)
    return nll and Estimate(math.exp(nll.value), math.exp(nll.low), math.exp(nll.high))


@attrs.frozen
class Perplexity:
    """Teacher forcing: how likely the model finds each token of the reference text.

    With a prompt, the tokens of the reference are scored; without one, all tokens of the
    reference but the first. ``max_new_tokens`` bounds how many are scored, and a text that is
    cut off there counts as truncated.
    """

    name: str = attrs.field(default="perplexity", init=False)
    reads_reference: bool = attrs.field(default=True, init=False)
    runs_code: bool = attrs.field(default=False, init=False)

    @property
    def columns(self) -> Sequence[Column]:
        """Mean negative log-likelihood of a token, in nats, and its exponential."""
        heading = "Negative log-likelihood, nats per token"
        return (
            Column("nll", "nats/token", heading, _nll_of, _nll, parts=_scored),
            Column(
                "perplexity",
                "perplexity",
                "Perplexity",
                _perplexity_of,
                _perplexity,
                parts=_scored,
                of_ratio=math.exp,
            ),
        )

    def begin(self, engine: "Engine", asked: Sequence[Asked]) -> Trial:
        """Lead every sequence along its reference."""
        from kvpolicy.engine.run import Run

        texts = [_given_and_scored(engine.tokenizer, one) for one in asked]
        for one, (_, scored) in zip(asked, texts, strict=True):
            if not scored:
                msg = f"text {one.item.index} of the task has no token that could be scored"
                raise TaskError(msg)
        requests = [
            # Nothing stops a text but its end: a stop token in the middle is scored as well.
            attrs.evolve(
                one.request,
                prompt=given,
                max_new_tokens=min(one.request.max_new_tokens, len(scored)),
                stop_ids=(),
            )
            for one, (given, scored) in zip(asked, texts, strict=True)
        ]
        teacher = _Teacher([scored for _, scored in texts])
        return _PerplexityTrial(Run(engine, requests, teacher.draw), teacher)


class _Teacher:
    """Draws the tokens of given texts, and notes how likely they were."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts = texts
        self.loss: dict[int, float] = defaultdict(float)

    def draw(self, sequences: "Sequence[LiveSequence]", logits: "Tensor") -> list[int]:
        tokens = [self.texts[served.id][len(served.tokens)] for served in sequences]
        losses = -logits.float().log_softmax(dim=-1)[range(len(tokens)), tokens]
        for served, loss in zip(sequences, losses.tolist(), strict=True):
            self.loss[served.id] += loss
        return tokens


@attrs.frozen
class _PerplexityTrial:
    run: "Run"
    teacher: _Teacher

    def outcome(self, result: Result) -> Outcome:
        if result.finish_reason == "error":
            return Outcome(result)
        num_scored = len(result.tokens)
        is_whole = num_scored == len(self.teacher.texts[result.id])
        result = attrs.evolve(result, finish_reason="stop" if is_whole else "length")
        values = {LOSS: self.teacher.loss.pop(result.id), NUM_SCORED: float(num_scored)}
        return Outcome(result, values=values)


def _given_and_scored(tokenizer: Any, asked: Asked) -> tuple[Any, list[int]]:
    """What is taken for granted, and the token ids that are scored."""
    reference = asked.item.reference
    assert reference is not None, "the task sees to that"
    if asked.item.prompt:
        return asked.request.prompt, tokenizer(reference, add_special_tokens=False)["input_ids"]
    ids = tokenizer(reference)["input_ids"]
    return ids[:1], ids[1:]
