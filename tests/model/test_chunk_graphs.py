"""Chunks that repeat others, replayed from graphs, with a stand-in for CUDA's."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from families import family_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvpolicy import Engine, Plan, Request
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.devices import upload
from kvpolicy.engine.engine import Run
from kvpolicy.engine.runner import Runner
from kvpolicy.model.chunk_graphs import ChunkGraphs
from kvpolicy.model.fused.record import record
from kvpolicy.model.fused.step import Output
from kvpolicy.model.graphs import Graph

PLANS = {
    "streaming": Plan.uniform("streaming", budget=24, buffer=4, prefill_buffer=16),
    "h2o": Plan.uniform("h2o", budget=24, buffer=8, prefill_buffer=16),
    "snapkv": Plan.uniform("snapkv", budget=20, buffer=8, prefill_buffer=15),
    "rkv": Plan.uniform("rkv", budget=24, buffer=8, prefill_buffer=13),
    "no staging": Plan.uniform("h2o", budget=24, buffer=10, prefill_buffer=10),
    "integers": Plan.uniform("h2o", budget=24, buffer=8, prefill_buffer=16, rows="int8"),
}


def tensors_of(cache: KVCache) -> list[Tensor]:
    """Everything that a cache holds, its staging area too."""
    areas = [getattr(arena, "staging", None) for arena in cache.arenas]
    held = [*cache.arenas, *(area for area in areas if area is not None)]
    return [tensor for one in held for tensor in one.tensors]


@attrs.define
class Recorder:
    """Captures the operators of a function, which it undoes, and runs them for a replay.

    Like a CUDA graph, a replay reads and writes the tensors of the capture.
    """

    cache: KVCache
    error: Exception | None = None
    num_captured: int = 0

    def __call__(self, run: Callable[[], Output]) -> Graph:
        if self.error is not None:
            raise self.error
        self.num_captured += 1
        held = tensors_of(self.cache)
        before = [tensor.clone() for tensor in held]
        recording = record(run)
        for tensor, contents in zip(held, before, strict=True):
            tensor.copy_(contents)
        program, output = recording.program(), recording.output

        def replay() -> None:
            for tensor, new in zip(output, program(), strict=True):
                if tensor is not None:
                    tensor.copy_(new)

        return Graph(replay, output, program)


@attrs.define
class Pair:
    """Two runs of the same requests, the first of which replays chunks."""

    runs: list[Run] = attrs.field(factory=list)
    runners: list[Runner] = attrs.field(factory=list)
    recorder: Recorder | None = None

    @property
    def graphs(self) -> ChunkGraphs:
        found = self.runners[0].chunk_graphs
        assert found is not None
        return found

    def submit(self, prompt: list[int]) -> None:
        """Have both continue one more prompt."""
        for run in self.runs:
            run.submit(Request(prompt, 5))

    def step(self) -> None:
        """Step both, and compare what they have drawn and what their caches hold."""
        found, expected = (run.step() for run in self.runs)
        assert found.tokens == expected.tokens
        assert all(one.error is None for one in found.results)
        for own, other in zip(*(tensors_of(run.cache) for run in self.runs), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)

    def finish(self) -> None:
        """Run both to their end."""
        for run in self.runs:
            run.close()
        while not self.runs[0].done:
            self.step()
        assert self.runs[1].done


@pytest.fixture
def pair_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pair]:
    """Begins two runs as on a GPU, except for CUDA itself."""
    begun, init = Pair(), Runner.__init__

    def with_graphs(runner: Runner, adapter: Any, cache: KVCache, *args: Any, **kw: Any) -> None:
        init(runner, adapter, cache, *args, **kw)
        if not begun.runners:
            begun.recorder = Recorder(cache)
            runner.chunk_graphs = ChunkGraphs(begun.recorder)
        begun.runners.append(runner)

    def begin(
        plan: Plan, prompts: list[list[int]], slots: int = 2, model: Any = None, **options: Any
    ) -> Pair:
        begun.runs, begun.runners = [], []
        model = qwen3() if model is None else model
        for _ in range(2):
            engine = Engine(model, plan=plan, slots=slots, **options)
            begun.runs.append(engine.open_run(max_len=400))
        for one in prompts:
            begun.submit(one)
        return begun

    monkeypatch.setattr(Runner, "__init__", with_graphs)
    monkeypatch.setattr(Runner, "_fuses", lambda self, _: self.static is not None)
    return begin


def qwen3() -> Any:
    model = deepcopy(family_model("qwen3")).double()
    model.config.max_position_embeddings = 512
    return model


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(1, 60, num_tokens).tolist()
    return tokens


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", PLANS)
def test_replayed_chunks_leave_what_others_leave(plan: str, pair_of: Callable[..., Pair]) -> None:
    """Prompts of one slot and of several, whose chunks come in turns."""
    pair = pair_of(PLANS[plan], [prompt(360), prompt(140, 1), prompt(340, 2)])
    pair.finish()
    assert pair.graphs.num_replayed > 5
    assert pair.graphs.problem is None


@pytest.mark.parametrize("num_steps", [10, 11])
def test_rows_beside_slabs_are_those_of_one_prompt(
    num_steps: int, pair_of: Callable[..., Pair]
) -> None:
    """A prompt waits for its turn with rows beside its slab, and another one has a chunk replayed.

    The second takes the memory that the first had when its chunk was captured.
    """
    pair = pair_of(PLANS["h2o"], [prompt(330)], 3, chunk=12)
    for _ in range(num_steps):
        pair.step()
    pair.submit(prompt(150, 1))
    pair.finish()
    assert pair.graphs.num_replayed > 5


def test_short_prompts_are_not_captured(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(PLANS["h2o"], [prompt(150)] * 4)
    pair.finish()
    assert pair.recorder is not None
    assert pair.recorder.num_captured == 0


@pytest.mark.parametrize(
    "plan",
    [
        Plan.uniform("full"),
        Plan.uniform("snapkv", "adakv", budget=24, buffer=8, heads="shared"),
    ],
    ids=["full", "heads"],
)
def test_chunks_that_do_not_repeat_are_not_captured(
    plan: Plan, pair_of: Callable[..., Pair]
) -> None:
    pair = pair_of(plan, [prompt(270)], chunk=16)
    pair.finish()
    assert pair.recorder is not None
    assert pair.recorder.num_captured == 0


def test_a_model_that_changes_is_captured_again(pair_of: Callable[..., Pair]) -> None:
    model = qwen3()
    pair = pair_of(PLANS["snapkv"], [prompt(370)], model=model)
    while not pair.graphs.num_replayed:
        pair.step()
    norm = model.model.norm
    norm.weight = torch.nn.Parameter(model.model.layers[0].input_layernorm.weight.detach() * 3)
    proj = model.model.layers[0].self_attn.v_proj
    proj.weight = torch.nn.Parameter(proj.weight.detach() * 2)
    num_replayed = pair.graphs.num_replayed
    pair.finish()
    assert pair.recorder is not None
    assert pair.recorder.num_captured > 1
    assert pair.graphs.num_replayed > num_replayed


def test_what_cannot_be_captured_runs_as_before(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of(PLANS["h2o"], [prompt(270)])
    assert pair.recorder is not None
    pair.recorder.error = torch.OutOfMemoryError("no memory")
    pair.finish()
    assert "no memory" in (pair.graphs.problem or "")
    assert pair.graphs.num_replayed == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.sampled_from(sorted(PLANS)),
    lengths=st.lists(st.integers(1, 280), min_size=1, max_size=5),
    slots=st.integers(1, 4),
    most=st.sampled_from([9, 16, 4096]),
)
def test_any_prompts(
    plan: str, lengths: list[int], slots: int, most: int, pair_of: Callable[..., Pair]
) -> None:
    prompts = [prompt(num, num) for num in lengths]
    pair_of(PLANS[plan], prompts, slots, max_tokens_per_forward=most).finish()


def test_nothing_is_uploaded_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays would copy from memory that is used for something else by then."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        upload(np.zeros(2), "cuda")
