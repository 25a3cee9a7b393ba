"""Calibration of steering vectors from the hidden states of a model that solves problems.

The method is that of SEAL (arXiv 2504.07986; VITA-Group/SEAL): greedy traces with the full cache,
a number of correct and incorrect ones, all their thoughts pooled. There are two differences: one
pass over the traces gives the vectors of all layers, and the stored sign is execution -
non_execution.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.requests.encoding import encode
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.models import fingerprint
from kvpolicy.lab.steer.hidden_states import MarkedTrace, States, states_before_thoughts
from kvpolicy.lab.steer.thoughts import EXECUTION, ThoughtRules, find_thoughts
from kvpolicy.lab.tasks import chat_template as chat
from kvpolicy.lab.tasks.task import GradeError, Split, Task, fitted, grader_of
from kvpolicy.plan.plan import Plan
from kvpolicy.toolkit.paragraphs import PARAGRAPH, Paragraphs
from kvpolicy.toolkit.steering_vectors import Calibration, SteeringVector

SPLIT: Split = "train"  # vectors are evaluated on other problems

# States kept of each side to estimate the spread; more would only make it more exact.
_SPREAD_SAMPLE = 2_048


@attrs.frozen
class Trace:
    """The model's solution of one problem.

    Attributes:
        item: Number of the problem.
        prompt_len: Tokens of the prompt.
        token_ids: Prompt and generation.
        is_correct: Verdict of the grader.
    """

    item: int
    prompt_len: int
    token_ids: tuple[int, ...]
    is_correct: bool


@attrs.frozen
class CalibrationSource:
    """The model and the problems of a calibration.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        model_name: Its name, as the user typed it.
        task: The task, whose training split is used.
        n: Number of problems.
        seed: Chooses the problems.
    """

    model: PreTrainedModel
    tokenizer: Any
    model_name: str
    task: Task
    n: int
    seed: int


def write_traces(source: CalibrationSource, *, max_new_tokens: int, slots: int) -> Iterator[Trace]:
    """Solve the problems greedily, with the full cache.

    Args:
        source: Model and problems.
        max_new_tokens: Most tokens of a trace.
        slots: Problems solved together.

    Yields:
        The traces as they finish, without those on which the grader has no verdict.

    Raises:
        KVPolicyError: A request failed.
    """
    grade = grader_of(source.task)
    engine = Engine(source.model, source.tokenizer, Plan.full_cache(), slots=slots)
    task = fitted(source.task, source.tokenizer)
    drawn = task.examples(source.n, seed=source.seed, split=SPLIT)
    examples = chat.wrap(drawn, source.tokenizer)
    texts = chat.encode(examples, source.tokenizer)
    prompts = [encode(text, source.tokenizer, engine.adapter.vocab_size) for text in texts]
    for result in engine.generate(prompts, max_new_tokens=max_new_tokens):
        example = examples[result.id]
        if result.error is not None:
            msg = f"problem {example.index} of task {source.task.name}: {result.error}"
            raise KVPolicyError(msg)
        token_ids = (*prompts[result.id], *result.tokens)
        try:
            is_correct = grade(result.text or "", example)
        except GradeError:
            continue
        yield Trace(example.index, result.prompt_len, token_ids, is_correct)


def pick(traces: Sequence[Trace], *, max_correct: int, max_incorrect: int) -> list[Trace]:
    """The first correct and the first incorrect traces, in the order of the problems."""
    in_order = sorted(traces, key=lambda trace: trace.item)
    correct = [trace for trace in in_order if trace.is_correct][:max_correct]
    incorrect = [trace for trace in in_order if not trace.is_correct][:max_incorrect]
    return sorted([*correct, *incorrect], key=lambda trace: trace.item)


def mark(
    traces: Sequence[Trace], tokenizer: Any, rules: ThoughtRules, delimiter: str = PARAGRAPH
) -> list[MarkedTrace]:
    """Find the thoughts of traces; traces without any are left out.

    Args:
        traces: The traces.
        tokenizer: The tokenizer.
        rules: Kinds of thoughts.
        delimiter: Text inside the tokens that end a paragraph.

    Raises:
        KVPolicyError: One side has no thought, so nothing can be compared.
    """
    paragraphs = _paragraphs(tokenizer, delimiter)
    marked = [
        MarkedTrace(
            trace.token_ids,
            find_thoughts(trace.token_ids, trace.prompt_len, tokenizer, paragraphs, rules),
        )
        for trace in traces
    ]
    counts = count_thoughts(marked)
    num_others = sum(counts.values()) - counts[EXECUTION]
    if traces and not any(trace.thoughts for trace in marked):
        msg = (
            f"{len(traces)} traces have no thoughts: no token in them contains {delimiter!r}, or "
            f"the rules '{rules.name}' compare none; give --delimiter the text of one token, where "
            "the tokenizer ends paragraphs by several, or other --rules"
        )
        raise KVPolicyError(msg)
    if not counts[EXECUTION] or not num_others:
        msg = (
            f"{len(traces)} traces have {counts[EXECUTION]} execution and {num_others} "
            f"non-execution thoughts under the rules '{rules.name}', and both are needed; give "
            "more problems with --n, or rules in the words of this model with --rules"
        )
        raise KVPolicyError(msg)
    return [trace for trace in marked if trace.thoughts]


def count_thoughts(marked: Sequence[MarkedTrace]) -> Counter[str]:
    """Number of thoughts of each kind."""
    return Counter(thought.kind for trace in marked for thought in trace.thoughts)


def describe(
    source: CalibrationSource,
    traces: Sequence[Trace],
    marked: Sequence[MarkedTrace],
    rules: ThoughtRules,
    delimiter: str = PARAGRAPH,
) -> Calibration:
    """Record the origin of the vectors."""
    num_right = sum(trace.is_correct for trace in traces)
    return Calibration(
        model=source.model_name,
        fingerprint=fingerprint(source.model),
        task=source.task.name,
        split=SPLIT,
        seed=source.seed,
        num_right=num_right,
        num_wrong=len(traces) - num_right,
        num_thoughts=dict(sorted(count_thoughts(marked).items())),
        rules=rules.name,
        rules_digest=rules.digest(),
        delimiter=delimiter,
        version=kvpolicy.__version__,
    )


def contrast_layers(
    model: PreTrainedModel,
    marked: Sequence[MarkedTrace],
    layers: Sequence[int],
    calibration: Calibration,
    *,
    report: Callable[[int], None] = lambda _: None,
) -> list[SteeringVector]:
    """Compare the states before thoughts, with one forward pass over each trace.

    Args:
        model: The model.
        marked: Its traces.
        layers: Decoder layers whose inputs are compared, from 0.
        calibration: Origin of the vectors.
        report: Called after each forward pass with the number of traces done.

    Returns:
        A vector for each layer, in their order.
    """
    contrast = _Contrast(layers)
    num_done = 0
    for states in states_before_thoughts(model, marked, layers):
        contrast.add(states)
        num_done += states.num_traces
        report(num_done)
    return [
        SteeringVector(
            vector=contrast.vector(layer),
            layer=layer,
            calibration=calibration,
            separation=contrast.separation(layer),
        )
        for layer in layers
    ]


def choose_layers(text: str, num_layers: int) -> list[int]:
    """Parse the option ``--layers``.

    Args:
        text: ``"all"``, ``"half"`` (every second one) or numbers between commas.
        num_layers: Layers of the model.

    Returns:
        The layers in ascending order.

    Raises:
        KVPolicyError: It has another form, or the model has no such layer.
    """
    if text in ("all", "half"):
        # Half leaves out layer 0, whose input is the embedding of the delimiter alone.
        return list(range(num_layers)) if text == "all" else list(range(1, num_layers, 2)) or [0]
    found = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) < num_layers for word in found):
        msg = (
            f"--layers got {text!r}; expected 'all', 'half', or layer numbers from 0 to "
            f"{num_layers - 1}, such as 1,3"
        )
        raise KVPolicyError(msg)
    return sorted({int(word) for word in found})


def _paragraphs(tokenizer: Any, delimiter: str) -> Paragraphs:
    """Paragraphs of the thinking part, or of the whole text if the tokenizer has no tags."""
    try:
        return Paragraphs.of(tokenizer, delimiter=delimiter)
    except KVPolicyError:
        # Without tags, SEAL's code treats the whole text as thinking.
        return Paragraphs.of(tokenizer, delimiter=delimiter, think=None)


@attrs.define(eq=False)
class _Side:
    """States before the thoughts of one side, in one layer: their sum and a sample."""

    total: Tensor | float = 0.0  # [M], fp64
    count: int = 0
    sample: list[Tensor] = attrs.field(factory=list)

    def add(self, states: Tensor) -> None:
        left = max(_SPREAD_SAMPLE - self.count, 0)
        self.total = self.total + states.double().sum(dim=0)
        self.count += len(states)
        self.sample.append(states[:left].clone())

    @property
    def mean(self) -> Tensor:
        assert isinstance(self.total, Tensor)
        return self.total / self.count


class _Contrast:
    """Mean states before execution thoughts and before all others, for each layer."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._sides = {layer: (_Side(), _Side()) for layer in layers}

    def add(self, states: States) -> None:
        """Add the states of one batch of thoughts."""
        is_execution = torch.tensor([kind == EXECUTION for kind in states.kinds])
        for layer, (execution, others) in self._sides.items():
            execution.add(states.by_layer[layer][is_execution])
            others.add(states.by_layer[layer][~is_execution])

    def vector(self, layer: int) -> Tensor:
        """Mean over execution thoughts minus mean over all others, ``[M]``, fp32."""
        execution, others = self._sides[layer]
        return (execution.mean - others.mean).float()

    def separation(self, layer: int) -> float | None:
        """Distance of the means divided by the pooled standard deviation along the vector.

        Measured on the thoughts that made the vector, so it is too high when they are few.

        Returns:
            The ratio; ``None`` if the states do not differ.
        """
        execution, others = self._sides[layer]
        difference = execution.mean - others.mean
        direction = difference / difference.norm()
        projected = [torch.cat(side.sample).double() @ direction for side in (execution, others)]
        residuals = torch.cat([values - values.mean() for values in projected])
        spread = residuals.square().sum().div(max(len(residuals) - 2, 1)).sqrt()
        ratio = float(difference.norm() / spread)
        return ratio if torch.isfinite(torch.tensor(ratio)) else None
