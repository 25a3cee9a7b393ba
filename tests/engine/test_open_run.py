"""Open runs: requests that come, go and end while others run."""

import gc
import re
import threading
import weakref
from collections import abc
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import torch
from arrivals import Script, check_equal_alone, scripts
from forwards import shapes_of_forwards
from hypothesis import given
from hypothesis import strategies as st
from ragged_policies import FlatTop
from recorder import InterruptsResuming, RecordsAndSteers
from strategies import costly, plans
from tiny import shared_model, tiny_model, tiny_tokenizer

from kvpolicy import (
    Engine,
    EngineClosedError,
    Extension,
    KVPolicyError,
    Plan,
    QueueFullError,
    Request,
    RequestError,
    Run,
    hookimpl,
)
from kvpolicy.engine.limits import Limits
from kvpolicy.engine.requests.request_queue import Clock
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import HookError, SnapshotError
from kvpolicy.plan.spec import PolicySpec

from families import family_model  # isort: skip

NUM_LAYERS = 2
TOKENIZER = tiny_tokenizer()
FULL = Plan.uniform("full")
TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
STAGED = Plan.uniform("h2o", budget=8, buffer=3, prefill_buffer=7)
PATIENCE_S = 60  # for what must come, on a busy machine

# In double precision: batches of different shapes sum in different orders, and in single precision
# that can change which of two rows of nearly equal score is evicted.
models = st.builds(
    family_model,
    st.sampled_from(("llama", "qwen3", "mistral", "gemma2")),
    dtype=st.just(torch.float64),
)
options = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 4),
        "chunk": st.sampled_from([1, 3, 7, 512]),
        "max_tokens_per_forward": st.sampled_from([2, 9, 8192]),
        "eager": st.booleans(),
        "steps_per_read": st.integers(1, 2),
    }
)
evicting = plans(num_layers=NUM_LAYERS)
named = st.sampled_from(
    [
        FULL,
        TIGHT,
        Plan.uniform("snapkv", budget=14, buffer=5, knobs={"snapkv": {"window_size": 4}}),
        Plan.uniform("rkv", budget=14, buffer=3, knobs={"rkv": {"window_size": 4}}),
        Plan.uniform(
            "skipkv",
            budget=14,
            buffer=6,
            knobs={"skipkv": {"delimiters": (3, 7), "window_size": 4}},
        ),
        Plan.uniform("streaming", "protect", budget=14, buffer=1),
    ]
)


def llama(**options: Any) -> Any:
    return shared_model(num_layers=NUM_LAYERS, dtype=torch.float64, **options)


def check_against_alone(engine: Engine, script: Script) -> None:
    results, tokens = script.play(engine.open_run(max_len=80))
    alone = [engine.generate([request]).results()[0] for request in script.requests]
    check_equal_alone(results, alone, tokens)


# --- the same tokens ------------------------------------------------------------------------


@pytest.mark.slow
@costly
@given(models, evicting | named, options, scripts())
def test_request_that_comes_at_any_time_equals_itself_alone(
    model: torch.nn.Module, plan: Plan, options: dict[str, Any], script: Script
) -> None:
    check_against_alone(Engine(model, TOKENIZER, plan, **options), script)


@costly
@given(evicting, options, scripts())
def test_prompts_that_stay_are_the_same_among_others(
    plan: Plan, options: dict[str, Any], script: Script
) -> None:
    kept = attrs.evolve(plan, prompt="keep")
    check_against_alone(Engine(llama(), TOKENIZER, kept, **options), script)


@pytest.mark.nightly
@given(options, scripts())
def test_rows_beside_slabs_are_the_same_among_others(
    options: dict[str, Any], script: Script
) -> None:
    check_against_alone(Engine(llama(), TOKENIZER, STAGED, **options), script)


@pytest.mark.nightly
@given(options, scripts())
def test_heads_that_share_rows_are_the_same_among_others(
    options: dict[str, Any], script: Script
) -> None:
    plan = Plan.uniform("h2o", FlatTop(0.3), budget=14, buffer=4, heads="shared")
    check_against_alone(Engine(llama(num_kv_heads=4), TOKENIZER, plan, **options), script)


@pytest.mark.nightly
@given(options, scripts())
def test_registers_and_hidden_states_go_with_their_sequence(
    options: dict[str, Any], script: Script
) -> None:
    plan = Plan.uniform("h2o", RecordsAndSteers(), budget=14, buffer=4)
    check_against_alone(Engine(llama(), TOKENIZER, plan, **options), script)


@pytest.mark.nightly
@given(evicting | named | st.just(STAGED), options, scripts(), st.booleans())
def test_steps_wider_than_what_is_decoded_leave_other_slots_alone(
    plan: Plan, options: dict[str, Any], script: Script, in_graph: bool
) -> None:
    """On a GPU steps have few widths, and slots whose prompts are not all in are among them."""
    engine = Engine(llama(), TOKENIZER, plan, **(options | {"eager": False}))
    run = engine.open_run(max_len=80)
    step = run.core.runner.static
    assert step is not None
    step._padded, step.in_graph = True, in_graph
    results, tokens = script.play(run)
    alone = [engine.generate([request]).results()[0] for request in script.requests]
    check_equal_alone(results, alone, tokens)


@costly
@given(options, scripts(), st.integers(0, 12))
def test_snapshot_of_any_moment_goes_on_in_an_open_run(
    options: dict[str, Any], script: Script, steps: int
) -> None:
    engine = Engine(llama(), TOKENIZER, TIGHT, **options)
    run = engine.open_run(max_len=80)
    for request in script.requests:
        run.submit(request)
    for _ in range(steps):
        run.step()
    begun = [seq for seq in run.active if run.cache.seq_len[seq.slot]]
    # A snapshot has the tokens that were drawn and not read, too.
    snapshots = {seq.id: run.snapshot(seq.id) for seq in begun}
    (rest,) = [{result.id: result for result in run}]
    for number, snapshot in snapshots.items():
        request, whole, num_tokens = script.requests[number], rest[number], len(snapshot.tokens)
        left = request.max_new_tokens - num_tokens
        cut = attrs.evolve(request, prompt=(), max_new_tokens=left, resume=snapshot)
        again = run.submit(cut)
        resumed = {result.id: result for result in run}[again]
        assert resumed.tokens == whole.tokens[num_tokens:]
        assert snapshot.costs.rows_evicted + resumed.rows_evicted == whole.rows_evicted


# --- order ----------------------------------------------------------------------------------


def order_of(run: Run) -> list[int]:
    return [result.id for result in run]


def test_higher_priority_is_admitted_first_and_equal_ones_in_order_of_arrival() -> None:
    run = Engine(llama(), plan=FULL, slots=1).open_run(max_len=40)
    for priority in (0, 2, -1, 2, 0):
        run.submit(Request([5], 2, priority=priority))
    assert order_of(run) == [1, 3, 0, 4, 2]


def test_running_request_keeps_its_slot() -> None:
    run = Engine(llama(), plan=FULL, slots=1).open_run(max_len=40)
    run.submit(Request([5], 9))
    run.step()
    run.submit(Request([6], 2, priority=9))
    assert order_of(run) == [0, 1]


@attrs.define(eq=False)
class WaitsForPairs:
    """Admits two requests together, when nothing runs."""

    asked: list[list[tuple[int, int]]] = attrs.field(factory=list)

    @hookimpl
    def schedule(self, waiting: Any, num_free: int, num_active: int) -> list[list[int]]:
        self.asked.append([(one.id, one.priority) for one in waiting])
        return [] if num_active else [[one.id for one in waiting[:2]]]


def test_schedule_sees_priorities_in_order_and_its_batches_stay_together() -> None:
    policy = WaitsForPairs()
    plan = attrs.evolve(FULL, schedule=(PolicySpec.of(policy),))
    run = Engine(llama(), plan=plan, slots=3, chunk=2).open_run(max_len=60)
    for priority in (0, 1):
        run.submit(Request([4] * 9, 5, priority=priority))
    results = []
    for number in range(2, 9):  # a stream of requests that are more urgent than the first
        results += run.step().results
        run.submit(Request([3], 2, priority=number))
        running = {seq.id for seq in run.active}
        assert running <= {0, 1}
    results += run
    assert [one.id for one in results[:2]] in ([0, 1], [1, 0])
    assert [one.id for one in results[2:]] == list(range(8, 1, -1))
    for asked in policy.asked:
        assert asked == sorted(asked, key=lambda one: (-one[1], one[0]))


# --- ends -----------------------------------------------------------------------------------


@attrs.define
class FakeClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def opened(engine: Engine, max_len: int, clock: FakeClock) -> Run:
    return Run(engine, limits=Limits.of(engine, max_len=max_len), clock=clock)


def test_deadline_ends_a_request_that_runs_and_one_that_waits() -> None:
    clock = FakeClock()
    engine = Engine(llama(), plan=FULL, slots=1)
    run = opened(engine, 60, clock)
    run.submit(Request([5, 6], 50, deadline_s=10))
    run.submit(Request([7], 50, deadline_s=5))
    run.submit(Request([8], 4))
    for _ in range(3):
        run.step()
    clock.now = 5.0
    (waited,) = run.step().results
    assert (waited.id, waited.finish_reason, waited.tokens) == (1, "deadline", ())
    clock.now = 9.9
    assert run.step().results == []
    clock.now = 10.0
    (ran,) = run.step().results
    (alone,) = engine.generate([Request([5, 6], 50)]).results()
    assert (ran.id, ran.finish_reason) == (0, "deadline")
    assert len(ran.tokens) == 5
    assert ran.tokens == alone.tokens[:5]
    assert [(one.id, one.finish_reason) for one in run] == [(2, "length")]


def test_deadline_counts_from_submission_and_ends_a_request_in_its_prompt() -> None:
    clock = FakeClock(100.0)
    run = opened(Engine(llama(), plan=FULL, chunk=2), 60, clock)
    clock.now = 200.0
    run.submit(Request([5] * 20, 9, deadline_s=1))
    assert run.step().results == []
    clock.now = 201.0
    (result,) = run.step().results
    assert (result.finish_reason, result.tokens) == ("deadline", ())
    assert run.scheduler.slots.num_free == len(run.scheduler.slots)


def test_closed_run_keeps_deadlines() -> None:
    engine = Engine(llama(), plan=FULL, slots=1)
    requests = [Request([5], 6), Request([6], 6, deadline_s=0)]
    reasons = [result.finish_reason for result in engine.generate(requests).results()]
    assert reasons == ["length", "deadline"]


def test_request_is_cancelled_within_its_prompt() -> None:
    run = Engine(llama(), plan=FULL, chunk=1).open_run(max_len=60)
    run.submit(Request([5] * 20, 9))
    assert run.step().tokens == []
    run.cancel(0)
    (result,) = run.step().results
    assert (result.finish_reason, result.tokens) == ("cancelled", ())


def test_iteration_serves_what_was_submitted_and_can_begin_again() -> None:
    run = Engine(llama(), plan=FULL).open_run(max_len=40)
    assert list(run) == []
    run.submit(Request([5], 2))
    assert [result.id for result in run] == [0]
    run.submit(Request([5], 2))
    assert [result.id for result in run.results()] == [1]
    assert not run.done


def test_closed_run_accepts_nothing_and_serves_the_rest() -> None:
    run = Engine(llama(), plan=FULL).open_run(max_len=40)
    run.submit(Request([5], 2))
    run.close()
    assert not run.done
    with pytest.raises(EngineClosedError):
        run.submit(Request([5], 2))
    assert [result.id for result in run] == [0]
    assert run.done


def test_full_queue_refuses_until_a_request_has_ended() -> None:
    run = Engine(llama(), plan=FULL, slots=2).open_run(max_len=40, max_waiting=1)
    for _ in range(3):
        run.submit(Request([5], 3))
    with pytest.raises(QueueFullError, match="max_waiting"):
        run.submit(Request([5], 3))
    next(iter(run))
    run.submit(Request([5], 3))
    assert len(run.results()) == 3


def test_request_that_cannot_be_served_takes_no_number() -> None:
    run = Engine(llama(), plan=FULL).open_run(max_len=8, max_prompt_len=6)
    refused = {
        "empty": Request([]),
        "max_len": Request([1] * 8),
        "max_prompt_len": Request([1] * 7),
        "token id 99": Request([99]),
        r"input_ids\[0\]": Request(torch.tensor([[5, 9]])),  # type: ignore[arg-type]
    }
    for message, request in refused.items():
        with pytest.raises(RequestError, match=message):
            run.submit(request)
    assert run.submit(Request([1] * 6, 50)) == 0
    (result,) = run
    assert (len(result.tokens), result.finish_reason) == (2, "length")


@attrs.define(eq=False)
class FailsOn:
    """Fails when it scores the rows of a sequence that begins with a token."""

    token: int

    @hookimpl
    def observe(self, token_ids: torch.Tensor, start: int, memory: Any) -> None:
        if start == 0:
            memory.of(self)[0]["first"] = int(token_ids[0])

    @hookimpl
    def score(self, memory: Any, positions: torch.Tensor) -> torch.Tensor:
        if any(notes["first"] == self.token for notes in memory.of(self)):
            msg = "a policy failed"
            raise ValueError(msg)
        return positions.float()


def test_failing_policy_ends_its_requests_only() -> None:
    engine = Engine(llama(), plan=Plan.uniform(FailsOn(7), budget=8, buffer=2), slots=2)
    run = engine.open_run(max_len=60, on_hook_error="answer")
    for number in range(6):
        run.submit(Request([7 if number % 3 == 1 else 5] * (3 + 2 * number), 20))
    results = run.results()
    assert [one.finish_reason == "error" for one in results] == [n % 3 == 1 for n in range(6)]
    assert "a policy failed" in str(results[1].error)
    raising = engine.open_run(max_len=60)
    raising.submit(Request([7] * 4, 20))
    with pytest.raises(HookError, match="a policy failed"):
        raising.results()


def test_failures_are_told_by_the_step_that_ends_their_requests_and_by_no_later_one() -> None:
    engine = Engine(llama(), plan=Plan.uniform(FailsOn(7), budget=8, buffer=2), slots=2)
    run = engine.open_run(max_len=60, on_hook_error="answer")
    for _ in range(3):
        run.submit(Request([7] * 4, 20))
    assert [one.finish_reason for one in run] == ["error"] * 3
    run.submit(Request([5], 2))
    assert run.step().failures == []


@attrs.define(eq=False)
class FailsOnDemand:
    """Annotates rows after decode steps, and fails when it is told to."""

    tracks = ("seen",)
    fails: bool = False

    @hookimpl
    def annotate(self, keys: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.fails:
            msg = "a policy failed"
            raise ValueError(msg)
        return {"seen": keys.new_ones(keys.shape[:2])}


def test_a_request_that_a_policy_fails_between_two_steps_ends_whatever_else_does() -> None:
    policy = FailsOnDemand()
    plan = Plan.uniform("streaming", policy, budget=8, buffer=6)
    run = Engine(llama(), plan=plan, slots=2).open_run(max_len=60, on_hook_error="answer")
    for token in (5, 7):
        run.submit(Request([token], 30, stop_ids=()))
    for _ in range(3):
        run.step()
    policy.fails = True
    with pytest.raises(SnapshotError, match="a policy failed"):
        run.snapshot(0)
    policy.fails = False
    run.cancel(1)
    results = run.step().results
    assert {one.id: one.finish_reason for one in results} == {0: "error", 1: "cancelled"}
    assert run.num_open == 0


@attrs.define(eq=False)
class WrongWhenTold:
    """Scores are NaN when it is told to."""

    wrong: bool = False

    @hookimpl
    def score(self, positions: torch.Tensor) -> torch.Tensor:
        return positions.float() * (torch.nan if self.wrong else 1)


class HoldsPromptsBack(Extension):
    """Has prompts wait when it is told to."""

    holds = False

    def ready(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        return () if self.holds else sequences


def test_a_request_whose_snapshot_shows_a_wrong_answer_ends() -> None:
    policy = WrongWhenTold()
    plan = Plan.uniform(policy, budget=8, buffer=4)
    engine = Engine(llama(), plan=plan, chunk=4, slots=1, extensions=[HoldsPromptsBack])
    run = engine.open_run(max_len=60, on_hook_error="answer")
    run.evictor.defers = True  # as on a GPU: values are checked when results are read
    run.submit(Request([5] * 30, 9, stop_ids=()))
    for _ in range(3):
        run.step()
    policy.wrong = run.extension(HoldsPromptsBack).holds = True
    run.step()  # evicts, and computes nothing
    with pytest.raises(SnapshotError, match="NaN"):
        run.snapshot(0)
    policy.wrong = run.extension(HoldsPromptsBack).holds = False
    (result,) = [result for _ in range(20) for result in run.step().results]
    assert (result.finish_reason, result.tokens) == ("error", ())
    assert "NaN" in str(result.error)


# --- fairness -------------------------------------------------------------------------------


class CountedTokens(Engine):
    """An engine whose clock advances by a second for each token that is computed, pads included.

    Attributes:
        shapes: Sequences and tokens of each forward.
    """

    def __init__(self, plan: Plan = FULL, **options: Any) -> None:
        super().__init__(tiny_model(num_layers=NUM_LAYERS), plan=plan, **options)
        self.shapes = shapes_of_forwards(self.adapter.model)

    @property
    def clock(self) -> Clock:
        return lambda: float(sum(batch * width for batch, width in self.shapes))


@pytest.mark.parametrize("steps_per_read", [1, 2])
def test_running_sequence_waits_for_one_chunk_at_most(steps_per_read: int) -> None:
    sizes = {"slots": 4, "chunk": 8, "max_tokens_per_forward": 20}
    engine = CountedTokens(**sizes, steps_per_read=steps_per_read)
    run = engine.open_run(max_len=120)
    run.submit(Request([5], 90))
    run.step()
    run.step()
    for _ in range(3):
        run.submit(Request([6] * 50, 5))
    num_before = len(engine.shapes)
    while run.num_open > 1:
        # Tokens of a step may be read once the next is launched.
        steps = [run.step() for _ in range(2 if steps_per_read == 1 else 3)]
        assert 0 in {number for events in steps for number, _ in events.tokens}
    forwards = engine.shapes[num_before:]
    prefills = [batch * width for batch, width in forwards if width > 1]
    assert max(prefills) <= 20
    # Two prompts of 8 tokens fit into a forward, so the third takes turns of its own afterwards.
    assert len(prefills) >= 14
    # A chunk, a decode step, a chunk, and so on.
    is_prefill = [width > 1 for _, width in forwards]
    assert is_prefill[: 2 * len(prefills)] == [True, False] * len(prefills)
    # Seconds of the clock are tokens computed: those of a chunk and of a decode step.
    assert max(prefills) < run.report.longest_gap_s <= max(prefills) + 4


@pytest.mark.parametrize("steps_per_read", [1, 2])
def test_first_tokens_leave_before_the_next_decode(steps_per_read: int) -> None:
    engine = CountedTokens(slots=4, chunk=8, steps_per_read=steps_per_read)
    run = engine.open_run(max_len=120)
    for number, length in enumerate((1, 20, 10)):
        run.submit(Request([6] * length, 90))
        served: list[int] = []
        while number not in served:
            served = [one for one, _ in run.step().tokens]
        assert served == [number]
        assert engine.shapes[-1] == (1, (length - 1) % 8 + 1)  # the last chunk of the prompt
        run.step()


def test_closed_run_reports_how_long_sequences_waited() -> None:
    engine = CountedTokens(slots=2, chunk=8)
    requests = [Request([5], 20), Request([5], 3), Request([6] * 40, 5)]
    run = engine.generate(requests)
    run.results()
    assert run.report.longest_gap_s == 40 + 2


def test_nothing_is_reported_where_nobody_waited() -> None:
    run = Engine(llama(), plan=FULL, slots=1).generate([[5], [6]], max_new_tokens=4)
    run.results()
    assert run.report.longest_gap_s == 0


def test_short_prompt_does_not_wait_for_a_long_one() -> None:
    engine = CountedTokens(slots=2, chunk=4)
    run = engine.open_run(max_len=200)
    run.submit(Request([5] * 160, 2))
    run.step()
    run.submit(Request([6] * 4, 2))
    steps = 0
    while not any(number == 1 for number, _ in run.step().tokens):
        steps += 1
    assert steps <= 1


def test_chunks_of_one_group_are_one_forward() -> None:
    engine = CountedTokens(slots=3, chunk=4)
    run = engine.open_run(max_len=40)
    for _ in range(3):
        run.submit(Request([5] * 8, 2))
    run.results()
    assert engine.shapes[:2] == [(3, 4), (3, 4)]


# --- memory ---------------------------------------------------------------------------------


@costly
@given(plans(num_layers=NUM_LAYERS), st.integers(1, 5), scripts(count=3))
def test_cache_stays_within_its_memory(plan: Plan, num_slots: int, script: Script) -> None:
    engine = Engine(llama(), TOKENIZER, plan, slots=1, on_hook_error="answer")
    with pytest.raises(KVPolicyError, match="80 tokens") as refused:
        engine.open_run(max_len=80, kv_memory=1)
    found = re.search(r"takes ([\d,]+) with", str(refused.value))
    assert found is not None
    needed = int(found[1].replace(",", ""))
    for spare in (0, needed - 1):
        memory = needed * num_slots + spare
        run = engine.open_run(max_len=80, kv_memory=memory)
        assert len(run.scheduler.slots) == num_slots
        script.play(run)
        assert run.report.peak_kv_bytes <= memory


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_number_of_requests() -> None:
    engine = Engine(llama(), TOKENIZER, TIGHT, slots=3, chunk=7)
    run = engine.open_run(max_len=80)
    addresses = [t.data_ptr() for layer in run.cache.layers for t in layer.tensors]
    num_bytes, live = run.cache.num_bytes, weakref.WeakSet[Sequence]()
    for number in range(120):
        run.submit(Request([number % 60] * (1 + number % 30), 1 + number % 9, logprobs=1))
        live.update([*run.waiting, *run.active])
        if number % 7 == 3:
            run.cancel(number)
        run.step()
    assert len(live) > 0
    list(run)
    gc.collect()
    assert len(live) == 0
    assert run.report.num_requests == 120
    assert run.num_open == 0
    assert run.cache.num_bytes == num_bytes
    assert addresses == [t.data_ptr() for layer in run.cache.layers for t in layer.tensors]


def test_nothing_keeps_a_sequence_that_ends_before_the_other_prompts_of_its_group() -> None:
    run = Engine(llama(), plan=FULL, slots=2, chunk=4).generate(
        [Request([5], 1), Request([6] * 40, 1)]
    )
    (ended,) = [weakref.ref(seq) for seq in run.waiting if seq.id == 0]
    assert [one.id for one in run.step().results] == [0]
    gc.collect()
    assert ended() is None
    assert run.num_open == 1
    assert [one.id for one in run] == [1]


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_len": 1}, "max_len=1"),
        ({"max_len": 2.5}, "max_len=2.5"),
        ({"max_prompt_len": 0}, "max_prompt_len=0"),
        ({"kv_memory": True}, "kv_memory=True"),
        ({"max_waiting": -1}, "max_waiting=-1"),
        ({"on_hook_error": "ignore"}, "'raise' or 'answer'"),
    ],
)
def test_invalid_limits_are_refused(limits: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        Engine(llama(), plan=FULL).open_run(**limits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"priority": 1.5}, "priority=1.5"),
        ({"deadline_s": -1}, "deadline_s=-1"),
        ({"deadline_s": float("nan")}, "deadline_s=nan"),
        ({"logprobs": -1}, "logprobs=-1"),
        ({"logprobs": True}, "logprobs=True"),
    ],
)
def test_invalid_fields_of_requests_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=re.escape(message)):
        Request([1], **fields)


# --- threads --------------------------------------------------------------------------------


def test_requests_come_from_any_thread() -> None:
    engine = Engine(llama(), TOKENIZER, TIGHT, slots=3)
    run = engine.open_run(max_len=80)
    numbers: list[tuple[int, Request]] = []

    def submit(first: int) -> None:
        for number in range(first, first + 3):
            request = Request([number] * (1 + number % 11), 6)
            numbers.append((run.submit(request), request))

    threads = [threading.Thread(target=submit, args=(first,)) for first in (0, 20, 40)]

    def results() -> Iterator[Any]:
        while not run.done:
            run.wait(timeout_s=PATIENCE_S)
            yield from run.step().results

    for thread in threads:
        thread.start()
    closer = threading.Thread(target=lambda: [t.join() for t in threads] and run.close())
    closer.start()
    found = {}
    for result in results():
        assert result.id not in found
        found[result.id] = result
    closer.join()
    assert sorted(found) == list(range(9))
    for number, request in numbers:
        (alone,) = engine.generate([request]).results()
        assert found[number].tokens == alone.tokens


def test_waiting_ends_when_something_comes_and_not_before() -> None:
    run = Engine(llama(), plan=FULL).open_run(max_len=40)
    run.wait(timeout_s=0)  # nothing comes
    open_when_waited = []

    def wait() -> None:
        run.wait()
        open_when_waited.append(run.num_open)

    thread = threading.Thread(target=wait)
    thread.start()
    run.submit(Request([5], 2))
    thread.join(PATIENCE_S)
    assert open_when_waited == [1]
    assert len(run.results()) == 1


def test_broken_run_ends_all_requests_with_the_error() -> None:
    run = Engine(llama(), plan=FULL, slots=1).open_run(max_len=40)
    for _ in range(3):
        run.submit(Request([5], 9))
    run.step()
    events = run.end("it broke")
    assert events.tokens == []  # they were returned by the step
    assert [(one.id, one.finish_reason, one.error) for one in events.results] == [
        (number, "error", "it broke") for number in range(3)
    ]
    assert len(events.results[0].tokens) == 1
    assert run.done
    with pytest.raises(EngineClosedError, match="it broke"):
        run.submit(Request([5]))


def test_nothing_runs_or_waits_once_a_run_has_ended() -> None:
    run = Engine(llama(), plan=FULL, slots=2).open_run(max_len=40)
    for prompt in ([5], [6] * 12, [7]):
        run.submit(Request(prompt, 9))
    run.step()
    before = run.stats
    assert (before.running, before.waiting) == (2, 1)
    assert before.held_bytes > 0
    run.end("it broke")
    after = run.stats
    assert (after.running, after.waiting, after.slots) == (0, 0, 2)
    assert (set(after.rows), after.held_bytes) == ({0}, 0)
    assert after.report.num_errors == 3
    assert (run.active, run.waiting) == ([], [])


def test_run_that_breaks_between_queue_and_slot_loses_no_request() -> None:
    plan = Plan.uniform("full", InterruptsResuming())
    run = Engine(llama(), TOKENIZER, plan, slots=2).open_run(max_len=40)
    run.submit(Request([5], 2, snapshot=True))
    (begun,) = run
    run.submit(Request(resume=begun.snapshot, max_new_tokens=9))  # it is the first to get a slot
    for _ in range(2):
        run.submit(Request([5], 9))
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert sorted(one.id for one in run.end("it broke").results) == [1, 2, 3]
    assert run.done


@attrs.define(eq=False)
class FailsAt:
    """Runs out of memory when it is shown the tokens of a decode step, at the call of a number."""

    number: int
    num_calls: int = 0

    @hookimpl
    def observe(self, start: int) -> None:
        if start and self.num_calls == self.number:
            raise MemoryError
        self.num_calls += start > 0


def test_broken_run_returns_the_tokens_of_its_last_step() -> None:
    plan = Plan.uniform(FailsAt(0), budget=8, buffer=2)
    run = Engine(llama(), plan=plan, slots=2).open_run(max_len=40)
    for _ in range(2):
        run.submit(Request([5], 20, logprobs=1))
    tokens = []
    with pytest.raises(HookError):  # noqa: PT012 - in one of these
        while True:
            tokens += run.step().tokens
    events = run.end("it broke")
    assert len(events.tokens) == 2, "the step had sampled them"
    tokens += events.tokens
    for result in events.results:
        assert tuple(token for number, token in tokens if number == result.id) == result.tokens
        assert events.logprobs[result.id] == [result.logprobs[-1]]


# --- many that wait -------------------------------------------------------------------------


def test_deadlines_and_priorities_hold_among_many_that_wait() -> None:
    clock = FakeClock()
    run = opened(Engine(llama(), plan=FULL, slots=2), 40, clock)
    for number in range(30):
        run.submit(Request([5], 2, priority=number % 2, deadline_s=5 + number))
    results = []
    while len(results) < 4:
        results += run.step().results
    assert sorted(one.id for one in results) == [1, 3, 5, 7]
    clock.now = 6.0  # those of 0, and of 1, which has ended
    results = run.step().results
    assert (results[0].id, results[0].finish_reason) == (0, "deadline")
    clock.now = 40.0
    assert {one.finish_reason for one in run.results()} == {"deadline"}
    assert run.num_open == 0
