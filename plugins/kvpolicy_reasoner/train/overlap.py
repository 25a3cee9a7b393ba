"""Count the prompts that training shares with the held-out problems."""

from collections.abc import Sequence

import attrs

from kvpolicy.lab.tasks.task import Split
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.train.data import DataPlan, training_prompts

_NUM_HELD_OUT = 2000
_HELD_OUT: Sequence[Split] = ("tune", "test")


@attrs.frozen
class Overlap:
    """What was compared and how much of it was found twice.

    Attributes:
        num_training: Training prompts, with repetitions.
        num_distinct: Different training prompts.
        num_held_out: Held-out prompts they were compared with.
        num_shared: Held-out prompts that occur among the training prompts.
    """

    num_training: int
    num_distinct: int
    num_held_out: int
    num_shared: int


def count_overlap(plan: DataPlan) -> Overlap:
    """Draw the training prompts of a run again and look for held-out prompts among them.

    Args:
        plan: What the data depends on.

    Returns:
        The counts, over the first 2,000 problems of seed 0 of each held-out split.
    """
    problems = problems_of(plan.name)
    held_out = {
        problem.prompt
        for split in _HELD_OUT
        for problem in problems.draw(_NUM_HELD_OUT, seed=0, split=split)
    }
    prompts = list(training_prompts(plan))
    distinct = set(prompts)
    return Overlap(
        num_training=len(prompts),
        num_distinct=len(distinct),
        num_held_out=len(held_out),
        num_shared=len(held_out & distinct),
    )
