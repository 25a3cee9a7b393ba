"""Chunks in the middle of a long prompt, replayed from graphs.

Where rows are evicted after each chunk, the next one finds as many as the last: its new rows go to
the same places, and its queries see the same ones. Only tokens and positions are others, and these
are at fixed addresses. So a chunk that repeats one before is captured, with what it notes at its
commit, and those that repeat it cost the host one launch.

A chunk is captured if some more of its prompt will repeat it: a capture takes as long as the chunk
takes the host, and waits for the device.
"""

from collections import deque
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.layouts.base import LayerCache
from kvpolicy.errors import error_summary
from kvpolicy.model.forward_input import ForwardInput, under_way
from kvpolicy.model.fused.step import Output
from kvpolicy.model.graphs import CudaGraphs, Graph

# Repetitions to come for which a chunk is captured.
_LEAST = 8

# Graphs, and chunks that are known: those of so many slots, or of so many chunks from one
# compaction to the next.
_MOST = 8


@attrs.frozen(eq=False)
class _Chunk:
    """A captured chunk.

    Attributes:
        graph: Runs it again.
        program: What was captured.
        step: Where its rows go; it is what a step is that repeats it.
        layers: The layers of the cache at that time.
        inputs: Token ids and positions that it reads.
    """

    graph: Graph
    program: Callable[..., Output]
    step: EagerStep
    layers: list[LayerCache]
    inputs: Sequence[Tensor]

    def holds(self, program: Callable[..., Output]) -> bool:
        """Whether that would be captured now, at the same addresses."""
        now = self.step.cache.layers
        return program is self.program and all(map(is_, now, self.layers))

    def replay(self, step: EagerStep, inputs: Sequence[Tensor]) -> Output:
        """Run it for a step that repeats it; its notes are made."""
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self.step.tokens.move_on(step.tokens.seq_len)
        self.graph.replay()
        step.take_over(self.step)
        logits, states = self.graph.output
        return logits.clone(), None if states is None else states.clone()


class ChunkGraphs:
    """Runs the chunks of one cache, those that repeat others from graphs.

    Attributes:
        problem: Why none is captured any more; ``None``: those that repeat are.
        num_replayed: Chunks that were replayed.
    """

    problem: str | None = None
    num_replayed = 0

    def __init__(self, capture: Callable[[Callable[[], Output]], Graph] | None = None) -> None:
        """Nothing is captured yet.

        Args:
            capture: Captures a function that has run; default: as a CUDA graph.
        """
        self._capture = capture or CudaGraphs(warm_ups=0)
        self._chunks: dict[object, _Chunk] = {}
        self._met: deque[object] = deque(maxlen=_MOST)

    def __call__(
        self, program: Callable[..., Output], given: ForwardInput, inputs: Sequence[Tensor]
    ) -> Output:
        """Logits ``[B, 1, V]`` and hidden states ``[B, L, M]`` of a chunk.

        Args:
            program: What computes it.
            given: The forward, which is under way.
            inputs: Token ids and positions, ``[B, L]`` each.
        """
        step: Any = given.step
        if self.problem is not None:
            return program(*inputs)
        likeness = step.likeness
        if (chunk := self._chunks.get(likeness)) is not None:
            if chunk.holds(program):
                self.num_replayed += 1
                return chunk.replay(step, inputs)
            self._chunks.clear()  # what they were captured of is gone
        output = program(*inputs)
        if likeness not in self._met:
            self._met.append(likeness)
        elif step.repeats and _num_to_come(step) >= _LEAST:
            self._add(likeness, program, given, inputs)
        return output

    def _add(
        self,
        likeness: object,
        program: Callable[..., Output],
        given: ForwardInput,
        inputs: Sequence[Tensor],
    ) -> None:
        """Capture the chunk that has just run."""
        before: Any = given.step
        step = before.again()
        again = attrs.evolve(given, step=step)

        def run() -> Output:
            with under_way(again):
                output = program(*inputs)
            for opened in step.layers.values():
                opened.commit()
            return output

        if len(self._chunks) == _MOST:
            del self._chunks[next(iter(self._chunks))]
        try:
            graph = self._capture(run)
        except Exception as error:  # of CUDA, of memory
            self.problem = f"a chunk cannot be captured: {error_summary(error)}"
            self._chunks.clear()
            return
        self._chunks[likeness] = _Chunk(graph, program, step, [*step.cache.layers], inputs)


def _num_to_come(step: EagerStep) -> int:
    """How many chunks of as many tokens are still to come of each of its prompts."""
    tokens = step.tokens
    left = step.totals - tokens.seq_len - tokens.lengths
    return int((left // tokens.lengths).min())
