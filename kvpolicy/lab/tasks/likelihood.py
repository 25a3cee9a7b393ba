"""Perplexity and agreement: metrics that lead the model along a given text.

The engine serves such a sequence like any other: the prompt enters in the same chunks, every
further token in a separate decode step, compactions happen where they would happen if the model
had written the text, and slots are shared in the same way. So all plans, and the full cache, are
compared under the same conditions. A single forward pass over the whole text would differ:
nothing would be evicted before the end.
"""

import math
from collections import abc, defaultdict
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.engine.requests.encoding import following
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import TaskError
from kvpolicy.lab.shared import Pieces, Shared
from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.tasks.derived import DerivedTask, PassageTask, derived
from kvpolicy.lab.tasks.prose import PROSE
from kvpolicy.lab.tasks.task import (
    Column,
    EvalOutcome,
    EvalRequest,
    Evaluation,
    PlainMetric,
    mean_of,
    ratio_of,
)

if TYPE_CHECKING:
    from torch import Tensor

    from kvpolicy.engine.engine import Engine, Run
    from kvpolicy.engine.requests.request import Request
    from kvpolicy.engine.requests.sequence import Sequence

# Values of an outcome of `Perplexity`: the summed loss in nats, and the number of tokens.
LOSS = "loss"
NUM_SCORED = "num_scored"

# Values of an outcome of `Agreement`.
MATCH = "match"
KL = "kl"
FIRST_DIFFERENCE = "first_difference"


def perplexity(
    of: str = PROSE, prompt_tokens: int | None = None, scored_tokens: int | None = None
) -> DerivedTask | PassageTask:
    """Perplexity of what follows a prompt in a text, or of another task's reference texts."""
    lengths = {"prompt_tokens": prompt_tokens, "scored_tokens": scored_tokens}
    return derived("perplexity", of, Perplexity(), **lengths)


def agreement(of: str = PROSE, prompt_tokens: int | None = None) -> DerivedTask | PassageTask:
    """Agreement of a model with its own answers under the full cache, on any prompts."""
    return derived("agreement", of, Agreement(), prompt_tokens=prompt_tokens)


def _scored(sample: Sample) -> tuple[float, float] | None:
    values = sample.values
    return (values[LOSS], values[NUM_SCORED]) if values.get(NUM_SCORED) else None


@attrs.frozen
class Perplexity(PlainMetric):
    """Teacher forcing: the likelihood of each token of the reference text.

    With a prompt, all tokens of the reference are scored; without one, all but the first.
    ``max_new_tokens`` limits how many are scored; a longer text counts as truncated.
    """

    name = "perplexity"
    reads_reference = True
    is_greedy = True

    @property
    def columns(self) -> abc.Sequence[Column]:
        """Mean negative log-likelihood of a token in nats, and its exponential."""
        heading = "Negative log-likelihood, nats per token"
        return (
            ratio_of("nll", "nats/token", heading, _scored, least=0),
            ratio_of("perplexity", "perplexity", "Perplexity", _scored, math.exp, least=0),
        )

    def begin(
        self, engine: "Engine", requests: abc.Sequence[EvalRequest], shared: Shared
    ) -> Evaluation:
        """Lead every sequence along its reference."""
        from kvpolicy.engine.engine import Run

        texts = [_given_and_scored(engine.tokenizer, one) for one in requests]
        for one, (_, scored) in zip(requests, texts, strict=True):
            if not scored:
                msg = f"text {one.example.index} of the task has no token that could be scored"
                raise TaskError(msg)
        forced = [
            # A stop token in the middle of a text is scored like any other.
            attrs.evolve(
                one.request,
                prompt=given,
                max_new_tokens=min(one.request.max_new_tokens, len(scored)),
                stop_ids=(),
            )
            for one, (given, scored) in zip(requests, texts, strict=True)
        ]
        teacher = _Teacher([scored for _, scored in texts])
        return _PerplexityEvaluation(Run(engine, forced, teacher.sample), teacher)


class _Teacher:
    """Samples the tokens of given texts and sums their losses."""

    def __init__(self, texts: abc.Sequence[abc.Sequence[int]]) -> None:
        self.texts = texts
        self.loss: dict[int, float] = defaultdict(float)

    def sample(self, sequences: "abc.Sequence[Sequence]", logits: "Tensor") -> "Tensor":
        from kvpolicy.engine.sampler import teacher_forced

        tokens = [self.texts[seq.id][len(seq.tokens)] for seq in sequences]
        losses = -_log_probs(logits)[range(len(tokens)), tokens]
        for seq, loss in zip(sequences, losses.tolist(), strict=True):
            self.loss[seq.id] += loss
        return teacher_forced(tokens, logits)


@attrs.frozen
class _PerplexityEvaluation:
    run: "Run"
    teacher: _Teacher

    def outcome(self, result: Result) -> EvalOutcome:
        if result.finish_reason == "error":
            return EvalOutcome(result)
        num_scored = len(result.tokens)
        is_complete = num_scored == len(self.teacher.texts[result.id])
        result = attrs.evolve(result, finish_reason="stop" if is_complete else "length")
        values = {LOSS: self.teacher.loss.pop(result.id), NUM_SCORED: float(num_scored)}
        return EvalOutcome(result, values=values)


def _given_and_scored(tokenizer: Any, one: EvalRequest) -> tuple[Any, list[int]]:
    """The prompt, and the token ids that are scored."""
    reference = one.example.reference
    assert reference is not None, "DerivedTask.examples checks it"
    if one.example.prompt:
        given = one.request.prompt
        before = tokenizer(given)["input_ids"] if isinstance(given, str) else given
        return given, following(tokenizer, before, reference)
    ids = tokenizer(reference)["input_ids"]
    return ids[:1], ids[1:]


@attrs.frozen
class Agreement(PlainMetric):
    """Agreement of a model under a plan with the same model under the full cache.

    The model with the full cache answers greedily. The same model under the plan is led along
    that answer, and its prediction of every token is compared. No expected answer is needed.

    * ``match``: share of the tokens at which both have the same likeliest token;
    * ``kl``: mean over the tokens of ``KL(full || plan)``, in nats, between the distributions of
      the next token;
    * ``first_difference``: number of tokens before the first that differs, which is how long
      the plan's own greedy text would be the same; all tokens if none differs.

    The full cache's distributions are computed in step with the first plan, and kept for the
    others, in the memory of the host: for each token 4 bytes for each one of the vocabulary. If all
    take more than `kvpolicy.lab.shared.MOST_BYTES`, none is kept, and they are computed in step
    with each plan. This holds the rows of as many sequences as there are slots.
    """

    name = "agreement"
    is_greedy = True

    @property
    def columns(self) -> abc.Sequence[Column]:
        """Matching tokens, divergence, and tokens before the first difference."""
        return (
            mean_of(MATCH, "same token", "Tokens that match the full cache's", is_share=True),
            mean_of(KL, "KL, nats", "KL from the full cache, nats per token", least=0),
            mean_of(
                FIRST_DIFFERENCE,
                "parts after",
                "Tokens before the first difference",
                least=0,
                more_is_better=True,
            ),
        )

    def begin(
        self, engine: "Engine", requests: abc.Sequence[EvalRequest], shared: Shared
    ) -> Evaluation:
        """Lead every sequence along the full cache's answer."""
        from kvpolicy.engine.engine import Run
        from kvpolicy.engine.requests.request import Sampling

        greedy = [attrs.evolve(one.request, sampling=Sampling()) for one in requests]
        full = shared.get(
            ("distributions of the full cache", engine.num_slots, greedy),
            lambda: _FullAnswers(engine, greedy, keep_bytes=shared.most_bytes),
        )
        guide = _Guide(full)
        return _AgreementEvaluation(Run(engine, greedy, guide.sample), guide)


class _Guide:
    """Leads sequences along the greedy answers of the full cache and compares predictions."""

    def __init__(self, full: "_FullAnswers") -> None:
        self._full = full
        self.matches: dict[int, list[bool]] = defaultdict(list)
        self.kl: dict[int, float] = defaultdict(float)

    def sample(self, sequences: "abc.Sequence[Sequence]", logits: "Tensor") -> "Tensor":
        from kvpolicy.engine.sampler import teacher_forced

        tokens = []
        for seq, log_probs in zip(sequences, _log_probs(logits), strict=True):
            token, full_log_probs = self._full.at(seq.id, len(seq.tokens))
            full_log_probs = full_log_probs.to(log_probs.device)
            tokens.append(token)
            self.matches[seq.id].append(int(log_probs.argmax()) == token)
            # A token that the full cache rules out (log-probability -inf) contributes 0.
            terms = full_log_probs.exp() * (full_log_probs - log_probs)
            self.kl[seq.id] += float(terms[full_log_probs > -math.inf].sum())
        return teacher_forced(tokens, logits)


class _FullAnswers:
    """The greedy answers of the full cache, computed as far as those who follow them need."""

    def __init__(
        self, engine: "Engine", requests: "abc.Sequence[Request]", *, keep_bytes: float
    ) -> None:
        from kvpolicy.engine.engine import Engine, Run
        from kvpolicy.plan.plan import Plan

        model, plan = engine.adapter.model, Plan.full_cache()
        full = Engine(model, engine.tokenizer, plan, slots=engine.num_slots)
        full.compiled = engine.compiled  # computed alike, and timed by one clock
        # By sequence and place, each token with the log-probabilities it came from.
        self._tokens: Pieces[tuple[int, int], tuple[int, Tensor]] = Pieces(keep_bytes)
        self._run: Run | None = Run(full, requests, self._sample)

    @property
    def is_reusable(self) -> bool:
        """Whether another may follow them: all have ended, and all of them are kept."""
        return self._run is None and self._tokens.keeps_all

    @property
    def num_bytes(self) -> int:
        """Bytes of the distributions."""
        return self._tokens.num_bytes

    def at(self, number: int, place: int) -> "tuple[int, Tensor]":
        """A token of a sequence and the log-probabilities of all in its place, ``[V]``.

        They may be in the memory of the host.
        """
        while (number, place) not in self._tokens:
            assert self._run is not None, "both engines end a sequence at the same token"
            self._run.step()
            if self._run.done:
                self._run = None
        return self._tokens.read((number, place))

    def _sample(self, sequences: "abc.Sequence[Sequence]", logits: "Tensor") -> "Tensor":
        from kvpolicy.engine.sampler import teacher_forced

        log_probs = _log_probs(logits)
        tokens = teacher_forced(log_probs.argmax(dim=-1).tolist(), logits)
        kept = log_probs.cpu() if self._tokens.keeps_all else log_probs
        for seq, token, row in zip(sequences, tokens.tolist(), kept, strict=True):
            self._tokens.add((seq.id, len(seq.tokens)), (token, row), row.nbytes)
        return tokens


@attrs.frozen
class _AgreementEvaluation:
    run: "Run"
    guide: _Guide

    def outcome(self, result: Result) -> EvalOutcome:
        if result.finish_reason == "error":
            return EvalOutcome(result)
        matches = self.guide.matches.pop(result.id)
        num_equal = matches.index(False) if False in matches else len(matches)
        values = {
            MATCH: sum(matches) / len(matches),
            KL: self.guide.kl.pop(result.id) / len(matches),
            FIRST_DIFFERENCE: float(num_equal),
        }
        return EvalOutcome(result, values=values)


def _log_probs(logits: "Tensor") -> "Tensor":
    return logits.float().log_softmax(dim=-1)
