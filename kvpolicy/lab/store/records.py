"""Groups and cells in the manifest of a run; lines are in `kvpolicy.lab.store.samples`."""

from typing import Any

import attrs


@attrs.frozen
class ColumnInfo:
    """What a table says of one quantity that a task measures.

    Attributes:
        name: Its name in files.
        title: What tables call it.
        heading: What plots call it, with its unit.
        is_share: Whether it lies between 0 and 1.
    """

    name: str
    title: str
    heading: str
    is_share: bool


@attrs.frozen
class Group:
    """One model asked one task with one seed.

    Attributes:
        group: Its id, 16 hexadecimal digits: a hash of all that decides what its samples are.
        model: The model, as it was typed.
        model_fingerprint: Hash of its configuration and weights.
        device: Where it ran.
        dtype: Precision of its weights.
        task: The task with its options, as it is spelled.
        seed: Chose the items, and draws the tokens.
        split: Split of the task that the items are of.
        n: Items.
        attempts: Times each was asked.
        prompt_hash: Hash of the items' prompts.
        sampling: How tokens were drawn, in words.
        temperature: The same in numbers; 0 took the likeliest.
        top_p: Share of the likeliest tokens that were drawn from.
        max_new_tokens: The most tokens a sample could generate.
        slots: Samples decoded together.
        measure: How cells were measured, such as ``"answers"``.
        columns: What tables say of it, the one that is compared first.
    """

    group: str
    model: str
    model_fingerprint: str
    device: str
    dtype: str
    task: str
    seed: int
    split: str
    n: int
    attempts: int
    prompt_hash: str
    sampling: str
    temperature: float
    top_p: float
    max_new_tokens: int
    slots: int
    measure: str
    columns: tuple[ColumnInfo, ...]


@attrs.frozen
class Cell:
    """One group under one resolved plan.

    Attributes:
        cell: Its id, 16 hexadecimal digits: a hash of the group's and the plan's.
        group: Id of its group.
        series: Which line of a plot it is a point of.
        budget: Rows that stay after a compaction, the mean over the layers that compact;
            ``None`` if nothing ever leaves.
        buffer: Rows that may join before the next compaction; ``None`` likewise.
        knobs: Values by ``policy.knob``, of the knobs that were varied.
        plan: Digest of the resolved plan.
        resolved: The resolved plan, as plain data.
    """

    cell: str
    group: str
    series: str
    budget: float | None
    buffer: float | None
    knobs: dict[str, Any]
    plan: str
    resolved: dict[str, Any]
