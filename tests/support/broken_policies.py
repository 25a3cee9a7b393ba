"""Policies that break one clause of the contract each, as real ones have, or might.

`BROKEN` maps the clause to a class; nothing else is wrong with it.
"""

from collections import defaultdict
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.cache.rows import LayerRows, Tracks
from kvpolicy.hooks.defaults import top_rows
from kvpolicy.state import Memory


def key_lengths(keys: Tensor) -> Tensor:
    return keys.float().norm(dim=-1)


@attrs.define
class Building:
    """Lacks ``eq=False``: pluggy would compare tensors."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys)


@attrs.define(eq=False)
class Answers:
    """Answers per sequence and forgets the heads."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys).mean(dim=1)


@attrs.define(eq=False)
class Sizes:
    """Takes the ten best rows, however few there are."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        scores = key_lengths(keys)
        best = scores.topk(10, dim=2).indices
        return scores.scatter_add(2, best, torch.ones_like(scores))


@attrs.define(eq=False)
class GroupedQueries:
    """Takes query heads for KV heads."""

    @hookimpl
    def score(self, attn_weights: Tensor) -> Tensor:
        return attn_weights.mean(dim=2)


@attrs.define(eq=False)
class Precision:
    """Multiplies keys with a matrix in float32."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return (keys @ torch.ones(keys.shape[3], 1)).squeeze(3)


@attrs.define(eq=False)
class Nan:
    """Compares directions, and divides by the length of a key that is zero."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        keys = keys.float()
        directions = keys / keys.norm(dim=-1, keepdim=True)
        return -(directions @ directions.transpose(2, 3)).mean(dim=3)


@attrs.define(eq=False)
class ReadOnly:
    """Normalises the keys where they are."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        keys.sub_(keys.mean(dim=2, keepdim=True))
        return key_lengths(keys)


@attrs.define(eq=False)
class Budget:
    """Keeps one row more, for luck."""

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        return top_rows(scores, budget + 1)


@attrs.define(eq=False)
class Order:
    """Answers in order of score."""

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        return scores.topk(budget, dim=2).indices


@attrs.define(eq=False)
class Protected:
    """Promises the newest row and lets it go."""

    protects: ClassVar[tuple[int, int]] = (0, 1)

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return -positions.double()


@attrs.define(eq=False)
class Eviction:
    """Says it is done, having kept the last rows instead of the chosen ones."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return -positions.double()

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        num_rows, num_kept = rows.positions.shape[2], keep.shape[2]
        last = torch.arange(num_rows - num_kept, num_rows)
        rows.keep(last.expand(keep.shape))
        return True


@attrs.define(eq=False)
class TracksInPlace:
    """Counts compactions in a track, in place: lost where the tensor is a copy."""

    tracks: ClassVar[tuple[str, ...]] = ("age",)

    @hookimpl
    def score(self, keys: Tensor, tracks: Tracks) -> Tensor:
        age = tracks["age"]
        age.add_(1)
        return key_lengths(keys) - age


@attrs.define(eq=False)
class TracksLeftBehind:
    """Replaces the rows in an eviction of its own, and forgets what travels with them."""

    tracks: ClassVar[tuple[str, ...]] = ("first_score",)

    @hookimpl
    def score(self, keys: Tensor, tracks: Tracks) -> Tensor:
        known = tracks["first_score"]
        tracks["first_score"] = torch.where(known == 0, key_lengths(keys), known)
        return tracks["first_score"]

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        before = rows.track("first_score").clone()
        rows.keep(keep)
        rows.set_track("first_score", before)
        return True


@attrs.define(eq=False)
class Determinism:
    """Draws from the global generator."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return torch.rand(positions.shape)


@attrs.define(eq=False)
class OnItself:
    """Remembers on itself what it should in `memory`."""

    _seen: dict[int, Tensor] = attrs.field(factory=dict, init=False)

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor) -> Tensor:
        scores = key_lengths(keys)
        self._seen[layer_idx] = self._seen.get(layer_idx, 0) + scores.mean()
        return (scores - self._seen[layer_idx]).abs()


@attrs.define(eq=False)
class Hoards:
    """Keeps a list of every memory it was ever given."""

    _all: list[Any] = attrs.field(factory=list, init=False)

    @hookimpl
    def score(self, keys: Tensor, memory: Memory) -> Tensor:
        self._all += memory.sequences
        return key_lengths(keys)


@attrs.define(eq=False)
class Cancellation:
    """Clears what it holds on itself when a sequence has all its tokens, if it ever has.

    `schedule` tells how many there will be; a request that is cancelled has fewer.
    """

    _open: list[int] = attrs.field(factory=list, init=False)

    @hookimpl
    def schedule(self, waiting: Any, num_free: int, num_active: int) -> Any:
        del num_free
        if num_active:
            return []
        self._open = [waiting[0].prompt_len + waiting[0].max_new_tokens - 1, *self._open]
        return [[waiting[0].id]]

    @hookimpl
    def due(self, num_rows: Tensor, seq_len: Tensor) -> Tensor:
        if self._open and int(seq_len[0]) >= self._open[0]:
            self._open = []
        return torch.zeros_like(num_rows, dtype=torch.bool)

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        newer = positions.double()
        return -newer if len(self._open) > 1 else newer


@attrs.define(eq=False)
class Chunks:
    """Judges rows by the chunk of the prompt they came in."""

    @hookimpl
    def observe(self, start: int, token_ids: Tensor, memory: Memory) -> None:
        memory.of(self)[0].setdefault("chunks", []).append((start, len(token_ids)))

    @hookimpl
    def score(self, positions: Tensor, memory: Memory) -> Tensor:
        scores = torch.zeros(positions.shape)
        for b, notes in enumerate(memory.of(self)):
            start, length = notes["chunks"][0]
            first = (positions[b] >= start) & (positions[b] < start + length)
            scores[b] = torch.where(first, 1.0, -1.0)
        return scores


@attrs.define(eq=False)
class RunningBatch:
    """Gives every sequence of the batch a little noise of its own, by its place."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        noise = torch.zeros(positions.shape)
        for b in range(len(positions)):
            draw = torch.Generator().manual_seed(b)
            noise[b] = torch.rand(positions.shape[1:], generator=draw)
        return noise


@attrs.define(eq=False)
class Neighbours:
    """Subtracts the mean over the batch."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return (keys.float() - keys.float().mean(dim=0)).norm(dim=-1) + key_lengths(keys)


@attrs.define(eq=False)
class Schedule:
    """Admits whoever waits, free slot or not."""

    @hookimpl
    def schedule(self, waiting: Any) -> list[list[int]]:
        return [[request.id for request in waiting]]


@attrs.define(eq=False, kw_only=True)
class Knobs:
    """Takes a share in percent, and keeps it as a fraction."""

    recent: float = attrs.field(default=50, converter=lambda percent: percent / 100)

    @hookimpl
    def score(self, keys: Tensor, budget: int) -> Tensor:
        scores = key_lengths(keys)
        newest = max(int(budget * self.recent), 1)
        scores[:, :, -newest:] = torch.inf
        return scores


BROKEN: dict[str, list[type]] = defaultdict(
    list,
    {
        "building": [Building],
        "answers": [Answers],
        "sizes": [Sizes],
        "grouped_queries": [GroupedQueries],
        "precision": [Precision],
        "nan": [Nan],
        "read_only": [ReadOnly],
        "budget": [Budget],
        "order": [Order],
        "protected": [Protected],
        "eviction": [Eviction],
        "tracks": [TracksInPlace, TracksLeftBehind],
        "determinism": [Determinism],
        "memory": [OnItself, Hoards],
        "cancellation": [Cancellation],
        "chunks": [Chunks],
        "slots": [RunningBatch],
        "neighbours": [Neighbours],
        "schedule": [Schedule],
        "knobs": [Knobs],
    },
)
