"""Training recipes: the settings in which the training runs of the reasoners differ."""

from collections.abc import Callable

import attrs
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from kvpolicy_reasoner import REASONER, REASONER_VERBOSE
from kvpolicy_reasoner.model import new_model, new_verbose_model
from kvpolicy_reasoner.problems import ProblemSet, problems_of
from kvpolicy_reasoner.task import Difficulty, Problem
from kvpolicy_reasoner.tokenizer import build_tokenizer, build_verbose_tokenizer
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
        new_model: Builds the initial model from a seed.
        peak_lr: Maximum learning rate.
        tokens: Tokens of a whole run.
        min_tokens_per_step: Minimum tokens per step, so that the longest problem fits.
    """

    problems: ProblemSet
    curriculum: tuple[tuple[float, Difficulty], ...]
    build_tokenizer: Callable[[], PreTrainedTokenizerFast]
    weigh: Callable[[Problem, Encoding], list[float]]
    new_model: Callable[[int], Qwen2ForCausalLM]
    peak_lr: float
    tokens: int
    min_tokens_per_step: int

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
        peak_lr=3e-3,  # it starts from trained weights
        tokens=61_000_000,
        min_tokens_per_step=2048,
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
