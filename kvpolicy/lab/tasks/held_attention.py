"""The evaluation of `kvpolicy.lab.tasks.attention`: two engines in step, and what they compare."""

from collections import abc, defaultdict, deque
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
from kvpolicy.cache.slot_contents import LayerContents
from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.sampler import teacher_forced
from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.task import EvalOutcome
from kvpolicy.markers import hookimpl
from kvpolicy.plan.plan import Plan

# Position of the first query that does not see a row, of rows that are held.
_NEVER = 2**62

# The weights of so many bytes are computed at a time.
_BLOCK_BYTES = 32 << 20


class HeldAttentionEvaluation:
    """Leads an engine along the answers of the full cache, see `HeldAttention`.

    Attributes:
        run: The run of the engine.
    """

    def __init__(
        self, engine: Engine, requests: abc.Sequence[Request], names: tuple[str, str]
    ) -> None:
        """Set up both engines; nothing is computed.

        Args:
            engine: The engine under the plan.
            requests: The requests, with greedy sampling.
            names: Names of an outcome's values: output error, retained attention.

        Raises:
            TaskError: The full cache of the model would not hold all rows of a sequence.
        """
        self._names = names
        self._full = _FullRun(engine, requests)
        self._held: dict[int, _HeldRows] = {}
        self.run = Run(engine, requests, self._sample)

    def outcome(self, result: Result) -> EvalOutcome:
        """Compare the attention of a sequence that has ended."""
        held = self._held.pop(result.id, None)
        if held is None or result.finish_reason == "error":
            return EvalOutcome(result)
        full = self._full.pop(result.id)
        if not full.queries:
            return EvalOutcome(result)
        begin = max(held.first, result.prompt_len)
        if held.first == _NEVER:
            begin = result.prompt_len
        of_layers = zip(*full.queries[begin - result.prompt_len :], strict=True)
        measured = [
            _compare(torch.stack(queries, dim=1), begin, rows, held.gone_at[index], softmax)
            for index, (queries, rows, softmax) in enumerate(
                zip(of_layers, full.layers, self._full.softmax, strict=True)
            )
        ]
        means = (fmean(one) for one in zip(*measured, strict=True))
        return EvalOutcome(result, values=dict(zip(self._names, means, strict=True)))

    def _sample(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
        layers = self.run.cache.layers
        for seq in sequences:
            self._held.setdefault(seq.id, _HeldRows(layers)).note(self.run, seq)
        return teacher_forced([self._full.next_token(seq.id) for seq in sequences], logits)


def _compare(
    queries: Tensor, begin: int, rows: LayerContents, gone_at: Tensor, softmax: Softmax
) -> tuple[float, float]:
    """Output error and retained attention in a layer, means over its heads and queries.

    Args:
        queries: Queries at consecutive positions, ``[H_q, N, D]``.
        begin: Position of the first.
        rows: Keys and values of all tokens, ``[H_kv, T, D]``.
        gone_at: Position of the first query that does not see a row, ``[H_kv, T]``.
        softmax: The softmax of the layer.
    """
    keys, values = rows.keys.float(), rows.values.float()
    (num_kv_heads, num_rows, size), num_queries = keys.shape, queries.shape[1]
    gone_at = _padded(gone_at, num_rows)[:, None, None]
    grouped = queries.float().unflatten(0, (num_kv_heads, -1))  # [H_kv, G, N, D]
    at = torch.arange(begin, begin + num_queries, device=keys.device)[:, None]
    of_rows = torch.arange(num_rows, device=keys.device)
    retained, errors = keys.new_zeros(()), keys.new_zeros(())
    block = max(1, _BLOCK_BYTES // (4 * num_rows * grouped.shape[:2].numel()))
    for part, now in zip(grouped.split(block, dim=2), at.split(block), strict=True):
        seen = (of_rows <= now)[None, None]
        held = seen & (now < gone_at)
        logits = part @ keys[:, None].transpose(2, 3) * size**-0.5
        weights = softmax.weights(logits[None].clone(), seen)[0]
        left = softmax.weights(logits[None], held)[0]
        full = weights @ values[:, None]
        difference = (left @ values[:, None] - full).norm(dim=-1)
        # A head whose values are all zero has no error.
        errors += (difference / full.norm(dim=-1)).nan_to_num(nan=0.0).sum()
        retained += ((weights * held).sum(dim=-1) / weights.sum(dim=-1)).sum()
    num = queries.shape[:2].numel()
    return float(errors) / num, float(retained) / num


@attrs.define(eq=False)
class _LastQuery:
    """Evicts nothing, and has the cache remember the newest query."""

    window_size: ClassVar[int] = 1
    bounded: ClassVar[bool] = False

    @hookimpl
    def score(self, queries: Tensor) -> Tensor:
        """Not called: the budget is the longest sequence that the model takes."""
        raise NotImplementedError


@attrs.define(eq=False)
class _FullSequence:
    """A sequence under the full cache.

    Attributes:
        tokens: Tokens that the plan's engine has not been led along yet.
        queries: Queries of the decode steps, by step and layer, ``[H_q, D]`` each.
        layers: Keys and values of all tokens, once it has ended.
        failed: Whether it has ended with an error.
    """

    tokens: deque[int] = attrs.field(factory=deque)
    queries: list[list[Tensor]] = attrs.field(factory=list)
    layers: abc.Sequence[LayerContents] = ()
    failed: bool = False


class _FullRun:
    """Answers of the full cache, a step at a time, in step with the engine that needs them."""

    def __init__(self, engine: Engine, requests: abc.Sequence[Request]) -> None:
        adapter = engine.adapter
        plan = Plan.uniform(_LastQuery(), budget=adapter.max_positions)
        full = Engine(adapter.model, engine.tokenizer, plan, slots=engine.num_slots)
        full.compiled = engine.compiled  # computed alike, and timed by one clock
        with_rows = [attrs.evolve(one, snapshot=True) for one in requests]
        self._sequences: dict[int, _FullSequence] = defaultdict(_FullSequence)
        self._run = Run(full, with_rows, self._sample)
        for index, layer in enumerate(self._run.cache.layers):
            if layer.slides:
                msg = (
                    f"attention cannot be measured in layer {index}, whose sliding window of "
                    f"{layer.shape.sliding_window} tokens is no longer than prompt and generation: "
                    "rows that leave it are not kept; lower the number of new tokens"
                )
                raise TaskError(msg)

    @property
    def softmax(self) -> list[Softmax]:
        """The softmax of each layer."""
        return [layer.softmax for layer in self._run.cache.layers]

    def next_token(self, number: int) -> int:
        """The next token of a sequence; `NO_TOKEN` if it has failed."""
        sequence = self._sequences[number]
        while not sequence.tokens and not sequence.failed:
            assert not self._run.done, "both engines end a sequence at the same token"
            for result in self._run.step().results:
                ended = self._sequences[result.id]
                ended.failed = result.snapshot is None
                if result.snapshot is not None:
                    ended.layers = result.snapshot.contents.layers
        return sequence.tokens.popleft() if sequence.tokens else NO_TOKEN

    def pop(self, number: int) -> _FullSequence:
        """A sequence that has ended, which is forgotten."""
        return self._sequences.pop(number)

    def _sample(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> Tensor:
        tokens = teacher_forced(logits.argmax(dim=-1).tolist(), logits)
        for seq, token in zip(sequences, tokens.tolist(), strict=True):
            ours = self._sequences[seq.id]
            ours.tokens.append(token)
            if seq.tokens:  # else the query is the last of the prompt
                ours.queries.append(
                    [_newest_query(one, seq.slot) for one in self._run.cache.layers]
                )
        return tokens


def _newest_query(layer: LayerCache, slot: int) -> Tensor:
    assert layer.window is not None, "a policy reads queries"
    return layer.window[slot, :, 0].clone()


class _HeldRows:
    """Which rows of a sequence are held at which step.

    Attributes:
        first: Position of the first query after a compaction; `_NEVER` before.
        gone_at: For each layer, the position of the first query that does not see the row of a
            token, ``[H_kv, T]``; `_NEVER` for rows that are held.
    """

    def __init__(self, layers: abc.Sequence[LayerCache]) -> None:
        self.first = _NEVER
        self.gone_at = [
            torch.empty(layer.shape.num_kv_heads, 0, dtype=torch.int64, device=layer.shape.device)
            for layer in layers
        ]
        self._compacted_at = [0] * len(layers)

    def note(self, run: Run, seq: Sequence) -> None:
        """Note the rows that the newest query of a sequence has seen."""
        newest = seq.num_tokens - 1
        compacted_at = run.cache.compacted_at[:, seq.slot].tolist()
        for index, (now, before) in enumerate(zip(compacted_at, self._compacted_at, strict=True)):
            if now != before:
                self.first = min(self.first, newest)
                self._note_layer(index, run.cache, seq.slot, newest)
        self._compacted_at = compacted_at

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
