"""The bundled reasoners: everything in which they differ, under the name a user types."""

import difflib
import random
from collections.abc import Callable
from pathlib import Path

import attrs
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.reasoner import task
from kvpolicy.lab.reasoner.facts import Difficulty
from kvpolicy.lab.reasoner.model import bundled_path, new_model
from kvpolicy.lab.reasoner.task import Problem, Split
from kvpolicy.lab.reasoner.tokenizer import build_tokenizer
from kvpolicy.lab.reasoner.verbose import task as verbose
from kvpolicy.lab.reasoner.verbose.model import new_verbose_model
from kvpolicy.lab.reasoner.verbose.tokenizer import build_verbose_tokenizer
from kvpolicy.lab.reasoner.verbose.weighing import weigh_pieces
from kvpolicy.lab.reasoner.weighing import weigh_after_newlines

REASONER = "reasoner"


@attrs.frozen
class Recipe:
    """One bundled reasoner: its problems, its tokenizer, its training and its weights.

    Attributes:
        name: What the user types.
        make: Draws one problem.
        standard: Difficulty of the problems that are reported on.
        curriculum: Difficulties of training, each with the share of the run at which it ends.
        build_tokenizer: Builds the tokenizer.
        weigh: Weighs the tokens of a trace in the loss.
        new_model: Builds the weights that training starts from, from a seed.
        peak_lr: Highest learning rate.
        tokens: Tokens that the shipped weights were trained on.
        min_tokens_per_step: Smallest step into which the longest problem fits.
        max_new_tokens: Where a generation is cut off.
    """

    name: str
    make: Callable[[random.Random, Difficulty], Problem]
    standard: Difficulty
    curriculum: tuple[tuple[float, Difficulty], ...]
    build_tokenizer: Callable[[], PreTrainedTokenizerFast]
    weigh: Callable[[Problem, Encoding], list[float]]
    new_model: Callable[[int], Qwen2ForCausalLM]
    peak_lr: float
    tokens: int
    min_tokens_per_step: int
    max_new_tokens: int

    @property
    def weights(self) -> Path:
        """The Hugging Face folder of the trained weights that ship with the package."""
        return bundled_path(self.name)

    def problems(
        self, n: int, *, seed: int, split: Split = "test", difficulty: Difficulty | None = None
    ) -> list[Problem]:
        """Draw distinct problems of a split; the same arguments give the same problems.

        Args:
            n: How many problems.
            seed: Chooses the problems.
            split: ``"test"`` to report on, ``"tune"`` to choose settings on, ``"train"`` to learn
                from.
            difficulty: Ranges of depth and number of facts; the standard ones if not given.

        Returns:
            ``n`` problems with ``n`` different prompts.
        """
        difficulty = self.standard if difficulty is None else difficulty
        return task.make_problems(n, seed=seed, split=split, difficulty=difficulty, make=self.make)


_RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name=REASONER,
            make=task.make_problem,
            standard=task.STANDARD,
            curriculum=(
                (0.12, Difficulty(min_depth=1, max_depth=3, min_facts=6, max_facts=6)),
                (0.25, Difficulty(min_depth=2, max_depth=5, min_facts=5, max_facts=10)),
                (1.00, task.STANDARD),
            ),
            build_tokenizer=build_tokenizer,
            weigh=weigh_after_newlines,
            new_model=new_model,
            peak_lr=4e-3,
            tokens=36_000_000,
            min_tokens_per_step=1024,
            max_new_tokens=700,
        ),
        Recipe(
            name="reasoner-verbose",
            make=verbose.make_verbose_problem,
            standard=verbose.STANDARD,
            curriculum=(
                (0.08, Difficulty(min_depth=1, max_depth=3, min_facts=6, max_facts=8)),
                (0.20, Difficulty(min_depth=2, max_depth=5, min_facts=5, max_facts=12)),
                (1.00, verbose.STANDARD),
            ),
            build_tokenizer=build_verbose_tokenizer,
            weigh=weigh_pieces,
            new_model=new_verbose_model,
            peak_lr=3e-3,
            tokens=50_000_000,
            min_tokens_per_step=2048,
            max_new_tokens=1300,
        ),
    )
}


def recipe_named(name: str) -> Recipe:
    """Find a bundled reasoner.

    Args:
        name: Its name.

    Returns:
        What it is made of.

    Raises:
        KVPolicyError: There is no such reasoner.
    """
    if name not in _RECIPES:
        near = difflib.get_close_matches(name, _RECIPES)
        hint = f"did you mean {near[0]}? " if near else ""
        msg = f"no bundled reasoner named {name!r}; {hint}There are: {', '.join(_RECIPES)}."
        raise KVPolicyError(msg)
    return _RECIPES[name]
