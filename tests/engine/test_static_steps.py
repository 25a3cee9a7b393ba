"""Static decode steps: results do not depend on whether the next is launched before a read."""

import gc
import weakref
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly
from tiny import greedy_tokens, shared_model, tiny_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import Engine, Plan, Request, hookimpl
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.cache.static_step import Continuation, StaticStep
from kvpolicy.engine.requests.request import Sampling
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import HookError, KVPolicyError

DOUBLE = {"dtype": torch.float64}
PLANS = {
    "full": Plan.uniform("full"),
    "streaming": Plan.uniform("streaming", budget=12, buffer=5),
    "h2o": Plan.uniform("h2o", "protect", budget=12, buffer=5),
    "rkv": Plan.uniform("rkv", budget=16, buffer=9),
    "skipkv": Plan.uniform("skipkv", budget=20, buffer=7),
    "mixed": Plan.from_dict(
        {
            "budget": 12,
            "buffer": 4,
            "layers": [{"where": [0], "stack": ["full"]}, {"where": [1], "stack": ["knorm"]}],
        }
    ),
}


def outcome(result: Result) -> dict[str, Any]:
    """A result without its seconds."""
    seconds = ("prefill_s", "decode_s")
    return {name: value for name, value in attrs.asdict(result).items() if name not in seconds}


def outcomes(name: str, requests: list[Request], steps_per_read: int) -> list[dict[str, Any]]:
    engine = Engine(
        shared_model(**DOUBLE),
        tiny_tokenizer(),
        PLANS[name],
        slots=3,
        steps_per_read=steps_per_read,
    )
    run = engine.generate(requests)
    found = [outcome(result) for result in run.results()]
    report = run.report
    return [*found, {"new": report.new_tokens, "compactions": report.compactions}]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    prompt = draw(st.lists(st.integers(3, 60), min_size=1, max_size=30))
    return Request(
        prompt,
        draw(st.integers(1, 40)),
        Sampling(
            temperature=draw(st.sampled_from([0, 0.7, 2])),
            top_k=draw(st.sampled_from([0, 5])),
            top_p=draw(st.sampled_from([1.0, 0.9])),
            seed=draw(st.integers(0, 99)),
        ),
        draw(st.sampled_from([(), ("e",), ("a", "to")])),
        draw(st.frozensets(st.integers(3, 60), max_size=4)),
    )


@costly
@given(st.sampled_from(sorted(PLANS)), st.lists(requests(), min_size=1, max_size=6))
def test_results_do_not_depend_on_steps_per_read(name: str, given_requests: list[Request]) -> None:
    assert outcomes(name, given_requests, 2) == outcomes(name, given_requests, 1)


@pytest.mark.parametrize("name", ["streaming", "h2o", "rkv", "mixed"])
def test_a_step_is_launched_before_the_tokens_of_the_last_are_read(name: str) -> None:
    """Also where rows leave between the two: all but the last step are read one behind."""
    engine = Engine(shared_model(), plan=PLANS[name], slots=2, steps_per_read=2)
    run = engine.generate([[5, 6, 7], [8, 9, 1, 2]], max_new_tokens=40, stop_ids=())
    sizes = []
    while not run.done:
        sizes.append(len(run.step().tokens))
        run._results.clear()
    assert run.report.compactions > 4
    # First tokens, a step that is not read, one by one, and the last two together.
    assert sizes == [2, 0, *[2] * 37, 4]


def test_steps_that_are_on_their_way_are_caught_up_with() -> None:
    engine = Engine(shared_model(), plan=PLANS["h2o"], slots=2, steps_per_read=2)
    run = engine.generate([[5, 6, 7]], max_new_tokens=20, stop_ids=())
    for _ in range(4):
        run.step()
    (seq,) = run.active
    assert len(seq.tokens) == 3
    run.catch_up()
    assert len(seq.tokens) == 4
    (result,) = run.results()
    assert len(result.tokens) == 20


@pytest.mark.parametrize("number", range(8))
def test_a_sequence_that_ended_before_it_was_evicted_counts_nothing_of_it(number: int) -> None:
    """It ends with each of its tokens in turn: also where it is due after the last of them."""
    model = shared_model(**DOUBLE)
    tokens = greedy_tokens(model, [5, 6, 7], 24)
    ends = frozenset([tokens[number + 12]])
    found = []
    for steps_per_read in (1, 2):
        engine = Engine(model, plan=PLANS["streaming"], slots=2, steps_per_read=steps_per_read)
        run = engine.generate([[5, 6, 7], [9, 9]], max_new_tokens=24, stop_ids=ends)
        found.append(([outcome(one) for one in run.results()], run.report.compactions))
    assert found[0] == found[1]


def test_a_stream_reads_every_token() -> None:
    engine = Engine(shared_model(), plan=PLANS["full"], steps_per_read=2)
    stream = engine.stream([5, 6, 7], max_new_tokens=12, stop_ids=())
    expected = greedy_tokens(shared_model(), [5, 6, 7], 12)
    for number, token in enumerate(stream):
        assert token == expected[number]
        # The first step of a run makes two tokens, that after the prompt and the next.
        assert stream.report.new_tokens <= number + 2


@attrs.define(eq=False)
class FailsLater:
    """Steers nothing, and fails when it sees a token."""

    token: int

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor:
        if (token_ids == self.token).any():
            raise ValueError("not this token")
        return torch.zeros_like(hidden_states)


@pytest.mark.parametrize("steps_per_read", [1, 2])
def test_tokens_before_a_failing_steer_are_kept(steps_per_read: int) -> None:
    model = shared_model(**DOUBLE)
    expected = greedy_tokens(model, [5, 6, 7], 12)
    failing = FailsLater(expected[6])
    assert expected.index(expected[6]) == 6
    plan = Plan.uniform("full", failing)
    engine = Engine(model, plan=plan, on_hook_error="answer", steps_per_read=steps_per_read)
    (result,) = engine.generate([[5, 6, 7]], max_new_tokens=12, stop_ids=()).results()
    assert list(result.tokens) == expected[:7]
    assert "ValueError in steer()" in str(result.error)
    engine = Engine(model, plan=plan, steps_per_read=steps_per_read)
    with pytest.raises(HookError, match="not this token"):
        engine.generate([[5, 6, 7]], max_new_tokens=12, stop_ids=()).results()


@pytest.mark.parametrize("steps_per_read", [0, -1, 2.0, True, "2", 3])
def test_wrong_steps_per_read_is_refused(steps_per_read: Any) -> None:
    with pytest.raises(KVPolicyError, match="steps_per_read"):
        Engine(shared_model(), plan=PLANS["full"], steps_per_read=steps_per_read)


@given(st.data())
def test_the_device_holds_what_the_host_knows(data: st.DataObject) -> None:
    """After any changes on the host, `begin` makes the tensors equal to them."""
    shape = LayerShape(2, 2, 4, torch.float32, torch.device("cpu"))
    cache = KVCache([shape] * 2, [Slab(50)] * 2, 4)
    step = StaticStep(cache)
    tokens = [7] * 4
    continuations = [Continuation(40, frozenset({9}), Sampling())] * 4
    for _ in range(6):
        width = data.draw(st.integers(1, 4))
        if data.draw(st.booleans()):  # an admission, a compaction, a departure
            slot = data.draw(st.integers(0, 3))
            cache.seq_len[slot] = data.draw(st.integers(1, 9))
            cache.rows[:, slot] = data.draw(st.integers(1, 9))
            tokens[slot] = data.draw(st.integers(0, 8))
            continuations[slot] = Continuation(40, frozenset({9}), Sampling())
        step.begin(tokens[:width], continuations[:width])
        assert step.seq_len[:width].tolist() == cache.seq_len[:width].tolist()
        assert np.array_equal(step.rows[:width, :, 0].T.numpy(), cache.rows[:, :width])
        assert step.token_ids[:width].tolist() == tokens[:width]
        assert step.live.tolist() == [slot < width for slot in range(4)]
        goes_on = [True] * width
        for number in range(data.draw(st.integers(1, 4))):
            if number:  # follows the one before, whose tokens were not read when it began
                step.begin(None, None)
            drawn = data.draw(st.lists(st.integers(0, 9), min_size=width, max_size=width))
            step.finish(torch.zeros(width, 10), drawn=torch.tensor(drawn))
            assert step.drawn().read().tolist() == drawn
            step.count(goes_on)
            for slot in range(width):
                if goes_on[slot]:
                    tokens[slot] = drawn[slot]
                    assert step.live[slot] == (drawn[slot] != 9)
                    goes_on[slot] = drawn[slot] != 9 and data.draw(st.booleans())
        step.note_tokens(tokens[:width], goes_on)
        for slot in range(width):
            tokens[slot] = min(tokens[slot], 8)


def test_a_slot_whose_end_the_device_did_not_know_is_written_again() -> None:
    shape = LayerShape(2, 2, 4, torch.float32, torch.device("cpu"))
    cache = KVCache([shape], [Slab(50)], 1)
    cache.seq_len[0] = cache.rows[:, 0] = 5
    step = StaticStep(cache)
    going_on = Continuation(40, frozenset(), Sampling())
    step.begin([7], [going_on])
    step.finish(torch.zeros(1, 10), drawn=torch.tensor([3]))
    step.count([True])
    step.begin(None, None)
    step.finish(torch.zeros(1, 10), drawn=torch.tensor([4]))
    step.count([False])  # it ended with token 3, by a stop string for example
    step.note_tokens([3], [False])
    # The next sequence in the slot happens to be where the host has left it.
    step.begin([3], [going_on])
    assert (step.seq_len.item(), step.rows.tolist()) == (6, [[[6, 6]]])
    assert step.token_ids.item() == 3


def states_after(engine: Engine, num_steps: int) -> list[Tensor]:
    run = engine.generate([[5, 7, 9], [11, 3, 8, 2, 1] * 3], max_new_tokens=60, stop_ids=())
    for _ in range(num_steps):
        run.step()
    return [tensor for layer in run.cache.layers for tensor in layer.tensors]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_steps", [3, 12, 30])
@pytest.mark.parametrize("stack", [["h2o"], ["snapkv"], ["h2o_last", "protect"]])
def test_sliding_slabs_hold_what_the_eager_path_holds(stack: list[str], num_steps: int) -> None:
    model = tiny_model(
        "qwen2",
        num_layers=3,
        use_sliding_window=True,
        sliding_window=10,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        **DOUBLE,
    )
    plan = Plan.uniform(*stack, budget=16, buffer=6)
    static, eager = (
        states_after(Engine(model, plan=plan, eager=eager), num_steps) for eager in (False, True)
    )
    for ours, theirs in zip(static, eager, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_is_dropped_frees_its_cache_at_once(name: str) -> None:
    """Without the garbage collector, because slabs are large."""
    gc.disable()
    try:
        run = Engine(shared_model(), tiny_tokenizer(), PLANS[name]).generate([[1, 2, 3]])
        for _ in range(3):
            run.step()
        cache = weakref.ref(run.cache)
        del run
        assert cache() is None
    finally:
        gc.enable()
