"""What an ablation asks a model, and how it tells a right answer from a wrong one."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.reasoner.bundled import BUNDLED

Split = Literal["train", "tune", "test"]


@attrs.frozen
class Item:
    """One question of a task.

    Attributes:
        index: Number of the item in its task and seed, from 0.
        prompt: What the model is given, ready to be tokenized.
        answer: What a right text contains, in the words of the task's grader.
        facets: What a report may group by, such as the difficulty.
    """

    index: int
    prompt: str
    answer: str
    facets: Mapping[str, int | str] = attrs.field(factory=dict)


class Task(Protocol):
    """A set of questions with a grader."""

    @property
    def name(self) -> str:
        """What the user types."""

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Item]:
        """Draw ``n`` items of a split; the same arguments give the same items.

        The split is ``"test"`` to report on, ``"tune"`` to choose settings on, ``"train"`` to
        learn from.
        """

    def grade(self, text: str, item: Item) -> bool:
        """Tell whether the generated ``text`` answers ``item``."""


@attrs.frozen
class ReasonerTask:
    """A bundled reasoner's problems.

    Attributes:
        name: Which reasoner's.
    """

    name: str

    def items(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Item]:
        """Draw ``n`` problems of a split; no problem is in two of them."""
        from kvpolicy.lab.reasoner.problemset import problems_of

        return [
            Item(
                index=index,
                prompt=problem.prompt,
                answer=problem.answer,
                facets=problem.facets,
            )
            for index, problem in enumerate(problems_of(self.name).draw(n, seed=seed, split=split))
        ]

    def grade(self, text: str, item: Item) -> bool:
        """Tell whether the last box of ``text`` holds the answer."""
        from kvpolicy.lab.reasoner.task import extract_answer

        return extract_answer(text) == item.answer


_TASKS: dict[str, Callable[[], Task]] = {name: partial(ReasonerTask, name) for name in BUNDLED}


def load_task(name: str) -> Task:
    """Find a task by its name.

    Args:
        name: Name of a task.

    Returns:
        The task.

    Raises:
        KVPolicyError: There is no such task.
    """
    if name not in _TASKS:
        near = difflib.get_close_matches(name, _TASKS)
        hint = f"did you mean {near[0]}? " if near else ""
        msg = f"no task named {name!r}; {hint}Tasks: {', '.join(sorted(_TASKS))}."
        raise KVPolicyError(msg)
    return _TASKS[name]()
