"""The records an ablation leaves: one for each sample, one for each cell run in one go."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Self, TypeVar

import attrs

from kvpolicy.errors import OutputError

Record = TypeVar("Record")


@attrs.frozen
class Sample:
    """One prompt answered under one plan.

    Attributes:
        key: Hash of everything the sample depends on, see `sample_key`.
        cell: Digest of the resolved plan.
        item: Number of the item in its task and seed.
        correct: Whether the grader accepted the text; never for a request that failed, and
            ``None`` if nothing was graded or the grader had no verdict.
        finish_reason: ``"stop"``, ``"length"`` (cut off at ``max_new_tokens``) or ``"error"``.
        error: What went wrong, if anything did.
        text: What the model generated.
        prompt_len: Tokens of the prompt.
        num_tokens: Tokens generated.
        compactions: Times at which at least one layer was compacted.
        rows_evicted: Rows that left, summed over layers and counted per KV head.
        peak_rows: The most rows any layer held.
        peak_bytes: Bytes of keys and values in those rows, summed over layers.
        prefill_s: Seconds in forwards of this prompt (shared with its group).
        decode_s: Seconds from the first token to the last.
        attempt: Which attempt at the item it is, from 0.
        facets: What a report may group by, such as the difficulty of the item.
        values: What was measured, by name, where a task measures rather than grades.
        ungraded: Why the grader had no verdict, if it had none.
    """

    key: str
    cell: str
    item: int
    correct: bool | None
    finish_reason: str
    error: str | None
    text: str
    prompt_len: int
    num_tokens: int
    compactions: int
    rows_evicted: int
    peak_rows: int
    peak_bytes: int
    prefill_s: float
    decode_s: float
    attempt: int = 0
    facets: dict[str, int | str] = attrs.field(factory=dict)
    values: dict[str, float] = attrs.field(factory=dict)
    ungraded: str | None = None

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
class CellTiming:
    """What one cell cost when all its samples were run in one go.

    A cell that was interrupted has none: its batches were not full, so that its speed
    would say something about the interruption.

    Attributes:
        cell: Digest of the resolved plan.
        num_requests: Samples of the cell.
        new_tokens: Tokens generated.
        elapsed_s: Seconds from the first prompt to the last result.
        policy_s: Seconds in score, select and compaction.
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
    prompt: str,
    item: int,
    seed: int,
    max_new_tokens: int,
    more: Sequence[object] = (),
) -> str:
    """Hash everything that decides what a sample will be.

    Args:
        plan: Digest of the resolved plan.
        model: Fingerprint of the model.
        prompt: The prompt's text.
        item: Number of the item.
        seed: Seed of the run.
        max_new_tokens: The most tokens to generate.
        more: What else it depends on; nothing where an answer is graded that was generated
            greedily, so that runs of earlier versions can go on.

    Returns:
        32 hexadecimal digits.
    """
    parts = [plan, model, prompt, item, seed, max_new_tokens, *more]
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
