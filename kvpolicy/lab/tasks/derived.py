"""Tasks that give a metric the examples of another task, or passages of a text."""

from collections import abc
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.prose import PROSE, open_prose
from kvpolicy.lab.tasks.task import (
    Example,
    Metric,
    Split,
    Task,
    fitted,
    is_task_or_data_set,
    load_task,
    require_tokenizer,
    spell,
)

# Defaults of passages: tokens of the prompt, and of the reference behind it.
PROMPT_TOKENS = 1024
SCORED_TOKENS = 256


@attrs.frozen
class DerivedTask:
    """The examples of another task with another metric.

    Attributes:
        family: Name of this task.
        of: The other task, as a user types it.
        metric: The metric.
        tokenizer: The tokenizer of the model, where it is known.
    """

    family: str
    of: str
    metric: Metric
    tokenizer: Any = attrs.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """What the user types."""
        return spell(self.family, {"of": self.of}, {})

    def for_tokenizer(self, tokenizer: Any) -> "DerivedTask":
        """The same, of the other task for a model."""
        return attrs.evolve(self, tokenizer=tokenizer)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> abc.Sequence[Example]:
        """Draw ``n`` examples of the other task."""
        other: Task = load_task(self.of)
        if self.tokenizer is not None:
            other = fitted(other, self.tokenizer)
        examples = other.examples(n, seed=seed, split=split)
        if not self.metric.reads_reference:
            return [_with_prompt(example) for example in examples]
        if any(example.reference is None for example in examples):
            msg = f"task '{self.of}' has no reference texts, which {self.family} needs"
            raise TaskError(msg)
        return examples


@attrs.frozen
class PassageTask:
    """Passages of a text with a metric. They are no messages, and get no chat template.

    Attributes:
        family: Name of this task.
        metric: The metric; if it reads references, passages have one.
        of: The text: `PROSE` or a file.
        prompt_tokens: Tokens of a prompt, by the model's tokenizer; fewer by less than a word.
        scored_tokens: Tokens of the reference, which follows the prompt in the text.
        tokenizer: The tokenizer of the model, where it is known.
    """

    family: str
    metric: Metric
    of: str = PROSE
    prompt_tokens: int = PROMPT_TOKENS
    scored_tokens: int = SCORED_TOKENS
    tokenizer: Any = attrs.field(default=None, repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("prompt_tokens", "scored_tokens"):
            if (number := getattr(self, name)) < 1:
                msg = f"task '{self.family}' got {name}={number}; expected 1 or more"
                raise TaskError(msg)

    @property
    def name(self) -> str:
        """What the user types."""
        names = ("of", "prompt_tokens", "scored_tokens")
        fields = attrs.fields_dict(type(self))
        options = {name: getattr(self, name) for name in names}
        return spell(self.family, options, {name: fields[name].default for name in names})

    def for_tokenizer(self, tokenizer: Any) -> "PassageTask":
        """The task for a model."""
        return attrs.evolve(self, tokenizer=tokenizer)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> abc.Sequence[Example]:
        """Draw ``n`` passages, or as many as the text has."""
        text = open_prose(self.of)
        require_tokenizer(self)
        lengths = [self.prompt_tokens]
        if self.metric.reads_reference:
            lengths.append(self.scored_tokens)
        drawn = text.passages(n, lengths, self.tokenizer, seed=seed, split=split)
        return [
            Example(
                index=index,
                prompt=passage.parts[0],
                answer="",
                facets=passage.facets,
                reference=passage.parts[1] if self.metric.reads_reference else None,
            )
            for index, passage in enumerate(drawn)
        ]


def derived(
    family: str,
    of: str,
    metric: Metric,
    *,
    prompt_tokens: int | None = None,
    scored_tokens: int | None = None,
) -> DerivedTask | PassageTask:
    """Make a task from a metric.

    Args:
        family: Its name.
        of: A text for passages: `PROSE`, or a file if a number of tokens is given. Else
            another task, or a file or hub id of prompts.
        metric: The metric.
        prompt_tokens: Tokens of each prompt.
        scored_tokens: Tokens of each reference.

    Raises:
        TaskError: Numbers of tokens are given for the prompts of another task.
    """
    given = {"prompt_tokens": prompt_tokens, "scored_tokens": scored_tokens}
    lengths = {name: number for name, number in given.items() if number is not None}
    if of != PROSE and not lengths:
        return DerivedTask(family, of, metric)
    if is_task_or_data_set(of):
        msg = (
            f"task '{family}' got {next(iter(lengths))} and of={of}, whose prompts have lengths "
            "of their own; leave one out, or give a text: of=FILE.txt"
        )
        raise TaskError(msg)
    return PassageTask(family, metric, of, **lengths)


def _with_prompt(example: Example) -> Example:
    """A text without a question becomes the prompt that the model continues."""
    if example.prompt or example.reference is None:
        return example
    return attrs.evolve(example, prompt=example.reference)
