"""What a trace knows of one hook call: plain records, ready for JSON."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.engine.request import Waiting
from kvpolicy.engine.sequence import LiveSequence


@attrs.frozen
class TensorInfo:
    """What a tensor looks like."""

    dtype: str
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        where = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.dtype}{list(self.shape)}{where}"


@attrs.frozen
class Part:
    """What one policy did in a call.

    Attributes:
        policy: Its name.
        us: Microseconds it took; of a wrapper, without those it wraps.
        wrapper: Whether it wraps others' answers.
        answer: What it answered, described; ``None`` for no opinion.
        error: What it raised.
    """

    policy: str
    us: float
    wrapper: bool
    answer: object = None
    error: str | None = None


@attrs.frozen
class Left:
    """Rows that a compaction removes from one sequence in one layer.

    Attributes:
        request: Number of the request in its run.
        heads: KV heads from which these rows leave.
        ranges: First and last position of each run of neighbours.
        texts: What the tokens of each range say, if the engine has a tokenizer.
    """

    request: int
    heads: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    texts: tuple[str, ...] | None

    @property
    def num_rows(self) -> int:
        """Rows that leave each of the heads."""
        return sum(last - first + 1 for first, last in self.ranges)


@attrs.frozen
class HookCall:
    """One hook call.

    Attributes:
        number: Its place among all calls of the recording, from 0.
        hook: The hook.
        layer: The layer it was about, if it was about one.
        requests: Numbers of the requests it was about, in the order of the batch axis.
        tokens: Tokens that each of them had generated.
        arguments: What policies of the stack, or else the defaults, named: tensors as
            `TensorInfo`, numbers as they are.
        answered_by: Policies that answered; ``None`` if nobody did.
        answer: The answer after all wrappers, described as arguments are.
        us: Microseconds in all, with the check of the answer.
        parts: What each policy did, in the order in which they were done.
        error: Why the call failed, if it did.
        left: Rows that leave, for `select`, if the recording was to keep them.
    """

    number: int
    hook: str
    layer: int | None
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    arguments: Mapping[str, object]
    answered_by: str | None
    answer: object
    us: float
    parts: tuple[Part, ...]
    error: str | None = None
    left: tuple[Left, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return attrs.asdict(self)


def describe(value: object) -> object:
    """What stands for an argument or an answer in a trace; ``None`` for what has no short form."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorInfo(dtype, tuple(value.shape), str(value.device))
    if isinstance(value, Waiting):
        return value.id
    if isinstance(value, list | tuple):
        return [describe(one) for one in value]
    return value if isinstance(value, bool | int | float | str) else None


def rows_leaving(
    positions: Tensor, keep: Tensor, sequences: Sequence[LiveSequence], tokenizer: Any
) -> tuple[Left, ...]:
    """The rows that an answer to `select` removes.

    Args:
        positions: Of the rows held, ``[B, H_kv, T]``.
        keep: Rows that stay, ``[B, H_kv, K]``.
        sequences: The sequences, B of them.
        tokenizer: The engine's, if there is one.
    """
    leaves = torch.ones_like(positions, dtype=torch.bool).scatter(2, keep, False)
    found = []
    for b, sequence in enumerate(sequences):
        by_rows: dict[tuple[int, ...], list[int]] = {}
        for head in range(positions.shape[1]):
            gone = tuple(positions[b, head][leaves[b, head]].tolist())
            by_rows.setdefault(gone, []).append(head)
        for gone, heads in by_rows.items():
            ranges = _ranges(gone)
            texts = None
            if tokenizer is not None:
                ids = (sequence.token_ids(first, last + 1) for first, last in ranges)
                texts = tuple(tokenizer.decode(one) for one in ids)
            found.append(Left(sequence.id, tuple(heads), ranges, texts))
    return tuple(found)


def _ranges(rising: Sequence[int]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for place in rising:
        if ranges and ranges[-1][1] == place - 1:
            ranges[-1] = (ranges[-1][0], place)
        else:
            ranges.append((place, place))
    return tuple(ranges)
