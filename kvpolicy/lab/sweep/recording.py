"""Which rows each compaction kept of chosen requests, noted while they are served in a batch.

    run = engine.generate(prompts)
    with keeping(run, [0, 3]) as keeper:
        for result in run:
            if result.id in keeper.requests:
                rows = keeper.taken(result)

What is noted is what the cache holds after each compaction, whoever chose it. Outside of such a
block nothing of this is in a run's way; inside of it, requests that were not chosen pay for one
look at their number.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self

import attrs
import cattrs
import numpy as np
import pluggy

from kvpolicy.cache.rows import LayerRows
from kvpolicy.engine.results import Result
from kvpolicy.engine.sequence import LiveSequence
from kvpolicy.errors import OutputError
from kvpolicy.toolkit.paragraphs import texts_in_context

if TYPE_CHECKING:
    from kvpolicy.engine.run import Run

NEVER = -1


@attrs.frozen
class KeptLayer:
    """What the compactions of one layer kept of one sequence.

    Attributes:
        layer: Decoder layer, counted from 0.
        window: Tokens that a query of this layer sees, its own included; ``None``: all. A row
            leaves as soon as no later query sees it; that is no compaction.
        at: Tokens that the sequence had at each of the layer's compactions, rising.
        left_at: For each KV head, for each position: number of the first compaction after which
            its row was gone, -1 if it was there after all of them. A row that left never comes
            back: head ``h`` holds position ``p`` after compaction ``s`` exactly if ``p < at[s]``
            and ``left_at[h][p]`` is -1 or above ``s``.
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
        tokens: Text of each token, those of the prompt and the generated ones; one after
            another they are the text, special tokens included. The last token of an answer
            is drawn and never enters the cache. None at all if the request was refused.
        layers: All decoder layers, those included that were never compacted.
    """

    num_prompt: int
    tokens: list[str]
    layers: list[KeptLayer]


@attrs.frozen
class Kept(KeptRows):
    """The rows of a sample, as they are stored.

    Attributes:
        key: The sample's.
        cell: Of the sample's cell.
        item: Number of the item in its task and seed.
        attempt: Which attempt at the item it is.
    """

    key: str
    cell: str
    item: int
    attempt: int

    @classmethod
    def of(cls, rows: KeptRows, *, key: str, cell: str, item: int, attempt: int) -> Self:
        """Say whose rows these are."""
        return cls(rows.num_prompt, rows.tokens, rows.layers, key, cell, item, attempt)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: names first, rows last."""
        record = attrs.asdict(self, recurse=False)  # millions of numbers are left as they are
        record["layers"] = [attrs.asdict(layer, recurse=False) for layer in self.layers]
        names = ("key", "cell", "item", "attempt")
        return {name: record.pop(name) for name in names} | record

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Self:
        """Read a record back.

        Args:
            record: What `to_dict` made of it.

        Raises:
            OutputError: The record has other fields.
        """
        try:
            return _converter.structure(record, cls)
        except cattrs.BaseValidationError as error:
            msg = (
                "a stored record of what was kept does not have the fields of Kept "
                f"({'; '.join(cattrs.transform_error(error))}); it comes from another version of "
                "kvpolicy: choose another output folder."
            )
            raise OutputError(msg) from error


_converter = cattrs.Converter(forbid_extra_keys=True)


@contextmanager
def keeping(run: "Run", requests: Collection[int]) -> "Iterator[Keeper]":
    """Note what compactions keep of some requests of a run that is served in a block.

    Args:
        run: The run, of which nothing is served yet.
        requests: Numbers of the requests.

    Yields:
        Whoever notes it.

    Raises:
        KVPolicyError: The run's engine is being recorded already.
    """
    keeper = Keeper(run, requests)
    with ExitStack() as watched:
        if keeper.requests:
            for stack in dict.fromkeys([*run.engine.stacks, run.engine.scheduling]):
                watched.enter_context(stack.listening(keeper))
        yield keeper


class Keeper:
    """Notes what compactions keep; see `keeping`.

    Attributes:
        requests: Numbers of the requests it is about.
    """

    def __init__(self, run: "Run", requests: Collection[int]) -> None:
        self.requests = frozenset(requests) & frozenset(range(len(run.requests)))
        self._run = run
        self._asking = run.engine.asking
        self._shapes = run.engine.adapter.layer_shapes()
        self._served: dict[int, _Served] = {}

    def taken(self, result: Result) -> KeptRows:
        """What was kept of a request that has ended, however it has; forgotten here then.

        Args:
            result: Its result; the request is one of `requests`.
        """
        served = self._served.pop(result.id, None)
        if served is None:  # refused before there was anything to serve
            return KeptRows(0, [], [])
        sequence, tokenizer = served.sequence, self._run.tokenizer
        ids = [*sequence.prompt, *sequence.tokens]
        texts = (
            [f"<{token}>" for token in ids]
            if tokenizer is None
            else texts_in_context(tokenizer, ids)
        )
        layers = [
            KeptLayer(number, shape.sliding_window, layer.at, layer.upto(len(ids)).tolist())
            for number, (shape, layer) in enumerate(zip(self._shapes, served.layers, strict=True))
        ]
        return KeptRows(len(sequence.prompt), texts, layers)

    # What relays call

    def question(self, hook: str, arguments: dict[str, Any], ask: Callable[[], Any]) -> Any:
        """Pass a question on to the policies; see who waits, and what is left by evictions."""
        if hook == "schedule":
            self._meet(self._asking.sequences)
        answer = ask()
        if hook == "evict":
            self._note(arguments["layer_idx"], arguments["rows"], arguments["keep"].shape[2])
        return answer

    def timed(self, impl: pluggy.HookImpl) -> Callable[..., Any]:
        """The implementation itself."""
        function: Callable[..., Any] = impl.function
        return function

    def _meet(self, waiting: Collection[LiveSequence]) -> None:
        for sequence in waiting:
            if self._is_chosen(sequence) and sequence.id not in self._served:
                layers = [_Layer(shape.num_kv_heads) for shape in self._shapes]
                self._served[sequence.id] = _Served(sequence, layers)

    def _is_chosen(self, sequence: LiveSequence) -> bool:
        """Whether it is one of our requests; the engine may serve other runs beside ours."""
        number = sequence.id
        return number in self.requests and sequence.request is self._run.requests[number]

    def _note(self, layer_idx: int, rows: LayerRows, num_kept: int) -> None:
        for place, sequence in enumerate(self._asking.sequences):
            served = self._served.get(sequence.id)
            if served is not None and served.sequence is sequence:
                held = rows.positions[place, :, :num_kept].cpu().numpy()
                served.layers[layer_idx].note(int(rows.seq_len[place]), held)


@attrs.frozen
class _Served:
    sequence: LiveSequence
    layers: "list[_Layer]"


class _Layer:
    """The compactions of one layer of one sequence, so far."""

    def __init__(self, num_kv_heads: int) -> None:
        self.at: list[int] = []
        self._left_at = np.empty((num_kv_heads, 0), dtype=np.int32)

    def upto(self, num_tokens: int) -> np.ndarray:
        """When each position left, ``[H_kv, num_tokens]``."""
        more = num_tokens - self._left_at.shape[1]
        return np.pad(self._left_at, ((0, 0), (0, more)), constant_values=NEVER)

    def note(self, seq_len: int, held: np.ndarray) -> None:
        """Note what one compaction left of ``seq_len`` tokens: positions ``[H_kv, K]``."""
        left_at = self.upto(seq_len)
        is_held = np.zeros(left_at.shape, dtype=bool)
        np.put_along_axis(is_held, held, values=True, axis=1)
        left_at[(left_at == NEVER) & ~is_held] = len(self.at)
        self._left_at = left_at
        self.at.append(seq_len)
