"""The records a run leaves: of each sample, each item, and each cell that was run in one go."""

import hashlib
import json
from typing import Any, Self, TypeVar

import attrs

from kvpolicy.errors import OutputError

Record = TypeVar("Record")


@attrs.frozen
class Sample:
    """One prompt answered under one plan; every record stands by itself.

    Attributes:
        key: Hash of everything the sample depends on, see `sample_key`.
        cell: Id of the cell: of the group under the plan.
        group: Id of the group: of model, task and seed, with all that goes with them.
        model: The model, as typed.
        task: The task, with its options.
        seed: Chose the items.
        series: What tables and plots call the plan, whatever its budget.
        budget: Rows that stay after a compaction, the mean over the layers that compact;
            ``None`` if nothing ever leaves.
        buffer: Rows that may join before the next compaction; ``None`` likewise.
        plan: Digest of the resolved plan.
        item: Number of the item in its task and seed.
        attempt: Which attempt at the item it is, from 0.
        correct: Whether the grader accepted the text; never for a request that failed, and
            ``None`` if nothing was graded or the grader had no verdict.
        ungraded: Why the grader had no verdict, if it had none.
        finish_reason: ``"stop"``, ``"length"`` (cut off at ``max_new_tokens``) or ``"error"``.
        error: What went wrong, if anything did.
        prompt_len: Tokens of the prompt.
        num_tokens: Tokens generated.
        compactions: Times at which at least one layer was compacted.
        rows_evicted: Rows that left, summed over layers and counted per KV head.
        peak_rows: The most rows any layer held.
        peak_bytes: Bytes of keys and values in those rows, summed over layers.
        prefill_s: Seconds in forwards of this prompt (shared with its group).
        decode_s: Seconds from the first token to the last.
        facets: What a report may group by, such as the difficulty of the item.
        values: What was measured, by name, where a task measures rather than grades.
        text: What the model generated.
    """

    key: str
    cell: str
    group: str
    model: str
    task: str
    seed: int
    series: str
    budget: float | None
    buffer: float | None
    plan: str
    item: int
    attempt: int
    correct: bool | None
    ungraded: str | None
    finish_reason: str
    error: str | None
    prompt_len: int
    num_tokens: int
    compactions: int
    rows_evicted: int
    peak_rows: int
    peak_bytes: int
    prefill_s: float
    decode_s: float
    facets: dict[str, int | str]
    values: dict[str, float]
    text: str

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """Read a record back.

        Args:
            record: What `attrs.asdict` made of a sample.

        Raises:
            OutputError: The record has other fields.
        """
        return _structure(cls, record)


@attrs.frozen
class ItemRecord:
    """What one item of a group asks, for those who read samples later.

    Attributes:
        group: Id of the group.
        model: The model, as typed: it words prompts in its own chat template.
        task: The task, with its options.
        seed: Chose the items.
        item: Number of the item in its task and seed.
        prompt: What the model is given.
        answer: What a right text contains, in the words of the task's grader.
        reference: A text that answers the prompt, if somebody wrote one.
        facets: What a report may group by, such as the difficulty.
    """

    group: str
    model: str
    task: str
    seed: int
    item: int
    prompt: str
    answer: str
    reference: str | None
    facets: dict[str, int | str]

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """Read a record back.

        Args:
            record: What `attrs.asdict` made of an item.

        Raises:
            OutputError: The record has other fields.
        """
        return _structure(cls, record)


@attrs.frozen
class CellTiming:
    """What one cell cost when all its samples were run in one go.

    A cell that was interrupted has none: its batches were not full, so that its speed
    would say something about the interruption.

    Attributes:
        cell: Id of the cell.
        num_requests: Samples of the cell.
        new_tokens: Tokens generated.
        elapsed_s: Seconds from the first prompt to the last result.
        policy_s: Seconds of policy work within decode steps: observing, scoring, selecting,
            compacting and steering.
        decode_s: Seconds in decode steps, compactions included.
        peak_kv_bytes: Bytes of the cache of all slots at its largest.
    """

    cell: str
    num_requests: int
    new_tokens: int
    elapsed_s: float
    policy_s: float
    decode_s: float
    peak_kv_bytes: int

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """Read a record back.

        Args:
            record: What `attrs.asdict` made of a timing.

        Raises:
            OutputError: The record has other fields.
        """
        return _structure(cls, record)


def sample_key(
    *,
    plan: str,
    model: str,
    task: str,
    measure: str,
    item: int,
    prompt: str,
    attempt: int,
    seed: int,
    sampling: str,
    max_new_tokens: int,
    version: str,
) -> str:
    """Hash everything that decides what a sample will be.

    Args:
        plan: Digest of the resolved plan.
        model: Fingerprint of the model.
        task: The task, with its options: it grades.
        measure: What is measured.
        item: Number of the item.
        prompt: The prompt's text, the right answer, and whatever else is read of the item.
        attempt: Which attempt at the item it is.
        seed: Seed of the run.
        sampling: How tokens are drawn.
        max_new_tokens: The most tokens to generate.
        version: Of kvpolicy.

    Returns:
        32 hexadecimal digits.
    """
    parts = [plan, model, task, measure, item, prompt, attempt, seed, sampling]
    parts += [max_new_tokens, version]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _structure(cls: type[Record], record: dict[str, Any]) -> Record:
    try:
        return cls(**record)
    except TypeError as error:
        msg = (
            f"a stored record does not have the fields of {cls.__name__} ({error}); it comes "
            "from another version of kvpolicy: choose another output folder."
        )
        raise OutputError(msg) from error
