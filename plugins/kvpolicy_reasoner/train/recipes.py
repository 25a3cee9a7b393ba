"""Training recipes: the settings in which the training runs of the reasoners differ."""

from collections.abc import Callable
from pathlib import Path

import attrs
from tokenizers import Encoding
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from kvpolicy_reasoner import REASONER, REASONER_VERBOSE, SMOLLM2_REASONER
from kvpolicy_reasoner.model import export_model, new_model, new_verbose_model
from kvpolicy_reasoner.problems import ProblemSet, problems_of
from kvpolicy_reasoner.task import Difficulty, Problem
from kvpolicy_reasoner.tokenizer import build_tokenizer, build_verbose_tokenizer
from kvpolicy_reasoner.train.adapter import (
    build_chat_tokenizer,
    check_adapter,
    export_adapter,
    new_adapter,
)
from kvpolicy_reasoner.train.loss_weights import weigh_after_newlines, weigh_pieces
from kvpolicy_reasoner.train.optimizer import PEAK_LR


@attrs.frozen
class Recipe:
    """Training settings of one bundled reasoner.

    Attributes:
        problems: The training problems.
        curriculum: Difficulties, each with the share of the run at which it ends; the standard
            difficulty follows the last.
        build_tokenizer: Builds the tokenizer.
        weigh: Computes the loss weights of a trace.
        new_model: Builds the initial model from a seed; the parameters that require gradients are
            trained.
        export: Writes what was trained, with the tokenizer, into a folder.
        peak_lr: Maximum learning rate.
        tokens: Tokens of a whole run.
        min_tokens_per_step: Minimum tokens per step, so that the longest problem fits.
        tokens_per_step: Tokens per step, as for the bundled weights.
        evaluate_every_steps: Steps between two measurements of the accuracy.
        check: Raises a `KVPolicyError` if what the training needs is not installed.
    """

    problems: ProblemSet
    curriculum: tuple[tuple[float, Difficulty], ...]
    build_tokenizer: Callable[[], PreTrainedTokenizerFast]
    weigh: Callable[[Problem, Encoding], list[float]]
    new_model: Callable[[int], PreTrainedModel]
    export: Callable[[PreTrainedModel, PreTrainedTokenizerFast, Path], None]
    peak_lr: float
    tokens: int
    min_tokens_per_step: int
    tokens_per_step: int = 8192
    evaluate_every_steps: int = 400
    check: Callable[[], None] = lambda: None

    @property
    def name(self) -> str:
        """Name of the reasoner."""
        return self.problems.name

    def difficulty(self, progress: float) -> Difficulty:
        """Difficulty of the problems at a point of the run.

        Args:
            progress: Share of the run that is done.

        Returns:
            Ranges of depth and number of facts.
        """
        levels = (level for end, level in self.curriculum if progress < end)
        return next(levels, self.problems.standard)


_RECIPES = {
    REASONER: Recipe(
        problems=problems_of(REASONER),
        curriculum=(
            (0.12, Difficulty(min_depth=1, max_depth=3, min_facts=6, max_facts=6)),
            (0.25, Difficulty(min_depth=2, max_depth=5, min_facts=5, max_facts=10)),
        ),
        build_tokenizer=build_tokenizer,
        weigh=weigh_after_newlines,
        new_model=new_model,
        export=export_model,
        peak_lr=PEAK_LR,
        tokens=36_000_000,
        min_tokens_per_step=1024,
    ),
    REASONER_VERBOSE: Recipe(
        problems=problems_of(REASONER_VERBOSE),
        curriculum=(
            (0.08, Difficulty(min_depth=1, max_depth=3, min_facts=6, max_facts=8)),
            (0.20, Difficulty(min_depth=2, max_depth=5, min_facts=5, max_facts=12)),
        ),
        build_tokenizer=build_verbose_tokenizer,
        weigh=weigh_pieces,
        new_model=new_verbose_model,
        export=export_model,
        peak_lr=3e-3,  # it starts from trained weights
        tokens=61_000_000,
        min_tokens_per_step=2048,
    ),
    SMOLLM2_REASONER: Recipe(
        problems=problems_of(SMOLLM2_REASONER),
        curriculum=(
            (0.15, Difficulty(min_depth=2, max_depth=5, min_facts=6, max_facts=12)),
            # To the end: half of these traces have 500 tokens or more.
            (1.0, Difficulty(min_depth=3, max_depth=10, min_facts=6, max_facts=16)),
        ),
        build_tokenizer=build_chat_tokenizer,
        weigh=weigh_after_newlines,
        new_model=new_adapter,
        export=export_adapter,
        peak_lr=1e-3,
        tokens=1_400_000,
        min_tokens_per_step=1536,
        tokens_per_step=1536,
        evaluate_every_steps=300,
        check=check_adapter,
    ),
}


def recipe_of(name: str) -> Recipe:
    """Look up the training recipe of a bundled reasoner.

    Args:
        name: Name of the reasoner.

    Returns:
        Its recipe.

    Raises:
        KVPolicyError: The reasoner does not exist.
    """
    return _RECIPES[problems_of(name).name]
