"""Parts of sequences: what one has held at some token, without the rows of an earlier part.

Parts follow each other: of one prompt, a part for each block of its tokens. Each has the rows that
have come since the one before, so that the parts of a prompt hold every row once, and prompts with
equal beginnings share parts. What changes with every token it has as a whole: accumulators of all
rows, queries, exact copies of the newest rows, states of fixed size, registers and memory.
"""

import sys
from collections import abc
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.cache.slot_contents import LayerContents
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot


@attrs.frozen(eq=False)
class SequencePart:
    """What a sequence has held, as far as the part before does not.

    Attributes:
        snapshot: The sequence. Its layers hold their newest rows only, but accumulators of all
            rows; its tokens are left out.
        taken: For each layer the rows of the part before that come first, as an interval of its
            columns ``[first, last)``.
        num_answer: Of the tokens of the sequence, those of its newest answer.
    """

    snapshot: SequenceSnapshot
    taken: tuple[tuple[int, int], ...]
    num_answer: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether it takes no rows of another part."""
        return all(first == last for first, last in self.taken)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, and about those of what policies remember."""
        tensors = [*self.snapshot.contents.tensors]
        if self.snapshot.states is not None:
            tensors.append(self.snapshot.states)
        memory = _num_bytes(dict(self.snapshot.memory))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors) + memory

    def num_columns(self, layer_idx: int) -> int:
        """Rows of a layer, those taken included; of the fullest head, if heads share them."""
        first, last = self.taken[layer_idx]
        return last - first + self.snapshot.contents.layers[layer_idx].num_rows

    def to(self, device: str | torch.device) -> "SequencePart":
        """The same with its rows on a device."""
        return attrs.evolve(self, snapshot=self.snapshot.to(device))


def joined(
    parts: abc.Sequence[SequencePart],
    token_ids: abc.Sequence[int],
    devices: abc.Sequence[torch.device],
) -> SequenceSnapshot:
    """The sequence that the last of some parts has been taken of.

    Args:
        parts: Parts that follow each other; the first takes no rows of another.
        token_ids: The tokens of the sequence.
        devices: Where the rows of each layer are wanted.
    """
    last = parts[-1]
    contents = last.snapshot.contents
    layers = [_joined_layer(parts, index, device) for index, device in enumerate(devices)]
    num_before = len(token_ids) - last.num_answer
    return attrs.evolve(
        last.snapshot,
        prompt=tuple(token_ids[:num_before]),
        tokens=tuple(token_ids[num_before:]),
        contents=attrs.evolve(contents, layers=tuple(layers)),
    )


def _joined_layer(
    parts: abc.Sequence[SequencePart], layer_idx: int, device: torch.device
) -> LayerContents:
    layers = [part.snapshot.contents.layers[layer_idx] for part in parts]
    pieces = _pieces(parts, layer_idx)
    last = layers[-1]

    def rows(read: abc.Callable[[LayerContents], Tensor]) -> Tensor:
        found = [read(layers[index])[:, first:end] for index, first, end in pieces]
        return torch.cat(found, dim=1).to(device)

    def track(name: str) -> Tensor:
        if name in ACCUMULATORS:
            return last.tracks[name].to(device)
        return rows(lambda layer: layer.tracks[name])

    return attrs.evolve(
        last,
        keys=rows(lambda layer: layer.keys),
        values=rows(lambda layer: layer.values),
        positions=rows(lambda layer: layer.positions),
        tracks={name: track(name) for name in last.tracks},
        window=None if last.window is None else last.window.to(device),
        states={name: state.to(device) for name, state in last.states.items()},
        exact={name: newest.to(device) for name, newest in last.exact.items()},
    )


def _pieces(parts: abc.Sequence[SequencePart], layer_idx: int) -> list[tuple[int, int, int]]:
    """Where the rows of a layer are: number of a part, and an interval of its own rows."""
    found: list[tuple[int, int, int]] = []
    first, end = 0, parts[-1].num_columns(layer_idx)
    for index in reversed(range(len(parts))):
        taken = parts[index].taken[layer_idx]
        num_taken = taken[1] - taken[0]
        if end > num_taken or not found:  # a piece without rows has their shape, at least
            found.append((index, max(first - num_taken, 0), max(end - num_taken, 0)))
        if first >= num_taken:
            break
        first, end = taken[0] + first, taken[0] + min(end, num_taken)
    found.reverse()
    return found


def _num_bytes(value: Any) -> int:
    """About the bytes of plain data and tensors."""
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(_num_bytes(key) + _num_bytes(one) for key, one in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return size + sum(map(_num_bytes, value))
    return size
