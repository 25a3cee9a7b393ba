"""The evaluation of `kvpolicy.lab.tasks.retention`: two engines in step, and what they compare."""

from collections import abc, defaultdict
from statistics import fmean
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from kvpolicy.attention.draw import NO_TOKEN
from kvpolicy.attention.softmax import Softmax
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import LayerCache
from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.sampler import teacher_forced
from kvpolicy.lab.shared import Pieces
from kvpolicy.lab.store.records import Breakdown
from kvpolicy.lab.tasks.held_shares import (
    ATTENTION,
    DISTANCE,
    DISTANCES,
    ERROR,
    HEAD,
    LAYER,
    LOOK_BACKS,
    LOOK_BACKS_HELD,
    RETAINED,
    SINKS,
    HeldShares,
    LayerRows,
    LookBack,
    held_shares,
)
from kvpolicy.lab.tasks.likelihood import MATCH
from kvpolicy.lab.tasks.task import EvalOutcome
from kvpolicy.markers import hookimpl
from kvpolicy.plan.plan import Plan

# Position of the first query that does not see a row, of rows that are held.
_NEVER = 2**62


# Of some rows, [H_kv, T, D] each.
_KeysAndValues = tuple[Tensor, Tensor]


class HeldAttention:
    """Leads an engine along the answers of the full cache, see `Retention`.

    Attributes:
        run: The run of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        requests: abc.Sequence[Request],
        look_back: LookBack,
        full: "FullRun",
    ) -> None:
        """Set up both engines; nothing is computed.

        Args:
            engine: The engine under the plan.
            requests: The requests, with greedy sampling.
            look_back: What a strong look-back is.
            full: The full cache's run of these requests.
        """
        self._look_back = look_back
        self._full = full
        self._held: dict[int, _HeldRows] = {}
        self._matches: dict[int, list[bool]] = defaultdict(list)
        self.run = Run(engine, requests, self._sample)

    def outcome(self, result: Result) -> EvalOutcome:
        """Compare the attention of a sequence that has ended."""
        held, matches = self._held.pop(result.id, None), self._matches.pop(result.id, [])
        if held is None or result.finish_reason == "error":
            return EvalOutcome(result)
        full = self._full.take(result.id)
        end = next(iter(full.values())).last + 1
        begin = result.prompt_len if held.first == _NEVER else max(held.first, result.prompt_len)
        if begin >= end:
            return EvalOutcome(result)
        layers = {
            index: held_shares(
                one.queries(begin),
                begin,
                one.rows(_padded(held.gone_at[index], end)),
                self._look_back,
            )
            for index, one in full.items()
        }
        heads = (
            torch.cat([getattr(one, name) for one in layers.values()], dim=-1)
            for name in ("retained", "errors", "look_backs")
        )
        values = _values(*heads) | {MATCH: fmean(matches)}
        return EvalOutcome(result, values=values, breakdowns=_breakdowns(layers))

    def _sample(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
        layers, tokens = self.run.cache.layers_with_rows, []
        for seq, ours in zip(sequences, logits.argmax(dim=-1).tolist(), strict=True):
            self._held.setdefault(seq.id, _HeldRows(layers)).note(self.run, seq)
            token, likeliest = self._full.token(seq.id, len(seq.tokens))
            tokens.append(token)
            self._matches[seq.id].append(ours == likeliest)
        return teacher_forced(tokens, logits)


def _values(retained: Tensor, errors: Tensor, look_backs: Tensor) -> dict[str, float]:
    """Values of some heads, from shares and errors of each, and look-backs, those held and all."""
    values = {RETAINED: float(retained.mean()), ERROR: float(errors.mean())}
    return values | _look_backs(*look_backs.flatten(1).sum(dim=1).tolist())


def _look_backs(held: float, num: float) -> dict[str, float]:
    return {LOOK_BACKS: num} | ({LOOK_BACKS_HELD: held / num} if num else {})


def _breakdowns(layers: abc.Mapping[int, HeldShares]) -> dict[str, Breakdown]:
    """The same by layer, by query head of each layer, and by distance."""
    by_layer = {
        index: _values(one.retained, one.errors, one.look_backs) for index, one in layers.items()
    }
    digits = [len(str(most)) for most in (max(layers), max(map(_num_heads, layers.values())) - 1)]
    by_head = {
        f"L{index:0{digits[0]}}H{head:0{digits[1]}}": _values(
            one.retained[head], one.errors[head], one.look_backs[:, head, None]
        )
        for index, one in layers.items()
        for head in range(_num_heads(one))
    }
    attention = torch.stack([one.attention for one in layers.values()]).mean(dim=0)
    far = torch.stack([one.far for one in layers.values()]).sum(dim=0)
    groups: tuple[int | str, ...] = (*DISTANCES, SINKS)
    by_distance = {
        name: {RETAINED: held / share, ATTENTION: share} | _look_backs(*far[:, group].tolist())
        for group, name in enumerate(groups)
        for held, share in [attention[:, group].tolist()]
        if share
    }
    return {
        LAYER: Breakdown.of(by_layer.items()),
        HEAD: Breakdown.of(by_head.items()),
        DISTANCE: Breakdown.of(by_distance.items()),
    }


def _num_heads(one: HeldShares) -> int:
    return len(one.retained)


@attrs.define(eq=False)
class _NewestQueries:
    """Evicts nothing, and has the cache remember the newest queries."""

    window_size: int

    bounded: ClassVar[bool] = False

    @hookimpl
    def score(self, queries: Tensor) -> Tensor:
        """Not called: the budget is the longest sequence that the model takes."""
        raise NotImplementedError


@attrs.frozen(eq=False)
class _FullLayer:
    """What a sequence has left in one layer of the full cache.

    Attributes:
        keys: Keys of consecutive tokens, the newest last, ``[H_kv, T, D]``.
        values: Values likewise.
        last: Position of the newest.
        newest: Queries of consecutive tokens, the newest last, ``[H_q, N, D]``.
        softmax: The softmax of the layer.
        window: Tokens that a query sees, itself included; ``None``: all.
    """

    keys: Tensor
    values: Tensor
    last: int
    newest: Tensor
    softmax: Softmax
    window: int | None

    def queries(self, begin: int) -> Tensor:
        """The queries from a position on, ``[H_q, N, D]``."""
        return self.newest[:, begin - (self.last + 1) :]

    def rows(self, gone_at: Tensor) -> LayerRows:
        """The rows, and the position of the first query that does not see one, ``[H_kv, T]``."""
        first = self.last + 1 - self.keys.shape[1]
        gone_at = gone_at[:, first:]
        return LayerRows(self.keys, self.values, first, gone_at, self.softmax, self.window)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return self.keys.nbytes + self.values.nbytes + self.newest.nbytes

    def to(self, device: torch.device | str) -> "_FullLayer":
        """The same on a device."""
        moved = {name: getattr(self, name).to(device) for name in ("keys", "values", "newest")}
        return attrs.evolve(self, **moved)


@attrs.define(eq=False)
class _FullSequence:
    """A sequence under the full cache.

    Attributes:
        tokens: Its tokens so far, each with the likeliest in its place.
        num_noted: Tokens whose rows are noted in layers whose window slides.
        noted: Keys and values of these rows, by layer, oldest first.
        failed: Whether it has ended with an error.
    """

    tokens: list[tuple[int, int]] = attrs.field(factory=list)
    num_noted: int = 0
    noted: dict[int, list[_KeysAndValues]] = attrs.field(factory=lambda: defaultdict(list))
    failed: bool = False


class FullRun:
    """The full cache's run of some requests, a step at a time, as those who follow it need it."""

    def __init__(
        self,
        engine: Engine,
        requests: abc.Sequence[Request],
        *,
        texts: abc.Sequence[abc.Sequence[int]] | None = None,
        keep_bytes: float,
    ) -> None:
        """Set up an engine like another one; nothing is computed.

        Args:
            engine: Has the model, the tokenizer and the number of slots.
            requests: The requests, with greedy sampling.
            texts: Tokens that it is led along, of each request; ``None``: its own answers.
            keep_bytes: The most bytes that are kept, in the memory of the host, so that several
                may follow it, one after the other. If there are more, each sequence is kept until
                the first who follows it has taken it.
        """
        adapter = engine.adapter
        longest = min(max(one.max_new_tokens for one in requests), adapter.max_positions)
        plan = Plan.uniform(_NewestQueries(longest), budget=adapter.max_positions)
        full = Engine(adapter.model, engine.tokenizer, plan, slots=engine.num_slots)
        full.compiled = engine.compiled  # computed alike, and timed by one clock
        with_rows = [attrs.evolve(one, snapshot=True) for one in requests]
        self._texts = texts
        self._sequences: dict[int, _FullSequence] = defaultdict(_FullSequence)
        # What each sequence has left in each layer with rows, by its number.
        self._left: Pieces[int, dict[int, _FullLayer]] = Pieces(keep_bytes)
        self._devices: dict[int, torch.device] = {}
        self._run: Run | None = Run(full, with_rows, self._sample)

    @property
    def is_reusable(self) -> bool:
        """Whether another may follow it: it has ended, and all of it is kept."""
        return self._run is None and self._left.keeps_all

    @property
    def num_bytes(self) -> int:
        """Bytes of keys, values and queries of the sequences that have ended."""
        return self._left.num_bytes

    def token(self, number: int, place: int) -> tuple[int, int]:
        """A token of a sequence, and the likeliest in its place; `NO_TOKEN` if it has failed."""
        sequence = self._sequences[number]
        while len(sequence.tokens) <= place and not sequence.failed:
            assert self._run is not None, "both engines end a sequence at the same token"
            results = self._run.step().results
            self._note_sliding(self._run)
            for result in results:
                self._end(result, self._run.cache)
            if self._run.done:
                self._run = None  # and with it the slabs
        return sequence.tokens[place] if place < len(sequence.tokens) else (NO_TOKEN, NO_TOKEN)

    def take(self, number: int) -> abc.Mapping[int, _FullLayer]:
        """What a sequence that has ended has left in each layer with rows, by its number."""
        left = self._left.read(number)
        return {index: one.to(self._devices[index]) for index, one in left.items()}

    def _sample(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
        likeliest = teacher_forced(logits.argmax(dim=-1).tolist(), logits)
        tokens = likeliest
        if self._texts is not None:
            given = [self._texts[seq.id][len(seq.tokens)] for seq in sequences]
            tokens = teacher_forced(given, logits)
        pairs = zip(tokens.tolist(), likeliest.tolist(), strict=True)
        for seq, pair in zip(sequences, pairs, strict=True):
            self._sequences[seq.id].tokens.append(pair)
        return tokens

    def _note_sliding(self, run: Run) -> None:
        """Copy the new rows of layers whose window slides, before they leave."""
        cache = run.cache
        sliding = [(index, layer) for index, layer in enumerate(cache.layers) if layer.slides]
        for seq in run.active if sliding else ():
            if not seq.tokens:  # no query of the answer has seen a row yet
                continue
            ours, seq_len = self._sequences[seq.id], int(cache.seq_len[seq.slot])
            for index, layer in sliding:
                every = layer.rows_of(seq.slot)
                num_new = min(seq_len - ours.num_noted, every.num_rows)
                new = every.part(every.num_rows - num_new, every.num_rows)
                keys, values = layer.arena.store.read(new.read)
                ours.noted[index].append((keys[0].clone(), values[0].clone()))
            ours.num_noted = seq_len

    def _end(self, result: Result, cache: KVCache) -> None:
        """Note what a sequence has left."""
        ours = self._sequences[result.id]
        if result.snapshot is None:
            ours.failed = True
            return
        contents = result.snapshot.contents
        layers = {}
        for layer in cache.layers_with_rows:
            held = contents.layers[layer.index]
            noted = ours.noted.pop(layer.index, [])
            num_new = min(
                contents.seq_len - ours.num_noted if noted else held.num_rows, held.num_rows
            )
            newest = slice(held.num_rows - num_new, None)
            numbers = layer.store.keys.decode(held.keys), layer.store.values.decode(held.values)
            pieces = [*noted, tuple(one[:, newest] for one in numbers)]
            keys, values = (torch.cat(one, dim=1) for one in zip(*pieces, strict=True))
            assert held.window is not None, "a policy reads queries"
            last, window = contents.seq_len - 1, layer.shape.sliding_window
            # That at position p is at index p % W.
            places = torch.arange(result.prompt_len, last + 1, device=held.window.device)
            queries = held.window[:, places % held.window.shape[1]]
            one = _FullLayer(keys, values, last, queries, layer.softmax, window)
            self._devices[layer.index] = keys.device
            layers[layer.index] = one.to("cpu") if self._left.keeps_all else one
        self._left.add(result.id, layers, sum(one.num_bytes for one in layers.values()))


class _HeldRows:
    """Which rows of a sequence are held at which step.

    Attributes:
        first: Position of the first query after a compaction; `_NEVER` before.
        gone_at: For each layer with rows, by its number, the position of the first query that
            does not see the row of a token, ``[H_kv, T]``; `_NEVER` for rows that are held.
    """

    def __init__(self, layers: abc.Sequence[LayerCache]) -> None:
        self.first = _NEVER
        self.gone_at = {
            layer.index: torch.empty(
                layer.shape.num_kv_heads, 0, dtype=torch.int64, device=layer.shape.device
            )
            for layer in layers
        }
        self._compacted_at = dict.fromkeys(self.gone_at, 0)

    def note(self, run: Run, seq: Sequence) -> None:
        """Note the rows that the newest query of a sequence has seen."""
        newest = seq.num_tokens - 1
        for index, before in self._compacted_at.items():
            now = int(run.cache.compacted_at[index, seq.slot])
            if now != before:
                self._compacted_at[index] = now
                self.first = min(self.first, newest)
                self._note_layer(index, run.cache, seq.slot, newest)

    def _note_layer(self, index: int, cache: KVCache, slot: int, newest: int) -> None:
        layer, num_counted = cache.layers[index], int(cache.seq_len[slot])
        gone_at = _padded(self.gone_at[index], newest + 1)
        for head, positions in enumerate(layer.held(slot, layer.arena.positions)):
            absent = torch.ones(newest + 1, dtype=torch.bool, device=positions.device)
            absent[positions] = False
            absent[num_counted:] = False  # stored by this forward, which is not committed yet
            gone_at[head, absent & (gone_at[head] == _NEVER)] = newest
        self.gone_at[index] = gone_at


def _padded(gone_at: Tensor, num_tokens: int) -> Tensor:
    """The same for more tokens, ``[H_kv, num_tokens]``; the new ones are held."""
    more = num_tokens - gone_at.shape[1]
    return F.pad(gone_at, (0, more), value=_NEVER)
