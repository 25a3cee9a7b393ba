"""Calibrating: a model solves training problems, and its states before thoughts are compared.

The recipe is SEAL's (arXiv 2504.07986; VITA-Group/SEAL): greedy traces with the full cache, the
first so many right and wrong ones, all their thoughts pooled. We differ: one pass over the traces
gives the vectors of all layers asked for, and the stored sign is execution - non_execution.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
from transformers import PreTrainedModel

import kvpolicy
from kvpolicy.engine.engine import Engine
from kvpolicy.engine.sequence import encode
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.models import fingerprint
from kvpolicy.lab.steer.contrast import Contrast
from kvpolicy.lab.steer.hidden_states import MarkedTrace, states_before_thoughts
from kvpolicy.lab.steer.rules import EXECUTION, ThoughtRules
from kvpolicy.lab.steer.thoughts import find_thoughts
from kvpolicy.lab.tasks import chat_template as chat
from kvpolicy.lab.tasks.task import GradeError, Split, Task, grader_of
from kvpolicy.plan.plan import Plan
from kvpolicy.toolkit.paragraphs import Paragraphs
from kvpolicy.toolkit.steering_vectors import Calibration, SteeringVector

SPLIT: Split = "train"  # a vector must not have seen what it is judged on


@attrs.frozen
class Trace:
    """What the model made of one problem.

    Attributes:
        item: Number of the problem.
        prompt_len: Tokens of the prompt.
        token_ids: Prompt and generation.
        is_right: Whether the grader accepted it.
    """

    item: int
    prompt_len: int
    token_ids: tuple[int, ...]
    is_right: bool


@attrs.frozen
class Source:
    """The model and the problems that a calibration starts from.

    Attributes:
        model: The model.
        tokenizer: Its tokenizer.
        model_name: What the user calls it.
        task: The task, whose training split is used.
        n: Problems.
        seed: Chooses them.
    """

    model: PreTrainedModel
    tokenizer: Any
    model_name: str
    task: Task
    n: int
    seed: int


def write_traces(source: Source, *, max_new_tokens: int, slots: int) -> Iterator[Trace]:
    """Let the model solve the problems, greedily and with the full cache.

    Args:
        source: Model and problems.
        max_new_tokens: The most tokens of a trace.
        slots: Problems solved together.

    Yields:
        The traces as they are finished; without those on which the grader has no verdict.

    Raises:
        KVPolicyError: A problem cannot be served.
    """
    grade = grader_of(source.task)
    engine = Engine(source.model, source.tokenizer, Plan.uniform("full"), slots=slots)
    drawn = source.task.items(source.n, seed=source.seed, split=SPLIT)
    items = chat.wrap(drawn, source.tokenizer)
    texts = [chat.encode(item, source.tokenizer) for item in items]
    prompts = [encode(text, source.tokenizer, engine.adapter.vocab_size) for text in texts]
    for result in engine.generate(prompts, max_new_tokens=max_new_tokens):
        item = items[result.id]
        if result.error is not None:
            msg = f"problem {item.index} of task {source.task.name}: {result.error}"
            raise KVPolicyError(msg)
        token_ids = (*prompts[result.id], *result.tokens)
        try:
            is_right = grade(result.text or "", item)
        except GradeError:
            continue  # neither right nor wrong
        yield Trace(item.index, result.prompt_len, token_ids, is_right)


def pick(traces: Sequence[Trace], *, max_right: int, max_wrong: int) -> list[Trace]:
    """The first right and the first wrong traces, in the order of the problems."""
    in_order = sorted(traces, key=lambda trace: trace.item)
    right = [trace for trace in in_order if trace.is_right]
    wrong = [trace for trace in in_order if not trace.is_right]
    return sorted([*right[:max_right], *wrong[:max_wrong]], key=lambda trace: trace.item)


def mark(traces: Sequence[Trace], tokenizer: Any, rules: ThoughtRules) -> list[MarkedTrace]:
    """Find the thoughts of traces; those without one are left out.

    Raises:
        KVPolicyError: Nothing can be compared, because a side has no thought.
    """
    paragraphs = _paragraphs(tokenizer)
    marked = [
        MarkedTrace(
            trace.token_ids,
            find_thoughts(trace.token_ids, trace.prompt_len, tokenizer, paragraphs, rules),
        )
        for trace in traces
    ]
    counts = count_thoughts(marked)
    num_others = sum(counts.values()) - counts[EXECUTION]
    if not counts[EXECUTION] or not num_others:
        msg = (
            f"{len(traces)} traces have {counts[EXECUTION]} execution and {num_others} "
            f"non-execution thoughts under the rules '{rules.name}', and both are needed; give "
            "more problems with --n, or rules in the words of this model with --rules"
        )
        raise KVPolicyError(msg)
    return [trace for trace in marked if trace.thoughts]


def count_thoughts(marked: Sequence[MarkedTrace]) -> Counter[str]:
    """How many thoughts there are of each kind."""
    return Counter(thought.kind for trace in marked for thought in trace.thoughts)


def describe(
    source: Source, traces: Sequence[Trace], marked: Sequence[MarkedTrace], rules: ThoughtRules
) -> Calibration:
    """Put down where the vectors will come from."""
    num_right = sum(trace.is_right for trace in traces)
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
    """Compare the states before thoughts, with one forward over each trace.

    Args:
        model: The model.
        marked: Its traces.
        layers: Decoder layers whose input is looked at, from 0.
        calibration: Where the vectors come from.
        report: Called after each forward with the number of traces done.

    Returns:
        A vector for each layer, in their order.
    """
    contrast = Contrast(layers)
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


def choose_layers(words: str, num_layers: int) -> list[int]:
    """Understand which layers the user wants.

    Args:
        words: ``"all"``, ``"half"`` (every second one) or numbers between commas.
        num_layers: Layers of the model.

    Returns:
        The layers, rising.

    Raises:
        KVPolicyError: It is none of these, or the model has no such layer.
    """
    if words in ("all", "half"):
        # Half leaves out layer 0: what enters it is the embedding of the delimiter alone.
        return list(range(num_layers)) if words == "all" else list(range(1, num_layers, 2)) or [0]
    found = [word.strip() for word in words.split(",")]
    if not all(word.isascii() and word.isdigit() and int(word) < num_layers for word in found):
        msg = (
            f"--layers was given {words!r}; wanted are 'all', 'half', or numbers of layers from 0 "
            f"to {num_layers - 1}: 1,3"
        )
        raise KVPolicyError(msg)
    return sorted({int(word) for word in found})


def _paragraphs(tokenizer: Any) -> Paragraphs:
    """The tokenizer's, with its thinking part if it has tags for one."""
    try:
        return Paragraphs.of(tokenizer)
    except KVPolicyError:
        # A model without tags: all of its text is thinking, as SEAL's code treats it.
        return Paragraphs.of(tokenizer, think=None)
