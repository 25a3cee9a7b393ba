"""The runner: a `Step` in, an `Output` out, whose rows are provisional until `commit`.

Chunks of prompts run eagerly, but for those that repeat others on a GPU
(`kvpolicy.model.chunk_graphs`); decode steps of most models as static steps: one function of
tensors at fixed addresses (`kvpolicy.cache.static_step`), which may be compiled, or replayed from a
graph.
"""

from collections import abc

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.devices import HAS_NUMBA, upload
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.chunk_graphs import ChunkGraphs
from kvpolicy.model.embedded import columns_ahead
from kvpolicy.model.forward_input import ForwardInput, under_way
from kvpolicy.model.graphs import GraphRunner
from kvpolicy.model.recorded import RecordedSteps
from kvpolicy.model.static_forward import Compiled, StaticForward, static_forward


class Runner:
    """Runs the steps of one cache.

    Attributes:
        max_steps: The most static decode steps that are launched before the tokens of the first
            of them are read; 0: decode steps are not static.
        static: The static decode step of the cache; ``None``: decode steps run eagerly.
        as_it_is: Runs a static step without graphs.
        graphs: Replays static steps, on a GPU; ``None``: they run as they are.
        chunk_graphs: Replays chunks of prompts that repeat others, likewise.
        recorded: Runs static steps from recordings, on a CPU; ``None``: they run as they are.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        cache: KVCache,
        static: StaticStep | None = None,
        *,
        max_steps: int = 0,
        num_taken: abc.Sequence[abc.Callable[[Sequence], int]] = (),
        compiled: Compiled | None = None,
        graph_problem: str | None = None,
    ) -> None:
        """Bind a model to a cache.

        Args:
            adapter: The model.
            cache: The KV cache.
            static: The static decode step of the cache; ``None``: decode steps run eagerly.
            max_steps: See the attribute.
            num_taken: For each ring of the static step, how many tokens of a sequence were taken
                from it.
            compiled: Runs static steps instead of the model as it is.
            graph_problem: Why static steps are not replayed from graphs; ``None``: on a GPU they
                are.
        """
        self.max_steps = max_steps
        self._adapter, self._cache, self.static = adapter, cache, static
        self._compiled, self._graph_problem = compiled, graph_problem
        self._num_taken = num_taken
        self._newest: Step | None = None  # of the static ones
        self._by_weights: set[str] = set()  # why a GPU does not attend so in kernels
        self._answer: tuple[Tensor, Tensor | None]  # logits and states of the newest
        self.as_it_is: StaticForward = compiled or static_forward
        self._on_gpu = adapter.device.type == "cuda"
        self.graphs: GraphRunner | None = None
        self.chunk_graphs: ChunkGraphs | None = None
        if self._on_gpu and graph_problem is None:
            self.graphs = GraphRunner(self.as_it_is)
            self.chunk_graphs = ChunkGraphs()
        self.recorded: RecordedSteps | None = None
        if adapter.device.type == "cpu" and compiled is None and graph_problem is None:
            is_packed = adapter.weights.packed_bytes > 0
            self.recorded = RecordedSteps(fuses=is_packed and HAS_NUMBA)

    def takes_static(self, slots: abc.Sequence[int]) -> bool:
        """Whether a decode step of these slots is static.

        Static steps rotate tokens by their number, and know of no other positions.
        """
        return self.static is not None and not self._cache.rope_offset[[*slots]].any()

    @property
    def path(self) -> str:
        """How static steps are run, see `RunReport`."""
        path = "static, compiled" if self._compiled else "static"
        if self.graphs is None and self.recorded is not None:
            if self.recorded.problem is not None:
                return f"{path}, not recorded: {self.recorded.problem}"
            return f"{path}, recorded" if self.recorded.num_replayed else path
        if self.graphs is None:
            return f"{path}, without graphs: {self._graph_problem}" if self._on_gpu else path
        problem, not_fused = self.graphs.problem, self.graphs.not_fused
        if problem is not None:
            return f"{path}, without graphs: {problem}"
        if not_fused is not None:
            return f"{path}, in graphs, not fused: {not_fused}"
        path = f"{path}, fused, in graphs" if self.graphs.fused else f"{path}, in graphs"
        of_prompts = self._adapter.prompts_problem
        path = path if of_prompts is None else f"{path}, prompts not fused: {of_prompts}"
        if (chunks := self.chunk_graphs) is not None and chunks.problem is not None:
            path = f"{path}, prompts without graphs: {chunks.problem}"
        elif chunks is not None and chunks.num_replayed:
            path = f"{path}, prompts replayed"
        reasons = "; ".join(sorted(self._by_weights))
        return f"{path}, weights of prompts in torch: {reasons}" if reasons else path

    @property
    def _way(self) -> StaticForward:
        """Runs static steps that need no Python but the model's."""
        return self.graphs or self.recorded or self.as_it_is

    def run(self, step: Step) -> Output:
        """Compute the new tokens of a step; their rows are provisional until `commit`."""
        if step.is_static:
            assert self.static is not None, "the scheduler asks for what there is"
            return self._run_static(step, self.static)
        return self._run_eagerly(step)

    def count(self, step: Step) -> None:
        """Count the rows of a static step whose tokens are read after the next step is launched."""
        assert self.static is not None
        self.static.count([seq.finish_reason is None for seq in step.sequences])
        step.is_counted = True

    def commit(self, step: Step, output: Output, drawn: Drawn, num_new: abc.Sequence[int]) -> None:
        """Count the new rows of a step; none of a forward in which a policy has failed.

        Args:
            step: The step.
            output: What it has computed.
            drawn: The tokens drawn.
            num_new: How many of them each sequence has taken.
        """
        static = self.static
        if static is None or output.opened is not static:
            (output.opened.commit if step.error is None else output.opened.discard)()
            return
        if not step.draws and step.error is None:
            of_each = np.array([token for (token,) in drawn.tokens])
            tokens = upload(of_each, output.logits.device)
            static.finish(output.logits, output.states, tokens)
        if not step.is_counted:
            static.count([num > 0 for num in num_new])
        if step is self._newest:
            goes_on = [seq.finish_reason is None and step.error is None for seq in step.sequences]
            static.note_tokens([seq.tokens[-1] for seq in step.sequences], goes_on)
            self._newest = None  # a step keeps its sequences, and these what policies remember

    def _run_eagerly(self, step: Step) -> Output:
        ahead = None if step.embedded is None else columns_ahead(step.embedded, step.lengths)
        layout = EagerStep(self._cache, step.slots, step.lengths, step.totals, ahead)
        token_ids = torch.zeros(len(step.tokens), layout.width, dtype=torch.int64)
        for row, tokens in zip(token_ids, step.tokens, strict=True):
            row[layout.width - len(tokens) :] = torch.tensor(tokens)
        step.newest = token_ids[:, -1]
        given = ForwardInput(
            token_ids,
            layout,
            step.steer,
            step.wants_states,
            wants_logits=step.wants_logits,
            fuses=self._fuses(step),
            run_fused=self.chunk_graphs,
            annotating=step.annotating,
            embedded=step.embedded,
        )
        logits, states = self._adapter.forward(given)
        self._by_weights |= layout.problems
        return Output(logits, states, given.logits, layout)

    def _fuses(self, step: Step) -> bool:
        """Whether an eager forward may run fused, as static steps do that are replayed."""
        if self.static is None or self.graphs is None or self.graphs.problem is not None:
            return False
        asked = (step.steer, step.annotating, step.embedded)
        return all(one is None for one in asked) and not step.wants_logits

    def begin_static(self, step: Step, static: StaticStep) -> ForwardInput:
        """Have the static step take over what a step is about; the input of its forwards."""
        sequences = step.sequences
        self._newest = step
        static.begin(
            None if step.follows else [tokens[-1] for tokens in step.tokens],
            None if step.follows else [seq.continuation for seq in sequences],
            [[of(seq) for seq in sequences] for of in self._num_taken],
        )
        step.newest = static.token_ids[: static.num_served]
        return ForwardInput(
            step.newest[:, None],
            static,
            step.steer,
            step.wants_states,
            run=self.as_it_is if step.runs_python else self._way,
            draws=step.draws,
            annotating=step.annotating,
        )

    def _run_static(self, step: Step, static: StaticStep) -> Output:
        given = self.begin_static(step, static)
        if step.follows and self.graphs is not None and self.graphs.newest is not None:
            with torch.inference_mode(), under_way(given):
                self.graphs.newest.replay()
            logits, states = self._answer
        else:
            logits, states = self._answer = self._adapter.forward(given)
        if step.error is not None:
            # What was captured or recorded lacks the work that has failed.
            for one in (self.graphs, self.recorded):
                if one is not None:
                    one.forget()
            return Output(logits, states, None, static)
        for show in step.on_drawn if step.draws else ():
            show(step.sequences, logits, static.newest_tokens)
        return Output(logits, states, None, static, static.drawn() if step.draws else None)
