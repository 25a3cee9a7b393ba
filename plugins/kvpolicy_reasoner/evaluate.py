"""Measure the reasoner: greedy decoding with the full cache, by plain ``model.generate``."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import attrs
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.lab.statistics import Interval, wilson
from kvpolicy_reasoner.task import Problem, grade


@attrs.frozen
class Attempt:
    """One problem with what the model made of it.

    Attributes:
        problem: The problem.
        text: What was generated after the prompt, with the end-of-sequence token if it came.
        num_tokens: Tokens of the text.
        finished: The model ended the text itself.
    """

    problem: Problem
    text: str
    num_tokens: int
    finished: bool

    @property
    def is_right(self) -> bool:
        """Whether the last box holds the answer."""
        return grade(self.text, self.problem)


@attrs.frozen
class Score:
    """How many of a group of problems were solved.

    Attributes:
        right: Problems solved.
        total: Problems tried.
    """

    right: int
    total: int

    @property
    def accuracy(self) -> float:
        """The share that was solved."""
        return self.right / self.total

    @property
    def estimate(self) -> Interval:
        """The same with Wilson's 95 % interval."""
        return wilson(self.right, self.total)


def attempt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    batch_size: int = 64,
    max_new_tokens: int | None = None,
    report: Callable[[int], None] | None = None,
) -> list[Attempt]:
    """Let the model answer problems greedily.

    Args:
        model: The reasoner.
        tokenizer: Its tokenizer, which pads on the left.
        problems: What to answer.
        batch_size: Problems decoded together.
        max_new_tokens: Where a generation is cut off; where the model says if not given.
        report: Called after every batch with the number of problems done.

    Returns:
        One attempt per problem, in order.
    """
    attempts: list[Attempt] = []
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        attempts += _attempt_batch(model, tokenizer, batch, max_new_tokens)
        if report is not None:
            report(len(attempts))
    return attempts


def score_by_depth(attempts: Sequence[Attempt]) -> dict[int, Score]:
    """Count right answers by the depth of the problem.

    Args:
        attempts: What the model answered.

    Returns:
        A score for every depth that occurs, in rising order.
    """
    by_depth: dict[int, list[Attempt]] = defaultdict(list)
    for one in attempts:
        by_depth[one.problem.depth].append(one)
    return {depth: score(by_depth[depth]) for depth in sorted(by_depth)}


def score(attempts: Sequence[Attempt]) -> Score:
    """Count right answers.

    Args:
        attempts: What the model answered.

    Returns:
        The score over all of them.
    """
    return Score(right=sum(one.is_right for one in attempts), total=len(attempts))


@torch.inference_mode()
def _attempt_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    max_new_tokens: int | None,
) -> list[Attempt]:
    prompts = [problem.prompt for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    # transformers types `generate` as a tensor that is callable
    limit = {} if max_new_tokens is None else {"max_new_tokens": max_new_tokens}
    output = model.generate(**inputs, do_sample=False, **limit)  # type: ignore[operator]
    attempts = []
    for problem, row in zip(problems, output[:, inputs.input_ids.shape[1] :], strict=True):
        tokens = row[row != tokenizer.pad_token_id]
        attempts.append(
            Attempt(
                problem=problem,
                text=str(tokenizer.decode(tokens)),
                num_tokens=len(tokens),
                finished=bool((tokens == tokenizer.eos_token_id).any()),
            )
        )
    return attempts
