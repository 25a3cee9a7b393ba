"""Recording which rows each compaction keeps of selected requests, while a batch is decoded.

    run = engine.generate(prompts)
    with record_kept_rows(run, [0, 3]) as recorder:
        for result in run:
            if result.id in recorder.requests:
                rows = recorder.pop(result)

The record is read from the cache after each eviction, so it is what the cache holds, whichever
policy decided it. Policies are asked as without a record, so that they take as long. Runs that are
not recorded do not pay for this.
"""

from collections import abc
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Self

import attrs
import cattrs
import numpy as np
from torch import Tensor

from kvpolicy.engine.engine import Run
from kvpolicy.engine.extensions.base import ANY, Extension
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Step
from kvpolicy.errors import OutputError
from kvpolicy.toolkit.paragraphs import texts_in_context

NEVER = -1


@attrs.frozen
class KeptLayer:
    """What the compactions of one layer kept of one sequence.

    Attributes:
        layer: Decoder layer, counted from 0.
        window: Tokens that a query of this layer sees, itself included; ``None``: all. Rows that
            leave a sliding window are not counted as evicted.
        at: Number of tokens of the sequence at each compaction of the layer, ascending.
        left_at: ``left_at[h][p]``: index of the first compaction after which KV head ``h`` had
            no row for position ``p``; -1 if it was kept by all. An evicted row never comes back:
            head ``h`` holds position ``p`` after compaction ``s`` exactly if ``p < at[s]`` and
            ``left_at[h][p]`` is -1 or greater than ``s``.
    """

    layer: int
    window: int | None
    at: list[int]
    left_at: list[list[int]]


@attrs.frozen
class KeptRows:
    """What all compactions kept of one sequence.

    Attributes:
        num_prompt: Tokens of the prompt.
        tokens: Text of each token of the prompt and the answer, special tokens included. The
            last token of an answer never enters the cache. Empty if the request was refused.
        layers: All decoder layers with rows, also those that were never compacted.
    """

    num_prompt: int
    tokens: list[str]
    layers: list[KeptLayer]


@attrs.frozen
class KeptRecord(KeptRows):
    """The kept rows of a sample, as stored.

    Attributes:
        key: Key of the sample.
        cell: Id of the sample's cell.
        item: Number of the example in its task and seed.
        attempt: Number of the attempt at the example.
    """

    key: str
    cell: str
    item: int
    attempt: int

    @classmethod
    def of(cls, rows: KeptRows, *, key: str, cell: str, item: int, attempt: int) -> Self:
        """Make the record of a sample."""
        return cls(rows.num_prompt, rows.tokens, rows.layers, key, cell, item, attempt)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: the sample first, its rows last."""
        # Not recursive: attrs would copy millions of numbers.
        record = attrs.asdict(self, recurse=False)
        record["layers"] = [attrs.asdict(layer, recurse=False) for layer in self.layers]
        names = ("key", "cell", "item", "attempt")
        return {name: record.pop(name) for name in names} | record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """Read a record back.

        Args:
            record: The output of `to_dict`.

        Raises:
            OutputError: The record has other fields.
        """
        try:
            return _converter.structure(record, cls)
        except cattrs.BaseValidationError as error:
            msg = (
                "its record of kept rows has other fields than this version of kvpolicy reads: "
                + "; ".join(cattrs.transform_error(error)[:3])
            )
            raise OutputError(msg) from error


_converter = cattrs.Converter(forbid_extra_keys=True)


@contextmanager
def record_kept_rows(run: Run, requests: Collection[int]) -> "Iterator[KeptRowsRecorder]":
    """Record what compactions keep of some requests, while the block runs them.

    Args:
        run: The run, not begun yet.
        requests: Numbers of the requests.

    Yields:
        The recorder.
    """
    recorder = KeptRowsRecorder(run, requests)
    with run.core.extended(recorder) if recorder.requests else nullcontext():
        yield recorder


class KeptRowsRecorder(Extension):
    """Looks at the rows of a run before each step; see `record_kept_rows`.

    Attributes:
        requests: Numbers of the recorded requests.
    """

    def __init__(self, run: Run, requests: Collection[int]) -> None:
        self.requests = frozenset(requests) & frozenset(range(len(run.requests)))
        self._tokenizer = run.tokenizer
        layers = run.cache.layers_with_rows
        self._windows = {layer.index: layer.shape.sliding_window for layer in layers}
        self._recorded = {
            seq.id: _SequenceRecord(
                seq, {layer.index: _LayerRecord(layer.shape.num_kv_heads) for layer in layers}
            )
            for seq in run.waiting
            if seq.id in self.requests
        }

    def pop(self, result: Result) -> KeptRows:
        """Return the rows of a finished request and forget them.

        Args:
            result: Its result; the request is one of `requests`.
        """
        recorded = self._recorded.pop(result.id, None)
        if recorded is None:  # it was refused
            return KeptRows(0, [], [])
        sequence, tokenizer = recorded.sequence, self._tokenizer
        ids = [*sequence.prompt, *sequence.tokens]
        texts = (
            [f"<{token}>" for token in ids]
            if tokenizer is None
            else texts_in_context(tokenizer, ids)
        )
        layers = [
            KeptLayer(index, self._windows[index], one.at, one.padded(len(ids)).tolist())
            for index, one in recorded.layers.items()
        ]
        return KeptRows(len(sequence.prompt), texts, layers)

    # Called by the engine

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """One step at a time: no rows leave before it is known whether a sequence has ended."""
        return 1 if any(seq.id in self._recorded for seq in sequences) else ANY

    def before(self, step: Step) -> None:
        """Note what was compacted since the step before: rows have left, and none have come."""
        for seq in step.sequences:
            self._note(seq)

    def finish(self, seq: Sequence) -> None:
        """Note what was compacted since its last step, of a sequence that has ended without one."""
        self._note(seq)

    def _note(self, seq: Sequence) -> None:
        recorded = self._recorded.get(seq.id)
        if recorded is None:
            return
        for index, one in recorded.layers.items():
            at = int(self.cache.compacted_at[index, seq.slot])
            if at != (one.at[-1] if one.at else 0):
                layer = self.cache.layers[index]
                one.note(at, layer.held(seq.slot, layer.arena.positions))


@attrs.frozen
class _SequenceRecord:
    sequence: Sequence
    layers: "dict[int, _LayerRecord]"


class _LayerRecord:
    """The compactions of one layer of one sequence so far."""

    def __init__(self, num_kv_heads: int) -> None:
        self.at: list[int] = []
        self._left_at = np.empty((num_kv_heads, 0), dtype=np.int32)

    def padded(self, num_tokens: int) -> np.ndarray:
        """Return ``left_at`` for all tokens, ``[H_kv, num_tokens]``."""
        more = num_tokens - self._left_at.shape[1]
        return np.pad(self._left_at, ((0, 0), (0, more)), constant_values=NEVER)

    def note(self, seq_len: int, held: abc.Sequence[Tensor]) -> None:
        """Add a compaction at ``seq_len`` tokens; ``held``: positions that each head keeps."""
        left_at = self.padded(seq_len)
        is_held = np.zeros(left_at.shape, dtype=bool)
        for head, positions in enumerate(held):
            is_held[head, positions[positions < seq_len].cpu()] = True
        left_at[(left_at == NEVER) & ~is_held] = len(self.at)
        self._left_at = left_at
        self.at.append(seq_len)
