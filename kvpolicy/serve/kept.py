"""Which rows of a sequence are held while it is generated, for a stream that asks for it.

An event has the texts of the tokens that are new since the one before, and for every position in
how many KV heads of all layers its row is held. Rows are read between two steps of the engine, at
most a few times a second, so a stream that is watched costs the others little; those at the end are
read from a snapshot, as the slot has another sequence by then.
"""

import itertools
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np
from torch import Tensor

from kvpolicy.engine.async_engine import StreamChunk
from kvpolicy.engine.engine import Run
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import EngineClosedError
from kvpolicy.serve.generation import Generation
from kvpolicy.serve.plans import ServedModel

EVERY_S = 0.15


class KeptRows:
    """What one stream tells of the rows of its choice."""

    def __init__(self, generation: Generation, model: ServedModel, prompt: Sequence[int]) -> None:
        """Begin with the prompt.

        Args:
            generation: The choice.
            model: The model, for the texts of tokens.
            prompt: Tokens of the prompt.
        """
        self._generation, self._model = generation, model
        self._num_prompt = len(prompt)
        self._new = list(prompt)
        self._start = 0
        self._told_at = -EVERY_S

    async def event(self, chunk: StreamChunk) -> dict[str, Any] | None:
        """What is to be told after a chunk; ``None`` if it is not time for that yet.

        Args:
            chunk: The chunk.
        """
        self._new += chunk.tokens
        if chunk.result is not None:
            snapshot = chunk.result.snapshot
            held = None if snapshot is None else held_in_snapshot(snapshot)
        elif monotonic() - self._told_at < EVERY_S:
            return None
        else:
            held = await self._held()
        event = {
            "num_prompt": self._num_prompt,
            "start": self._start,
            "tokens": [self._model.token_text(token) for token in self._new],
            "held": held,
            "ended": chunk.result is not None,
        }
        self._start, self._new, self._told_at = self._start + len(self._new), [], monotonic()
        return event

    async def _held(self) -> dict[str, Any] | None:
        (number,) = self._generation.numbers
        running = self._generation.plan.running
        try:
            return await running.between_steps(lambda run: held_rows(run, number))
        except EngineClosedError:
            return None


def held_rows(run: Run, number: int) -> dict[str, Any] | None:
    """The rows that the sequence of a request holds; ``None`` if it has no slot.

    Args:
        run: The run, between two steps.
        number: Number of the request.

    Returns:
        ``of``: KV heads of all layers; ``counts``: in how many of them each position is held, as
        pairs of a count and for how many positions in a row it holds; ``rows``: rows of a KV head
        in each layer that has any.
    """
    seq = next((seq for seq in run.active if seq.id == number), None)
    if seq is None:
        return None
    cache, slot = run.cache, seq.slot
    rows = [int(cache.rows[layer.index, slot]) for layer in cache.layers_with_rows]
    heads = [layer.held(slot, layer.arena.positions) for layer in cache.layers_with_rows]
    return _counted(heads, rows, int(cache.seq_len[slot]))


def held_in_snapshot(snapshot: SequenceSnapshot) -> dict[str, Any]:
    """The rows that a sequence held at its end, as `held_rows` gives them.

    Args:
        snapshot: The sequence.
    """
    layers = [layer for layer in snapshot.contents.layers if len(layer.positions)]
    return _counted(
        [list(layer.positions) for layer in layers],
        [layer.rows for layer in layers],
        snapshot.seq_len,
    )


def _counted(
    heads: Sequence[Sequence[Tensor]], rows: Sequence[int], seq_len: int
) -> dict[str, Any]:
    """Count the heads that hold each position, given the positions of each head of each layer."""
    counts = np.zeros(seq_len, dtype=np.int64)
    for positions in itertools.chain.from_iterable(heads):
        found = positions.cpu().numpy()
        counts[found[found >= 0]] += 1  # no head holds a position twice
    runs = np.split(counts, np.flatnonzero(np.diff(counts)) + 1)
    return {
        "of": sum(map(len, heads)),
        "counts": [[int(one[0]), len(one)] for one in runs if len(one)],
        "rows": list(rows),
    }
