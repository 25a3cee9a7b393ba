"""Evaluation of a reasoner: greedy decoding with the full cache by ``model.generate``."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import attrs
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvpolicy.lab.statistics import Interval, wilson
from kvpolicy_reasoner.task import Problem, grade


@attrs.frozen
class Attempt:
    """A problem and the model's answer.

    Attributes:
        problem: The problem.
        text: Generated text, including the end-of-sequence token if the model generated one.
        num_tokens: Generated tokens.
        finished: Whether the model generated the end-of-sequence token.
    """

    problem: Problem
    text: str
    num_tokens: int
    finished: bool

    @property
    def is_correct(self) -> bool:
        """Whether the last box contains the expected answer."""
        return grade(self.text, self.problem)


@attrs.frozen
class Score:
    """Accuracy over a group of problems.

    Attributes:
        num_correct: Problems answered correctly.
        total: All problems.
    """

    num_correct: int
    total: int

    @property
    def accuracy(self) -> float:
        """Share of problems answered correctly."""
        return self.num_correct / self.total

    @property
    def estimate(self) -> Interval:
        """The accuracy with Wilson's 95 % confidence interval."""
        return wilson(self.num_correct, self.total)


def attempt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    *,
    max_new_tokens: int,
    batch_size: int = 64,
    report: Callable[[int], None] | None = None,
) -> list[Attempt]:
    """Answer problems by greedy decoding.

    Args:
        model: The reasoner.
        tokenizer: Its tokenizer, which pads on the left.
        problems: The problems.
        max_new_tokens: Generation limit, as in `ProblemSet`.
        batch_size: Problems decoded together.
        report: Called after every batch with the number of problems answered so far.

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
    """Accuracy by depth of the problem.

    Args:
        attempts: The answers.

    Returns:
        A score for each depth that occurs, in ascending order.
    """
    by_depth: dict[int, list[Attempt]] = defaultdict(list)
    for one in attempts:
        by_depth[one.problem.depth].append(one)
    return {depth: score(by_depth[depth]) for depth in sorted(by_depth)}


def score(attempts: Sequence[Attempt]) -> Score:
    """Accuracy over all attempts.

    Args:
        attempts: The answers.

    Returns:
        The score.
    """
    return Score(num_correct=sum(one.is_correct for one in attempts), total=len(attempts))


@torch.inference_mode()
def _attempt_batch(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    max_new_tokens: int,
) -> list[Attempt]:
    prompts = [problem.prompt for problem in problems]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(model.device)
    # The type annotations of transformers make `generate` a tensor.
    options = {
        "do_sample": False,
        "max_new_tokens": max_new_tokens,
        "pad_token_id": tokenizer.pad_token_id,
    }
    output = model.generate(**inputs, **options)  # type: ignore[operator]
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
