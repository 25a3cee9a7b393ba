"""Recording which rows each compaction keeps of selected requests, while a batch is decoded.

    run = engine.generate(prompts)
    with record_kept_rows(run, [0, 3]) as recorder:
        for result in run:
            if result.id in recorder.requests:
                rows = recorder.pop(result)

The record is read from the cache after each eviction, so it is what the cache holds, whichever
policy decided it. Runs that are not recorded do not pay for this.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import attrs
import cattrs
import numpy as np
import pluggy

from kvpolicy.cache.rows import LayerRows
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.requests.sequence import Sequence
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

    Raises:
        KVPolicyError: The run's engine is being recorded already.
    """
    recorder = KeptRowsRecorder(run, requests)
    with ExitStack() as listening:
        if recorder.requests:
            for stack in dict.fromkeys(run.engine.stacks):
                listening.enter_context(stack.listening(recorder))
        yield recorder


class KeptRowsRecorder:
    """Listens to the hook calls of a run; see `record_kept_rows`.

    Attributes:
        requests: Numbers of the recorded requests.
    """

    def __init__(self, run: Run, requests: Collection[int]) -> None:
        self.requests = frozenset(requests) & frozenset(range(len(run.requests)))
        self._run = run
        self._errors = run.engine.errors
        shapes = enumerate(run.engine.adapter.layer_shapes())
        self._shapes = {index: shape for index, shape in shapes if shape.has_rows}
        self._recorded: dict[int, _SequenceRecord] = {}
        for sequence in run.waiting:
            if sequence.id in self.requests:
                layers = {i: _LayerRecord(one.num_kv_heads) for i, one in self._shapes.items()}
                self._recorded[sequence.id] = _SequenceRecord(sequence, layers)

    def pop(self, result: Result) -> KeptRows:
        """Return the rows of a finished request and forget them.

        Args:
            result: Its result; the request is one of `requests`.
        """
        recorded = self._recorded.pop(result.id, None)
        if recorded is None:  # it was refused
            return KeptRows(0, [], [])
        sequence, tokenizer = recorded.sequence, self._run.tokenizer
        ids = [*sequence.prompt, *sequence.tokens]
        texts = (
            [f"<{token}>" for token in ids]
            if tokenizer is None
            else texts_in_context(tokenizer, ids)
        )
        layers = [
            KeptLayer(
                index, self._shapes[index].sliding_window, one.at, one.padded(len(ids)).tolist()
            )
            for index, one in recorded.layers.items()
        ]
        return KeptRows(len(sequence.prompt), texts, layers)

    # Called by the hook manager

    def call_hook(self, hook: str, arguments: dict[str, Any], ask: Callable[[], Any]) -> Any:
        """Call the policies, and note the rows left by an eviction."""
        answer = ask()
        if hook == "evict":
            self._note(arguments["layer_idx"], arguments["rows"], arguments["keep"].shape[2])
        return answer

    def timed(self, impl: pluggy.HookImpl) -> Callable[..., Any]:
        """Return the implementation unchanged."""
        function: Callable[..., Any] = impl.function
        return function

    def _note(self, layer_idx: int, rows: LayerRows, num_kept: int) -> None:
        for slot, sequence in enumerate(self._errors.sequences):
            recorded = self._recorded.get(sequence.id)
            if recorded is not None and recorded.sequence is sequence:
                held = rows.positions[slot, :, :num_kept].cpu().numpy()
                prompt = rows.prompts[slot]  # of rows that stay, in all heads
                held = np.insert(held, 0, np.array(prompt, dtype=np.int64)[:, None], axis=1)
                recorded.layers[layer_idx].note(int(rows.seq_len[slot]), held)


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

    def note(self, seq_len: int, held: np.ndarray) -> None:
        """Add a compaction at ``seq_len`` tokens that kept positions ``[H_kv, K]``."""
        left_at = self.padded(seq_len)
        is_held = np.zeros(left_at.shape, dtype=bool)
        np.put_along_axis(is_held, held, values=True, axis=1)
        left_at[(left_at == NEVER) & ~is_held] = len(self.at)
        self._left_at = left_at
        self.at.append(seq_len)
