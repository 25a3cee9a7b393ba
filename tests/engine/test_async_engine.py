"""An engine for asyncio: streams, cancellation, ends, and failures."""

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest
import torch
from arrivals import Script, check_equal_alone, scripts
from hypothesis import given
from hypothesis import strategies as st
from recorder import InterruptsResuming
from step_gate import Gate
from strategies import costly, plans
from tiny import byte_tokenizer, shared_model, tiny_model, tiny_tokenizer

from kvpolicy import (
    AsyncEngine,
    Engine,
    EngineClosedError,
    KVPolicyError,
    Plan,
    QueueFullError,
    Request,
    RequestError,
    RequestStream,
    Result,
    StreamChunk,
    hookimpl,
)
from kvpolicy.engine.requests.results import HookFailure
from kvpolicy.errors import SnapshotError

NUM_LAYERS = 2
TOKENIZER = tiny_tokenizer()
FULL = Plan.uniform("full")
TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
PATIENCE_S = 60  # for what must come, on a busy machine


def engine(plan: Plan = TIGHT, **options: Any) -> Engine:
    return Engine(
        shared_model(num_layers=NUM_LAYERS, dtype=torch.float64), TOKENIZER, plan, **options
    )


def served(
    main: Callable[[AsyncEngine], Coroutine[Any, Any, Any]],
    engine: Engine,
    **limits: Any,
) -> Any:
    """Run a coroutine with an asynchronous engine, which ends with it."""

    async def run() -> Any:
        async with AsyncEngine(engine, **({"max_len": 80} | limits)) as serving:
            return await asyncio.wait_for(main(serving), PATIENCE_S)

    return asyncio.run(run())


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.002)


def closed_gate(*, after: float = 0) -> Gate:
    """A gate that lets only so many steps begin until it is opened."""
    gate = Gate()
    gate.close(after=after)
    return gate


async def chunks_of(stream: RequestStream) -> list[StreamChunk]:
    return [chunk async for chunk in stream]


# --- results --------------------------------------------------------------------------------


@costly
@given(plans(num_layers=NUM_LAYERS), st.integers(1, 3), scripts())
def test_streams_are_those_of_requests_alone(plan: Plan, slots: int, script: Script) -> None:
    alike = engine(plan, slots=slots, chunk=7)

    async def main(serving: AsyncEngine) -> list[list[StreamChunk]]:
        streams: list[RequestStream] = []
        readers = []
        for action, number in script.actions:
            if action == "submit":
                streams.append(serving.submit(script.requests[number]))
                readers.append(asyncio.ensure_future(chunks_of(streams[-1])))
            elif action == "cancel":
                streams[number].cancel()
            else:
                for _ in range(number):
                    await serving.between_steps(lambda _: None)
        await serving.close(finish=True)
        return await asyncio.gather(*readers)

    found = served(main, alike)
    results = [chunks[-1].result for chunks in found]
    tokens = {
        number: [token for chunk in chunks for token in chunk.tokens]
        for number, chunks in enumerate(found)
    }
    check_equal_alone(
        results, [alike.generate([one]).results()[0] for one in script.requests], tokens
    )
    for chunks in found:
        last = chunks[-1].result
        assert "".join(chunk.text for chunk in chunks) == last.text
        assert [chunk.result for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        if last.logprobs is None:
            assert {chunk.logprobs for chunk in chunks} == {None}
        else:
            assert tuple(one for chunk in chunks for one in chunk.logprobs) == last.logprobs


def test_slow_reader_gets_everything_in_one_chunk() -> None:
    async def main(serving: AsyncEngine) -> list[StreamChunk]:
        stream = serving.submit(Request("hello", 20))
        await stream.result()
        return await chunks_of(stream)

    (chunk,) = served(main, engine())
    assert len(chunk.tokens) == 20
    assert chunk.result.text == chunk.text


def test_reader_gets_tokens_before_the_request_has_ended() -> None:
    async def main(serving: AsyncEngine) -> None:
        stream = serving.submit(Request("hello", 70))
        chunk = await anext(stream)
        assert chunk.tokens
        assert chunk.result is None
        await until(lambda: serving.stats.running == 1)
        gate.open()

    gate = closed_gate(after=3)
    served(main, engine(), before_step=gate.wait)


def test_first_token_is_read_while_no_decode_may_begin() -> None:
    async def main(serving: AsyncEngine) -> None:
        stream = serving.submit(Request([5] * 20, 70))
        assert len((await anext(stream)).tokens) == 1
        gate.open()

    gate = closed_gate(after=1)
    served(main, Engine(shared_model(), plan=FULL), before_step=gate.wait)


def test_text_waits_for_whole_characters_and_ends_before_a_stop_string() -> None:
    model = tiny_model(vocab=256, dtype=torch.float64)
    plain = Engine(model, byte_tokenizer(), FULL)
    (free,) = plain.generate([Request("où", 40)]).results()
    assert free.text is not None
    stop = free.text[20:22]

    async def main(serving: AsyncEngine) -> list[list[StreamChunk]]:
        streams = [serving.submit(Request("où", 40, stop=one)) for one in ((), (stop,))]
        return [await chunks_of(stream) for stream in streams]

    whole, stopped = served(main, plain)
    assert "".join(chunk.text for chunk in whole) == free.text
    assert "".join(chunk.text for chunk in stopped) == free.text[: free.text.index(stop)]
    assert stopped[-1].result.finish_reason == "stop"


def test_engine_without_tokenizer_streams_tokens() -> None:
    async def main(serving: AsyncEngine) -> list[StreamChunk]:
        return await chunks_of(serving.submit(Request([5, 6], 4)))

    chunks = served(main, Engine(shared_model(), plan=FULL))
    assert {chunk.text for chunk in chunks} == {""}
    assert sum(len(chunk.tokens) for chunk in chunks) == 4


# --- refusals -------------------------------------------------------------------------------


def test_submit_raises_as_an_open_run_does() -> None:
    async def main(serving: AsyncEngine) -> None:
        with pytest.raises(RequestError):
            serving.submit(Request(""))
        kept = [serving.submit(Request("a", 60)) for _ in range(3)]
        with pytest.raises(QueueFullError, match="max_waiting"):
            serving.submit(Request("a", 60))
        assert len(kept) == serving.num_open == 3
        gate.open()

    gate = closed_gate()
    served(main, engine(slots=2), max_waiting=1, before_step=gate.wait)


def test_engine_accepts_nothing_before_its_start_and_after_its_end() -> None:
    serving = AsyncEngine(engine(), max_len=40)
    with pytest.raises(EngineClosedError):
        serving.submit(Request("a"))

    async def main() -> None:
        async with serving:
            pass
        with pytest.raises(EngineClosedError):
            serving.submit(Request("a"))
        await serving.close(finish=True)  # again: no effect
        with pytest.raises(KVPolicyError, match="AsyncEngine"):
            await serving.__aenter__()

    asyncio.run(main())
    with pytest.raises(KVPolicyError, match="max_len"):
        AsyncEngine(engine(), max_len=0)


def test_engine_that_was_never_started_can_be_closed() -> None:
    asyncio.run(AsyncEngine(engine(), max_len=40).close(finish=True))


def test_submit_belongs_to_the_event_loop() -> None:
    async def main(serving: AsyncEngine) -> None:
        with pytest.raises(KVPolicyError, match="event loop"):
            await asyncio.to_thread(serving.submit, Request("a"))

    served(main, engine())


# --- cancellation ---------------------------------------------------------------------------


Leave = Callable[[AsyncEngine], Awaitable[RequestStream | None]]


async def leave_by_garbage(serving: AsyncEngine) -> None:
    serving.submit(Request("a", 70))
    gc.collect()


async def leave_by_aclose(serving: AsyncEngine) -> RequestStream:
    stream = serving.submit(Request("a", 70))
    await anext(stream)
    await stream.aclose()
    assert await chunks_of(stream) == []
    return stream


async def leave_by_block(serving: AsyncEngine) -> RequestStream:
    async with serving.submit(Request("a", 70)) as stream:
        await anext(stream)
    return stream


async def leave_by_cancelled_task(serving: AsyncEngine) -> None:
    async def read() -> None:
        async for _ in serving.submit(Request("a", 70)):
            pass

    task = asyncio.create_task(read())
    await until(lambda: serving.stats.running == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    del task
    gc.collect()


@pytest.mark.parametrize(
    "leave", [leave_by_garbage, leave_by_aclose, leave_by_block, leave_by_cancelled_task]
)
def test_request_whose_stream_is_left_is_cancelled(leave: Leave) -> None:
    async def main(serving: AsyncEngine) -> None:
        stream = await leave(serving)
        gate.open()
        if stream is not None:
            assert (await stream.result()).finish_reason == "cancelled"
        await until(lambda: serving.stats.report.num_requests == 1)
        assert serving.stats.report.new_tokens <= 4
        assert serving.stats.running == serving.stats.waiting == 0

    gate = closed_gate(after=3)
    served(main, engine(FULL), before_step=gate.wait)


def test_cancelled_request_has_a_last_chunk() -> None:
    async def main(serving: AsyncEngine) -> None:
        stream = serving.submit(Request("a", 70))
        first = await anext(stream)
        stream.cancel()
        stream.cancel()
        gate.open()
        chunks = [first, *await chunks_of(stream)]
        result = chunks[-1].result
        assert result.finish_reason == "cancelled"
        assert tuple(token for chunk in chunks for token in chunk.tokens) == result.tokens
        stream.cancel()

    gate = closed_gate(after=3)
    served(main, engine(), before_step=gate.wait)


# --- the end --------------------------------------------------------------------------------


def test_close_with_finish_serves_what_runs_and_waits() -> None:
    async def main(serving: AsyncEngine) -> list[Result]:
        streams = [serving.submit(Request("a", 20)) for _ in range(5)]
        await serving.close(finish=True)
        return [await stream.result() for stream in streams]

    results = served(main, engine(slots=2))
    assert [result.finish_reason for result in results] == ["length"] * 5


def test_close_without_finish_cancels_what_runs_and_waits() -> None:
    async def main(serving: AsyncEngine) -> list[Result]:
        streams = [serving.submit(Request("a", 70)) for _ in range(5)]
        await anext(streams[0])
        closing = asyncio.create_task(serving.close(finish=False))
        await asyncio.sleep(0)  # it cancels
        gate.open()
        await closing
        return [await stream.result() for stream in streams]

    gate = closed_gate(after=3)
    results = served(main, engine(slots=2), before_step=gate.wait)
    assert [result.finish_reason for result in results] == ["cancelled"] * 5
    assert len(results[0].tokens) > 0


def test_close_cancels_what_is_left_when_its_time_is_up() -> None:
    async def main(serving: AsyncEngine) -> Result:
        stream = serving.submit(Request("a", 70))
        closing = asyncio.create_task(serving.close(finish=True, timeout_s=0))
        for _ in range(20):  # what follows at once
            await asyncio.sleep(0)
        gate.open()
        await closing
        return await stream.result()

    gate = closed_gate(after=3)
    assert served(main, engine(), before_step=gate.wait).finish_reason == "cancelled"


def test_leaving_the_block_ends_the_thread() -> None:
    async def main(serving: AsyncEngine) -> None:
        serving.submit(Request("a", 5))

    before = threading.active_count()
    served(main, engine())
    assert threading.active_count() == before


def test_what_comes_before_a_step_is_called_once_for_each() -> None:
    threads = []

    async def main(serving: AsyncEngine) -> None:
        await serving.submit(Request("a", 5)).result()

    served(main, engine(FULL), before_step=lambda: threads.append(threading.get_ident()))
    # The first step gives two tokens; the cancellation at the end and the closing may be steps.
    assert 4 <= len(threads) <= 6
    assert len({*threads} - {threading.get_ident()}) == 1


def test_idle_engine_takes_no_step() -> None:
    steps = []

    async def main(serving: AsyncEngine) -> None:
        await serving.submit(Request("a", 5)).result()
        gc.collect()
        await serving.between_steps(lambda _: None)  # after the step of a cancellation
        num, num_calls = len(steps), 5
        for _ in range(num_calls):
            await serving.between_steps(lambda _: None)
        assert len(steps) - num <= num_calls + 1  # only those that were asked for

    served(main, engine(), before_step=lambda: steps.append(None))


def test_loop_that_ends_without_closing_ends_the_engine() -> None:
    async def main() -> tuple[AsyncEngine, RequestStream]:
        serving = await AsyncEngine(engine(FULL), max_len=500).__aenter__()
        return serving, serving.submit(Request("a", 400))

    before = threading.active_count()
    kept = asyncio.run(main())
    limit = time.monotonic() + PATIENCE_S
    while threading.active_count() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert threading.active_count() == before
    del kept


def test_function_is_called_between_steps() -> None:
    async def main(serving: AsyncEngine) -> None:
        assert await serving.between_steps(lambda run: run.num_open) == 0  # when idle, too
        stream = serving.submit(Request("hello", 30))
        before = await anext(stream)
        snapshot = await serving.between_steps(lambda run: run.snapshot(stream.id))
        tokens = len(snapshot.tokens)
        assert tokens >= len(before.tokens)
        rest = Request(max_new_tokens=30 - tokens, resume=snapshot)
        whole, resumed = await stream.result(), await serving.submit(rest).result()
        assert whole.tokens[tokens:] == resumed.tokens
        with pytest.raises(SnapshotError):
            await serving.between_steps(lambda run: run.snapshot(stream.id))
        assert (await serving.submit(Request("a", 3)).result()).finish_reason == "length"
        await serving.close(finish=True)
        with pytest.raises(EngineClosedError):
            await serving.between_steps(lambda run: run.num_open)

    served(main, engine())


# --- failures -------------------------------------------------------------------------------


class FailsLate:
    """Fails at compactions of sequences that begin with token 7; raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    @hookimpl
    def observe(self, token_ids: torch.Tensor, start: int, memory: Any) -> None:
        if start == 0:
            memory.of(self)[0]["first"] = int(token_ids[0])

    @hookimpl
    def score(self, memory: Any, positions: torch.Tensor) -> torch.Tensor:
        if any(notes["first"] == 7 for notes in memory.of(self)):
            raise self._error
        return positions.float()


class Listener:
    """Notes what it is told, and in which thread."""

    def __init__(self) -> None:
        self.failures: list[HookFailure] = []
        self.errors: list[BaseException] = []
        self.threads: set[int] = set()

    def hook_failed(self, failure: HookFailure) -> None:
        self.failures.append(failure)
        self.threads.add(threading.get_ident())

    def broke(self, error: BaseException) -> None:
        self.errors.append(error)
        self.threads.add(threading.get_ident())


def test_failing_policy_ends_its_requests_only() -> None:
    plan = Plan.uniform(FailsLate(ValueError("not today")), budget=8, buffer=2)

    async def main(serving: AsyncEngine) -> list[Result]:
        # Of different lengths: sequences with equally many rows share a call.
        streams = [serving.submit(Request([first] * first, 20)) for first in (5, 7, 6)]
        results = [await stream.result() for stream in streams]
        return [*results, await serving.submit(Request([5] * 5, 20)).result()]

    # Although this engine is one that raises.
    listener = Listener()
    results = served(main, engine(plan, slots=3), listener=listener)
    (failure,) = listener.failures
    assert failure.requests == (1,)
    assert failure.summary == "policy 'fails_late' raised ValueError in score() at layer 0"
    assert listener.threads == {threading.get_ident()}
    assert not listener.errors
    assert [one.finish_reason for one in results] == ["length", "error", "length", "length"]
    assert "not today" in str(results[1].error)
    assert results[0].tokens == results[3].tokens


def test_broken_engine_ends_all_requests_with_a_sentence() -> None:
    plan = Plan.uniform(FailsLate(MemoryError("no memory")), budget=8, buffer=2)

    listener = Listener()

    async def main(serving: AsyncEngine) -> list[Result]:
        assert (serving.is_running, serving.broken_by) == (True, None)
        streams = [serving.submit(Request([first] * 5, 60)) for first in (5, 7, 6)]
        first = await streams[0].result()
        # As soon as anybody can know it, and before another request.
        assert not serving.is_running
        assert serving.broken_by == "policy 'fails_late' raised MemoryError in score() at layer 0"
        results = [first, *[await stream.result() for stream in streams[1:]]]
        await until(lambda: bool(listener.errors))
        with pytest.raises(EngineClosedError, match="no memory"):
            serving.submit(Request([5]))
        await serving.close(finish=True)
        return results

    results = served(main, engine(plan, slots=2), listener=listener)
    assert [one.finish_reason for one in results] == ["error"] * 3
    assert [type(error).__name__ for error in listener.errors] == ["HookError"]
    assert not listener.failures
    assert listener.threads == {threading.get_ident()}
    for one in results:
        assert "no memory" in str(one.error)
    assert len(results[0].tokens) > 0


def test_engine_that_breaks_without_a_request_tells_it() -> None:
    def fail() -> None:
        msg = "words of a prompt"
        raise RuntimeError(msg)

    async def main(serving: AsyncEngine) -> None:
        await serving.between_steps(lambda _: None)
        serving.before_step = fail
        await serving.between_steps(lambda _: None)
        await until(lambda: not serving.is_running)
        assert serving.broken_by == "RuntimeError"
        await serving.close(finish=True)
        with pytest.raises(EngineClosedError):
            await serving.between_steps(lambda _: None)

    served(main, engine())


def test_engine_that_is_closed_has_not_broken() -> None:
    async def main(serving: AsyncEngine) -> None:
        await serving.close(finish=True)
        assert (serving.is_running, serving.broken_by) == (False, None)

    served(main, engine())


def test_request_that_is_lost_in_a_broken_step_has_a_result() -> None:
    """It has left the queue, and has no slot yet, when another one is resumed."""

    async def main(serving: AsyncEngine) -> list[Result]:
        begun = await serving.submit(Request("a", 2, snapshot=True)).result()
        gate.close()
        resumed = serving.submit(Request(max_new_tokens=3, resume=begun.snapshot))
        streams = [resumed, *[serving.submit(Request("a", 5)) for _ in range(2)]]
        gate.open()
        return [await stream.result() for stream in streams]

    gate = Gate()
    interrupted = engine(Plan.uniform("full", InterruptsResuming()), slots=2)
    for result in served(main, interrupted, before_step=gate.wait):
        assert result.finish_reason == "error"
        assert "KeyboardInterrupt" in str(result.error)


def test_tokenizer_that_fails_ends_its_request() -> None:
    failing = engine(FULL)
    (plain,) = failing.generate([Request([5], 60)]).results()

    class Tokenizer:
        def __call__(self, text: str) -> Any:
            return TOKENIZER(text)

        def decode(self, tokens: Any, **options: Any) -> str:
            if plain.tokens[10] in tokens:
                msg = "no such token"
                raise ValueError(msg)
            return str(TOKENIZER.decode(tokens, **options))

    failing.tokenizer = Tokenizer()

    async def main(serving: AsyncEngine) -> None:
        stream = serving.submit(Request([5], 60))
        result = await stream.result()
        assert result.finish_reason == "error"
        assert "no such token" in str(result.error)
        assert (await chunks_of(stream))[-1].result is result
        with pytest.raises(RequestError, match="no such token"):
            await chunks_of(serving.submit(Request([5], 60)))

    served(main, failing)


def test_stats_tell_what_runs_and_what_it_has_cost() -> None:
    async def main(serving: AsyncEngine) -> None:
        assert (serving.stats.slots, serving.stats.running, serving.stats.rows) == (2, 0, (0, 0))
        streams = [serving.submit(Request("hello", 60)) for _ in range(4)]

        def compacts() -> bool:
            gate.close(after=1)
            return serving.stats.report.compactions > 0

        await until(compacts)
        stats = serving.stats
        assert (stats.waiting, stats.running) == (2, 2)
        assert 0 < max(stats.rows) <= 2 * 16
        assert 0 < stats.held_bytes < stats.report.peak_kv_bytes
        gate.open()
        for stream in streams:
            await stream.result()
        done = serving.stats
        assert (done.waiting, done.running, done.held_bytes) == (0, 0, 0)
        assert done.report.num_requests == 4
        assert done.report.new_tokens == 240
        assert done.report.policy_s > 0

    gate = closed_gate()
    served(main, engine(slots=2), before_step=gate.wait)
