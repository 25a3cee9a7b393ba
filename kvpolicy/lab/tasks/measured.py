"""Tasks that measure a model along a text, for models and texts that no grader knows."""

from collections.abc import Sequence

import attrs

from kvpolicy.entry_points import default_name
from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.agreement import Agreement
from kvpolicy.lab.tasks.measures import Measure
from kvpolicy.lab.tasks.perplexity import Perplexity
from kvpolicy.lab.tasks.task import Item, Split, load_task, spell

# The default of ``of``; ``None`` if no installed package sets one.
_DEFAULT_TASK = default_name("task")


@attrs.frozen
class MeasuredTask:
    """Another task's items, measured in another way.

    Attributes:
        family: What the user types.
        of: The other task, as a user types it.
        measure: How a cell is measured.
    """

    family: str
    of: str
    measure: Measure

    @property
    def name(self) -> str:
        """What the user types."""
        return spell(self.family, {"of": self.of}, {})

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Item]:
        """Draw ``n`` items of the other task."""
        items: Sequence[Item] = load_task(self.of).items(n, seed=seed, split=split)
        if self.measure.reads_reference and any(item.reference is None for item in items):
            msg = f"task '{self.of}' has no reference texts, which {self.family} measures along"
            raise TaskError(msg)
        return [_with_prompt(item, keep=self.measure.reads_reference) for item in items]


def perplexity(of: str | None = _DEFAULT_TASK) -> MeasuredTask:
    """How likely a model finds a task's reference texts, or a file's texts, under eviction."""
    return MeasuredTask("perplexity", _named("perplexity", of), Perplexity())


def agreement(of: str | None = _DEFAULT_TASK) -> MeasuredTask:
    """How far a model agrees with itself and the full cache, on any prompts."""
    return MeasuredTask("agreement", _named("agreement", of), Agreement())


def _named(family: str, of: str | None) -> str:
    if of is None:
        msg = f"task '{family}' needs another task, whose texts it takes: {family}:of=TASK"
        raise TaskError(msg)
    return of


def _with_prompt(item: Item, *, keep: bool) -> Item:
    """Texts without a question are their own prompts where something has to be continued."""
    if keep or item.prompt or item.reference is None:
        return item
    return attrs.evolve(item, prompt=item.reference)
