"""Training batches: the batch of a step depends on seed, length of the run and step only."""

import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvpolicy_reasoner import REASONER
from kvpolicy_reasoner.task import Problem, make_split_problem
from kvpolicy_reasoner.train.recipes import Recipe, recipe_of

STEPS_PER_POOL = 20

# Padding is neither attended to nor part of the loss; every tokenizer has a token 0.
_PAD_ID = 0


@attrs.frozen
class Example:
    """One problem as tokens.

    Attributes:
        tokens: Prompt and trace.
        prompt_len: Tokens of the prompt.
        weights: Loss weight of each token of the trace.
    """

    tokens: list[int]
    prompt_len: int
    weights: list[float]


@attrs.frozen(eq=False)
class Batch:
    """Right-padded rows of one step.

    Attributes:
        input_ids: Tokens ``[B, T]``.
        weights: Loss weight of the prediction of token ``t + 1`` at token ``t``, ``[B, T - 1]``;
            zero for prompt and padding.
    """

    input_ids: Tensor
    weights: Tensor

    def to(self, device: str) -> "Batch":
        """The batch on a device."""
        return Batch(self.input_ids.to(device), self.weights.to(device))


@attrs.frozen
class DataPlan:
    """Everything the training data depends on.

    Attributes:
        seed: Random seed for the problems.
        num_steps: Optimizer steps of the whole run; the curriculum depends on it.
        tokens_per_step: Tokens in the batch of one step, without padding.
        name: Name of the reasoner.
    """

    seed: int
    num_steps: int
    tokens_per_step: int
    name: str = REASONER


def training_prompts(plan: DataPlan) -> Iterator[str]:
    """The training prompts of a run.

    Args:
        plan: Parameters of the training data.

    Yields:
        The prompts in the order of the pools, including all prompts of the last pool even if the
        run ends within it.
    """
    for index in range(-(-plan.num_steps // STEPS_PER_POOL)):
        for problem, _ in _fill(plan, index):
            yield problem.prompt


def examples_of_step(plan: DataPlan, step: int) -> list[Example]:
    """The examples of one step, shortest first.

    Args:
        plan: Parameters of the training data.
        step: Number of the step, from 0.

    Returns:
        About ``plan.tokens_per_step`` tokens, in examples of similar length.
    """
    return _pool(plan, step // STEPS_PER_POOL)[step % STEPS_PER_POOL]


def collate(examples: Sequence[Example]) -> Batch:
    """Build a batch of examples, padded on the right.

    Args:
        examples: The examples, at least one.

    Returns:
        The batch.
    """
    longest = max(len(example.tokens) for example in examples)
    input_ids = torch.full((len(examples), longest), _PAD_ID)
    weights = torch.zeros(len(examples), longest - 1)
    for row, example in enumerate(examples):
        input_ids[row, : len(example.tokens)] = torch.tensor(example.tokens)
        trace = slice(example.prompt_len - 1, len(example.tokens) - 1)
        weights[row, trace] = torch.tensor(example.weights)
    return Batch(input_ids, weights)


@lru_cache(maxsize=2)
def _pool(plan: DataPlan, index: int) -> list[list[Example]]:
    """Fill a pool and divide it, sorted by length, into one group of examples per step.

    All pools have the same number of steps, so that the pool of a step does not depend on earlier
    pools. The groups are shuffled.
    """
    examples = [example for _, example in _fill(plan, index)]
    examples.sort(key=lambda example: len(example.tokens))
    groups: list[list[Example]] = [[] for _ in range(STEPS_PER_POOL)]
    total = sum(len(example.tokens) for example in examples)
    seen = 0
    for example in examples:
        groups[seen * STEPS_PER_POOL // total].append(example)
        seen += len(example.tokens)
    random.Random(f"order {plan.seed} {index}").shuffle(groups)
    return groups


def _fill(plan: DataPlan, index: int) -> list[tuple[Problem, Example]]:
    recipe = recipe_of(plan.name)
    problems = _problems_of_pool(plan, index)
    filled: list[tuple[Problem, Example]] = []
    num_tokens = 0
    while num_tokens < STEPS_PER_POOL * plan.tokens_per_step:
        problem = next(problems)
        example = _encode(recipe, problem)
        filled.append((problem, example))
        num_tokens += len(example.tokens)
    return filled


def _problems_of_pool(plan: DataPlan, index: int) -> Iterator[Problem]:
    """Generate problems of the curriculum's difficulty at this point of the run, without end."""
    rng = random.Random(f"pool {plan.seed} {index}")
    progress = index * STEPS_PER_POOL / plan.num_steps
    recipe = recipe_of(plan.name)
    difficulty = recipe.difficulty(progress)
    while True:
        yield make_split_problem(rng, "train", difficulty, recipe.problems.make)


def _encode(recipe: Recipe, problem: Problem) -> Example:
    tokenizer = _tokenizer(recipe.name).backend_tokenizer
    prompt, trace = tokenizer.encode(problem.prompt), tokenizer.encode(problem.trace)
    return Example(
        tokens=prompt.ids + trace.ids,
        prompt_len=len(prompt.ids),
        weights=recipe.weigh(problem, trace),
    )


@lru_cache(maxsize=2)
def _tokenizer(name: str) -> PreTrainedTokenizerFast:
    return recipe_of(name).build_tokenizer()
