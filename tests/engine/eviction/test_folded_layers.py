"""Layers that are compacted together keep the same rows as layers that are compacted one by one."""

from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch
from compare import result_values
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import BASES, MOST_PROTECTED, SMALL_KNOBS, STEERING, costly
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, Request, hookimpl, installed_policies
from kvpolicy.cache.rows import Tracks
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.results import Result
from kvpolicy.engine.tracing import recording
from kvpolicy.errors import HookError
from kvpolicy.plan.spec import PolicySpec

NUM_LAYERS = 3
NAMES = [policy.name for policy in installed_policies() if policy.name not in STEERING]
# Those whose calls differ: sums of attention, recent queries, annotations, uneven heads, two
# stages, and what is asked layer by layer. That every policy says rightly whether layers are alike
# is checked by `check_policy`.
TELLING = ("h2o", "rkv", "trimkv", "adakv", "skipkv", "pyramidkv")
DRAWN_FROM = {name: (name,) for name in TELLING} | {"any": tuple(NAMES)}
ADD_ONS = ((), ("protect",), ("merge",), ("rerotate",))

# Prompt length and new tokens of requests that arrive in few slots, so that they are staggered.
requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 24)), min_size=4, max_size=4)


def engine_of(*stack: Any, dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    plan = Plan.uniform(*stack, budget=MOST_PROTECTED + 4, buffer=5)
    return Engine(shared_model(num_layers=NUM_LAYERS, dtype=dtype), plan=plan, **options)


def start(engine: Engine, lengths: list[tuple[int, int]]) -> Run:
    return engine.generate(
        [
            Request([(7 * i + j * j) % 61 for j in range(length)], max_new_tokens=new, stop_ids=())
            for i, (length, new) in enumerate(lengths)
        ]
    )


@attrs.frozen(eq=False)
class Trace:
    """What a run held after each step, and its results."""

    rows: list[np.ndarray]
    tensors: list[list[Tensor]]
    results: list[Result]
    compactions: int

    @classmethod
    def of(cls, run: Run, *, call_bytes: int = 1 << 30, defers: bool = False) -> "Trace":
        eviction = run.evictor
        eviction.call_bytes, eviction.defers = call_bytes, defers
        found = cls([], [], [], 0)
        while not run.done:
            found.results.extend(run.step().results)
            found.rows.append(run.cache.rows.copy())
            held = [tensor.clone() for layer in run.cache.layers for tensor in layer.tensors]
            found.tensors.append(held)
        found.results.sort(key=lambda result: result.id)
        return attrs.evolve(found, compactions=run.report.compactions)

    def assert_equals(self, other: "Trace") -> None:
        assert len(self.rows) == len(other.rows)
        assert self.compactions == other.compactions
        for rows, other_rows in zip(self.rows, other.rows, strict=True):
            assert (rows == other_rows).all()
        for tensors, other_tensors in zip(self.tensors, other.tensors, strict=True):
            assert all(map(torch.equal, tensors, other_tensors))
        mine, others = map(result_values, self.results), map(result_values, other.results)
        assert list(mine) == list(others)


def one_by_one(engine: Engine) -> Engine:
    for stack in engine.stacks:
        stack.layers_alike = False
    return engine


@pytest.mark.few(1)
@pytest.mark.parametrize("names", DRAWN_FROM.values(), ids=DRAWN_FROM)
@costly
@given(
    st.data(),
    st.sampled_from(ADD_ONS),
    requests,
    st.integers(1, 3),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1, 1 << 14, 1 << 30]),
    st.booleans(),
)
def test_the_cache_is_the_same_to_the_bit(
    names: tuple[str, ...],
    data: st.DataObject,
    add_on: tuple[str, ...],
    lengths: list[tuple[int, int]],
    slots: int,
    dtype: torch.dtype,
    call_bytes: int,
    defers: bool,
) -> None:
    name = data.draw(st.sampled_from(names))
    assume(name not in add_on)
    spec = PolicySpec(name, data.draw(st.sampled_from(SMALL_KNOBS.get(name, ({},)))))
    specs = (*BASES.get(name, ()), spec)
    options: Any = {"dtype": dtype, "slots": slots}
    together = start(engine_of(*specs, *add_on, **options), lengths)
    alone = start(one_by_one(engine_of(*specs, *add_on, **options)), lengths)
    Trace.of(together, call_bytes=call_bytes, defers=defers).assert_equals(Trace.of(alone))


@attrs.define(eq=False)
class Counts:
    """Scores by key length, and notes how many entries each call of `score` has."""

    calls: list[int] = attrs.field(factory=list)

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        self.calls.append(len(keys))
        return keys.norm(dim=-1)


class CountsByLayer(Counts):
    """The same, and could tell layers apart."""

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor) -> Tensor:
        return super().score(keys)


@attrs.define(eq=False)
class ProtectsByLayer:
    """Could tell layers apart where it protects rows, if it does."""

    protects_some: bool = True

    @hookimpl(when="protects_some")
    def protect(self, layer_idx: int) -> None:
        return None


def test_layers_are_asked_once_unless_a_policy_can_tell_them_apart() -> None:
    for policy, expected in ((Counts(), {NUM_LAYERS}), (CountsByLayer(), {1})):
        run = start(engine_of(policy, slots=1), [(3, 30)])
        Trace.of(run)
        assert set(policy.calls) == expected


def test_no_policy_of_a_stack_and_no_part_may_tell_them_apart() -> None:
    for stack, expected in [
        ((Counts(), "protect"), True),
        ((CountsByLayer(), "protect"), False),
        ((Counts(), ProtectsByLayer()), False),
        ((Counts(), ProtectsByLayer(protects_some=False)), True),
        (("expected_attention",), False),  # it is bound to the weights of a layer
        ((Counts(), "random"), False),
        ((Counts(), "merge"), True),  # evict() is called for each layer in any case
        ((PolicySpec("mix", {"of": ["rkv", "h2o"]}),), True),
        ((PolicySpec("mix", {"of": ["rkv", "random"]}),), False),
        (("knorm",), True),
        ((PolicySpec("knorm", {"skip_layers": (1,)}),), False),
    ]:
        (layers_alike,) = {one.layers_alike for one in engine_of(*stack).stacks}
        assert layers_alike is expected, stack


def test_a_recorded_run_is_asked_layer_by_layer_and_keeps_the_same() -> None:
    plain = Trace.of(start(engine_of("rkv", slots=2), [(9, 24), (20, 24)]))
    engine = engine_of("rkv", slots=2)
    with recording(engine, hooks=["score"]) as recorded:
        Trace.of(start(engine, [(9, 24), (20, 24)])).assert_equals(plain)
    assert {call.layer for call in recorded.calls} == set(range(NUM_LAYERS))
    assert all(len(call.requests) == 1 for call in recorded.calls)


@attrs.define(eq=False)
class FailsInOneLayer:
    """Counts compactions in a track; raises, or answers wrongly, for the keys of one layer."""

    tracks: ClassVar[tuple[str, ...]] = ("age",)
    answer: str
    keys: list[Tensor] = attrs.field(factory=list)  # of the layer and sequence that fails

    @hookimpl
    def score(self, keys: Tensor, positions: Tensor, tracks: Tracks) -> Tensor:
        tracks["age"] += 1  # also in place, where that is possible
        scores = positions + tracks["age"]
        for b, own in enumerate(keys):
            if any(torch.equal(own, bad) for bad in self.keys):
                if self.answer == "raises":
                    msg = "such keys"
                    raise ValueError(msg)
                scores[b] = torch.nan
        return scores


@pytest.mark.few(1)
@pytest.mark.parametrize("answer", ["raises", "nan"])
def test_an_error_names_the_layer_and_ends_only_its_sequences(answer: str) -> None:
    lengths = [(9, 24), (12, 24), (20, 24)]  # never due together: the buffer is 5

    @attrs.define(eq=False)
    class Watch:
        """Finds the keys of layer 1 of the second sequence at its second compaction."""

        found: list[Tensor] = attrs.field(factory=list)

        @hookimpl(wrapper=True)
        def score(self, layer_idx: int, keys: Tensor, prompt_len: Tensor) -> Any:
            if layer_idx == 1:
                self.found += [
                    one.clone() for one, n in zip(keys, prompt_len, strict=True) if n == 12
                ]
            return (yield)

    watch = Watch()
    Trace.of(start(engine_of(FailsInOneLayer(answer), watch, slots=3), lengths))
    bad = watch.found[1:2]
    policy = FailsInOneLayer(answer, bad)
    run = start(engine_of(policy, slots=3, on_hook_error="answer"), lengths)
    alone = start(
        one_by_one(engine_of(FailsInOneLayer(answer, bad), slots=3, on_hook_error="answer")),
        lengths,
    )
    found, expected = Trace.of(run), Trace.of(alone)
    found.assert_equals(expected)
    assert [result.error for result in found.results] == [one.error for one in expected.results]
    assert [result.error is None for result in found.results] == [True, False, True]
    assert "at layer 1" in str(found.results[1].error)
    with pytest.raises(HookError, match="at layer 1"):
        Trace.of(start(engine_of(FailsInOneLayer(answer, bad), slots=3), lengths))
