"""Training batches: what step ``t`` sees is a function of the seed, the run's length and ``t``."""

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

# Never attended to nor counted in the loss; every tokenizer has a token 0.
_PAD_ID = 0


@attrs.frozen
class Example:
    """One problem as tokens.

    Attributes:
        tokens: Prompt and trace.
        prompt_len: How many of the tokens are the prompt.
        weights: Weight of the loss of each token of the trace.
    """

    tokens: list[int]
    prompt_len: int
    weights: list[float]


@attrs.frozen(eq=False)
class Batch:
    """Right-padded rows of one step.

    Attributes:
        input_ids: Tokens ``[B, T]``.
        weights: Weight of the loss of predicting token ``t + 1`` from ``t``, ``[B, T - 1]``; zero
            for the prompt and the padding.
    """

    input_ids: Tensor
    weights: Tensor


@attrs.frozen
class DataPlan:
    """Everything the training data depends on.

    Attributes:
        seed: Chooses the problems.
        num_steps: Optimiser steps of the whole run, along which the curriculum is laid out.
        tokens_per_step: Tokens in the batch of one step, padding aside.
        name: Which reasoner the data are for.
    """

    seed: int
    num_steps: int
    tokens_per_step: int
    name: str = REASONER


def training_prompts(plan: DataPlan) -> Iterator[str]:
    """List the prompts that a run is trained on, without training.

    Args:
        plan: What the data depends on.

    Yields:
        The prompts in the order of the pools; those of the last pool whether or not the run ends
        in the middle of it.
    """
    for index in range(-(-plan.num_steps // STEPS_PER_POOL)):
        for problem, _ in _fill(plan, index):
            yield problem.prompt


def examples_of_step(plan: DataPlan, step: int) -> list[Example]:
    """Return the examples of one step, shortest first.

    Args:
        plan: What the data depends on.
        step: Which step, from 0.

    Returns:
        About ``plan.tokens_per_step`` tokens, in examples of similar length.
    """
    return _pool(plan, step // STEPS_PER_POOL)[step % STEPS_PER_POOL]


def collate(examples: Sequence[Example]) -> Batch:
    """Pad examples on the right and lay out the weights of their losses.

    Args:
        examples: At least one example.

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
    """Fill a pool and cut it, sorted by length, into one group of examples per step.

    A pool always feeds the same number of steps, so that a step finds its pool without a look at
    the pools before it. Short and long groups take turns at random.
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
    drawn: list[tuple[Problem, Example]] = []
    num_tokens = 0
    while num_tokens < STEPS_PER_POOL * plan.tokens_per_step:
        problem = next(problems)
        example = _encode(recipe, problem)
        drawn.append((problem, example))
        num_tokens += len(example.tokens)
    return drawn


def _problems_of_pool(plan: DataPlan, index: int) -> Iterator[Problem]:
    """Draw problems without end, as difficult as the curriculum asks at this point of the run."""
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
