"""Tasks that give the examples of another task another metric."""

from collections import abc

import attrs

from kvpolicy.entry_points import default_name
from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.task import Example, Metric, Split, load_task, spell

# The default of the option ``of``; ``None`` if no installed package sets one.
DEFAULT_TASK = default_name("task")


@attrs.frozen
class DerivedTask:
    """The examples of another task with another metric.

    Attributes:
        family: Name of this task.
        of: The other task, as a user types it.
        metric: The metric.
    """

    family: str
    of: str
    metric: Metric

    @property
    def name(self) -> str:
        """What the user types."""
        return spell(self.family, {"of": self.of}, {})

    def examples(self, n: int, *, seed: int, split: Split = "test") -> abc.Sequence[Example]:
        """Draw ``n`` examples of the other task."""
        examples: abc.Sequence[Example] = load_task(self.of).examples(n, seed=seed, split=split)
        if not self.metric.reads_reference:
            return [_with_prompt(example) for example in examples]
        if any(example.reference is None for example in examples):
            msg = f"task '{self.of}' has no reference texts, which {self.family} needs"
            raise TaskError(msg)
        return examples


def derived(family: str, of: str | None, metric: Metric) -> DerivedTask:
    """Make a derived task.

    Args:
        family: Its name.
        of: The other task.
        metric: The metric.

    Raises:
        TaskError: No other task is named.
    """
    if of is None:
        msg = f"task '{family}' needs the name of another task: {family}:of=TASK"
        raise TaskError(msg)
    return DerivedTask(family, of, metric)


def _with_prompt(example: Example) -> Example:
    """A text without a question becomes the prompt that the model continues."""
    if example.prompt or example.reference is None:
        return example
    return attrs.evolve(example, prompt=example.reference)
