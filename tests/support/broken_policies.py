"""Policies that each break one clause of the contract, with realistic bugs.

`BROKEN` maps each clause to its classes, which satisfy all other clauses.
"""

from collections import defaultdict
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import Lookahead, hookimpl
from kvpolicy.cache.rows import LayerRows, Tracks
from kvpolicy.compat import has_states
from kvpolicy.hooks.defaults import top_rows
from kvpolicy.state import LayerWeights, Memory


def key_lengths(keys: Tensor) -> Tensor:
    return keys.float().norm(dim=-1)


@attrs.define
class Building:
    """Lacks ``eq=False``: pluggy would compare tensors."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys)


@attrs.define(eq=False)
class TakenTrack:
    """Declares a track under the name of what the engine accumulates."""

    tracks = ("attn_sums",)

    @hookimpl
    def score(self, attn_sums: Tensor) -> Tensor:
        return attn_sums


@attrs.define(eq=False)
class Answers:
    """Returns one score per row and sequence, without the head axis."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys).mean(dim=1)


@attrs.define(eq=False)
class ListsLayers:
    """Has a weight for each layer with attention, and takes it by the number of the layer."""

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor) -> Tensor:
        return key_lengths(keys) * (1.0, 0.5)[layer_idx]


@attrs.define(eq=False)
class ValuesLikeKeys:
    """Multiplies keys and values, whose sizes may differ."""

    @hookimpl
    def score(self, keys: Tensor, values: Tensor) -> Tensor:
        return (keys * values).float().sum(dim=-1)


@attrs.define(eq=False)
class Sizes:
    """Takes the ten best rows, even if there are fewer."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        scores = key_lengths(keys)
        best = scores.topk(10, dim=2).indices
        return scores.scatter_add(2, best, torch.ones_like(scores))


@attrs.define(eq=False)
class GroupedQueries:
    """Returns scores per query head instead of per KV head."""

    @hookimpl
    def score(self, attn_weights: Tensor) -> Tensor:
        return attn_weights.mean(dim=2)


@attrs.define(eq=False)
class Prompts:
    """Compares rows with those of the prompt, and relies on the first of these to be there."""

    protects: ClassVar[tuple[int, int]] = (1, 0)

    @hookimpl
    def score(self, keys: Tensor, positions: Tensor, prompt_len: Tensor) -> Tensor:
        of_prompt = (positions < prompt_len[:, None, None])[..., None]
        mean = (keys.double() * of_prompt).sum(dim=2) / of_prompt.sum(dim=2)
        return -(keys.double() - mean[:, :, None]).abs().mean(dim=3)


@attrs.define(eq=False)
class Precision:
    """Multiplies keys with a matrix in float32."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return (keys @ torch.ones(keys.shape[3], 1)).squeeze(3)


@attrs.define(eq=False)
class Nan:
    """Divides by the norm of a key, which may be zero."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        keys = keys.float()
        directions = keys / keys.norm(dim=-1, keepdim=True)
        return -(directions @ directions.transpose(2, 3)).mean(dim=3)


@attrs.define(eq=False)
class ReadOnly:
    """Changes the keys in place."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        keys.sub_(keys.mean(dim=2, keepdim=True))
        return key_lengths(keys)


@attrs.define(eq=False)
class Budget:
    """Keeps one row more than the budget."""

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        return top_rows(scores, budget + 1)


def best_of_all(scores: Tensor, num: int) -> Tensor:
    """The best rows of all heads together, as a mask."""
    best = scores.flatten(1).argsort(dim=1, descending=True, stable=True)[:, :num]
    mask = torch.zeros_like(scores, dtype=torch.bool).flatten(1).scatter(1, best, True)
    return mask.view(scores.shape)


@attrs.define(eq=False)
class SharedBudget:
    """Counts a row of each head beyond the budget that the heads share."""

    ragged: ClassVar[bool] = True

    @hookimpl
    def select(self, scores: Tensor, positions: Tensor, budget: int, heads: str) -> Tensor | None:
        if heads == "own":
            return None
        own_best = scores.argmax(dim=2, keepdim=True)
        raised = scores.scatter(2, own_best, torch.inf)
        return best_of_all(raised, (budget + 1) * scores.shape[1]) & (positions >= 0)


@attrs.define(eq=False)
class SharedFirst:
    """Keeps the first column of each head as a sink; a head may have no row there."""

    ragged: ClassVar[bool] = True

    @hookimpl
    def select(self, scores: Tensor, budget: int, heads: str) -> Tensor | None:
        if heads == "own":
            return None
        raised = scores.clone()
        raised[:, :, 0] = torch.inf
        return best_of_all(raised, budget * scores.shape[1])


@attrs.define(eq=False)
class Order:
    """Returns rows ordered by score."""

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        return scores.topk(budget, dim=2).indices


@attrs.define(eq=False)
class Protected:
    """Declares the newest row as protected and does not select it."""

    protects: ClassVar[tuple[int, int]] = (0, 1)

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        return torch.arange(budget).expand(*scores.shape[:2], budget).contiguous()


@attrs.define(eq=False)
class ProtectedByHook:
    """Protects half of its budget, by the hook, and does not select these rows."""

    @hookimpl
    def protect(self, positions: Tensor, budget: int) -> Tensor:
        num_rows = positions.shape[2]
        return (torch.arange(num_rows) >= num_rows - (budget + 1) // 2).expand(positions.shape)

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> Tensor:
        return torch.arange(budget).expand(*scores.shape[:2], budget).contiguous()


@attrs.define(eq=False)
class Eviction:
    """Keeps the last rows instead of the selected ones."""

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
class ValuesOfOneRow:
    """Replaces the values of all rows by those of the first."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys)

    @hookimpl
    def evict(self, rows: LayerRows, keep: Tensor) -> bool:
        rows.keep(keep, values=rows.values[:, :, :1])
        return True


@attrs.define(eq=False)
class TracksInPlace:
    """Counts compactions in a track in place, which is lost if the tensor is a copy."""

    tracks: ClassVar[tuple[str, ...]] = ("age",)

    @hookimpl
    def score(self, keys: Tensor, tracks: Tracks) -> Tensor:
        age = tracks["age"]
        age.add_(1)
        return key_lengths(keys) - age


@attrs.define(eq=False)
class TracksLeftBehind:
    """Evicts rows itself and restores the track of the rows before."""

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
class Weights:
    """Normalises the projection of the model instead of a copy."""

    @hookimpl
    def bind(self, weights: LayerWeights) -> Tensor:
        return weights.v.div_(weights.v.norm(dim=2, keepdim=True))

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys)


@attrs.define(eq=False)
class Annotations:
    """Compares what enters the attention with the mean over the tokens of the call."""

    tracks: ClassVar[tuple[str, ...]] = ("unusual",)

    @hookimpl
    def annotate(self, states: Tensor, keys: Tensor) -> dict[str, Tensor]:
        unusual = (states - states.mean(dim=0)).float().norm(dim=1, keepdim=True)
        return {"unusual": unusual.expand(keys.shape[:2])}

    @hookimpl
    def score(self, tracks: Tracks) -> Tensor:
        return tracks["unusual"]


@attrs.define(eq=False)
class InStep:
    """Promises pure tensor work, and branches on a value."""

    tracks: ClassVar[tuple[str, ...]] = ("size",)
    annotates_in_step: ClassVar[bool] = True

    @hookimpl
    def annotate(self, states: Tensor, keys: Tensor) -> dict[str, Tensor]:
        size = states.float().norm(dim=1, keepdim=True)
        if size.max() > 0:
            size = size + 1
        return {"size": size.expand(keys.shape[:2])}

    @hookimpl
    def score(self, tracks: Tracks) -> Tensor:
        return tracks["size"]


@attrs.define(eq=False)
class Determinism:
    """Draws from torch's global generator."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return torch.rand(positions.shape)


@attrs.define(eq=False)
class StateOnPolicy:
    """Stores state on the policy instead of in `memory`."""

    _seen: dict[int, Tensor] = attrs.field(factory=dict, init=False)

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor) -> Tensor:
        scores = key_lengths(keys)
        self._seen[layer_idx] = self._seen.get(layer_idx, 0) + scores.mean()
        return (scores - self._seen[layer_idx]).abs()


@attrs.define(eq=False)
class KeepsMemories:
    """Keeps a reference to the memory of every sequence."""

    _all: list[Any] = attrs.field(factory=list, init=False)

    @hookimpl
    def score(self, keys: Tensor, memory: Memory) -> Tensor:
        self._all += memory.sequences
        return key_lengths(keys)


@attrs.define(eq=False)
class Cancellation:
    """Clears its state only when a sequence is about to get its last token.

    `schedule` gives the expected number; a cancelled request has fewer.
    """

    _open: list[int] = attrs.field(factory=list, init=False)

    @hookimpl
    def schedule(self, waiting: Any, num_free: int, num_active: int) -> Any:
        del num_free
        if num_active:
            return []
        first = waiting[0]
        if first.max_new_tokens > 1:  # else `due` is asked for the last time before the prompt ends
            self._open = [first.prompt_len + first.max_new_tokens - 2, *self._open]
        return [[first.id]]

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
    """Scores rows by the prompt chunk they came in."""

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
    """Adds noise that depends on the index of the sequence in the batch."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        noise = torch.zeros(positions.shape)
        for b in range(len(positions)):
            draw = torch.Generator().manual_seed(b)
            noise[b] = torch.rand(positions.shape[1:], generator=draw)
        return noise


@attrs.define(eq=False)
class Neighbours:
    """Subtracts the mean over the batch, whose entries are of one layer: it asks for its number."""

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor) -> Tensor:
        del layer_idx
        return (keys.float() - keys.float().mean(dim=0)).norm(dim=-1) + key_lengths(keys)


@attrs.define(eq=False)
class LayersByCount:
    """Keeps short keys in the first layer, long ones elsewhere, and counts calls to know."""

    @hookimpl
    def score(self, keys: Tensor, memory: Memory) -> Tensor:
        for notes in memory.of(self):
            notes["calls"] = notes.get("calls", 0) + 1
        signs = torch.tensor([-1.0 if notes["calls"] % 2 else 1.0 for notes in memory.of(self)])
        return key_lengths(keys) * signs[:, None, None]


@attrs.define(eq=False)
class LayersInMemory:
    """Compares keys with those of the layer before, whose turn it was before."""

    @hookimpl
    def score(self, keys: Tensor, memory: Memory) -> Tensor:
        lengths, own = key_lengths(keys), memory.of(self)
        before = torch.tensor([notes.get("mean", 0.0) for notes in own])
        for notes, mean in zip(own, lengths.mean(dim=(1, 2)).tolist(), strict=True):
            notes["mean"] = mean
        return (lengths - before[:, None, None]).abs()


@attrs.define(eq=False)
class BeginsWithText:
    """Divides by the number of rows of text so far: none where a prompt begins with an image."""

    @hookimpl
    def score(self, keys: Tensor, is_image: Tensor) -> Tensor:
        num_text = (~is_image).cumsum(dim=2)
        return key_lengths(keys) * num_text / num_text


@attrs.define(eq=False)
class AsksForTooMuch:
    """Asks for as many tokens as the prompt has."""

    lookahead_size: ClassVar[int] = 2

    @hookimpl
    def lookahead(self, token_ids: Tensor) -> Lookahead:
        return Lookahead(token_ids=token_ids)

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return key_lengths(keys)


@attrs.define(eq=False)
class PacksTooLittle:
    """Packs a mean without the number of calls that it is over, which come layer by layer."""

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor, memory: Memory) -> Tensor:
        lengths = key_lengths(keys)
        own = memory.of(self)
        for notes, now in zip(own, lengths.mean(dim=(1, 2)).tolist(), strict=True):
            count, mean = notes.get("mean", (0, 0.0))
            notes["mean"] = count + 1, (count * mean + now) / (count + 1)
        means = torch.tensor([notes["mean"][1] for notes in own], dtype=lengths.dtype)
        return (lengths - means[:, None, None]).abs()

    def pack_memory(self, memory: dict[str, Any]) -> dict[str, Any]:
        return {"mean": memory["mean"][1]} if memory else {}

    def unpack_memory(self, packed: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        return {"mean": (0, packed["mean"])} if packed else {}


@attrs.define
class Mean:
    """A mean, and over how many numbers."""

    count: int = 0
    value: float = 0.0


@attrs.define(eq=False)
class RemembersObjects:
    """Remembers an object that cannot be written."""

    @hookimpl
    def score(self, keys: Tensor, memory: Memory) -> Tensor:
        for notes in memory.of(self):
            notes["mean"] = Mean()
        return key_lengths(keys)


@attrs.define(eq=False)
class RemembersPromptLength:
    """Remembers in its first call how long the prompt is, and keeps that."""

    @hookimpl
    def observe(self, prompt_len: int, memory: Memory) -> None:
        memory.of(self)[0].setdefault("prompt_len", prompt_len)

    @hookimpl
    def score(self, positions: Tensor, memory: Memory) -> Tensor:
        lengths = [notes.get("prompt_len", 0) for notes in memory.of(self)]
        wanted = torch.tensor([length % 5 for length in lengths])[:, None, None]
        return -((positions % 5 - wanted).abs() * 100).float() + positions


@attrs.define(eq=False)
class Schedule:
    """Admits all waiting requests, even without free slots."""

    @hookimpl
    def schedule(self, waiting: Any) -> list[list[int]]:
        return [[request.id for request in waiting]]


@attrs.define(eq=False, kw_only=True)
class Knobs:
    """Stores a knob given in percent as a fraction, so that it does not round-trip."""

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
        "building": [Building, TakenTrack],
        "answers": [Answers, ValuesOfOneRow],
        "sizes": [Sizes],
        "grouped_queries": [GroupedQueries],
        "prompts": [Prompts],
        "hybrid": [ListsLayers] if has_states() else [],
        "latent": [ValuesLikeKeys],
        "images": [BeginsWithText],
        "precision": [Precision],
        "nan": [Nan],
        "read_only": [ReadOnly],
        "budget": [Budget],
        "shared": [SharedBudget, SharedFirst],
        "order": [Order],
        "protected": [Protected, ProtectedByHook],
        "eviction": [Eviction],
        "tracks": [TracksInPlace, TracksLeftBehind],
        "weights": [Weights],
        "annotations": [Annotations],
        "in_step": [InStep],
        "determinism": [Determinism],
        "memory": [StateOnPolicy, KeepsMemories],
        "cancellation": [Cancellation],
        "chunks": [Chunks],
        "slots": [RunningBatch],
        "neighbours": [Neighbours],
        "layers": [LayersByCount, LayersInMemory],
        "lookahead": [AsksForTooMuch],
        "snapshots": [PacksTooLittle, RemembersObjects],
        "prefixes": [RemembersPromptLength],
        "schedule": [Schedule],
        "knobs": [Knobs],
    },
)
