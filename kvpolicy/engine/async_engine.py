"""An engine for asyncio: requests come at any time, their tokens are streamed as they are made.

The steps of the engine run in one thread of its own. What a step brings is handed to the event loop
at once for all requests; a stream keeps what its reader has not fetched yet and gives it in one
chunk, so a slow reader never holds up the engine.
"""

import asyncio
import threading
import time
import weakref
from collections import abc, deque
from typing import Any, Protocol, TypeVar

import attrs

from kvpolicy.devices import as_current
from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.requests.detokenize import TextPieces
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import EngineStats, Events, HookFailure, Result, TokenLogprobs
from kvpolicy.errors import EngineClosedError, KVPolicyError, error_kind, error_summary

T = TypeVar("T")

# Statistics are renewed so often while requests run.
_STATS_EVERY_S = 0.1


@attrs.frozen
class StreamChunk:
    """What has come of a request since the chunk before.

    Attributes:
        tokens: New tokens.
        text: The text that has become final; empty without a tokenizer. The texts of all chunks
            together are that of the result.
        logprobs: Log-probabilities of the tokens, if the request asks for them.
        result: The result of the request, in its last chunk.
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None = None
    result: Result | None = None


@attrs.define(eq=False)
class _Unread:
    """What has come of a request and was not read; belongs to the thread of the event loop."""

    tokens: list[int] = attrs.field(factory=list)
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    result: Result | None = None
    has_come: asyncio.Event = attrs.field(factory=asyncio.Event)
    has_ended: asyncio.Event = attrs.field(factory=asyncio.Event)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _answer(
    answer: abc.Callable[[Any], None], called: "asyncio.Future[Any]", value: object
) -> None:
    """Answer a call, unless nobody waits for it any more."""
    if not called.done():
        answer(value)


def _cancel(run: Run, number: int, unread: _Unread) -> None:
    if unread.result is None:
        run.cancel(number)


class RequestStream:
    """One request of an `AsyncEngine`: iterate over it for its chunks, or wait for its result.

    The request is cancelled by `cancel`, by `aclose` or the end of an ``async with`` block, and
    when the stream is garbage, unless it has ended before.

    Attributes:
        id: Number of the request.
    """

    def __init__(self, number: int, run: Run, request: Request, unread: _Unread) -> None:
        self.id = number
        self._unread = unread
        self._with_logprobs = request.logprobs is not None
        tokenizer = run.tokenizer
        self._pieces: TextPieces | None = None
        if tokenizer is not None:
            self._pieces = TextPieces(tokenizer, run.stop_strings_of(request), request.continued)
        self._is_over = False
        self._cancel = weakref.finalize(self, _cancel, run, number, unread)
        self._cancel.atexit = False

    def cancel(self) -> None:
        """End the request before its next token; the last chunk and the result still come."""
        self._cancel()

    async def aclose(self) -> None:
        """Cancel the request, and iterate no more."""
        self._is_over = True
        self.cancel()

    async def result(self) -> Result:
        """The result, once the request has ended; chunks may be read or not."""
        await self._unread.has_ended.wait()
        assert self._unread.result is not None
        return self._unread.result

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> StreamChunk:
        """The next chunk: everything that has come since the one before.

        Raises:
            RequestError: The tokenizer cannot decode the tokens.
        """
        if self._is_over:
            raise StopAsyncIteration
        await self._unread.has_come.wait()
        return self._chunk()

    def _chunk(self) -> StreamChunk:
        unread = self._unread
        tokens, logprobs, result = unread.tokens, unread.logprobs, unread.result
        unread.tokens, unread.logprobs = [], []
        if result is None:
            unread.has_come.clear()
        self._is_over = result is not None
        return StreamChunk(
            tuple(tokens),
            self._text(tokens, result),
            tuple(logprobs) if self._with_logprobs else None,
            result,
        )

    def _text(self, tokens: abc.Sequence[int], result: Result | None) -> str:
        if self._pieces is None:
            return ""
        if result is None:
            return self._pieces.add(tokens)
        return self._pieces.rest_of(result.text or "")


class EngineListener(Protocol):
    """What is told of failures of an `AsyncEngine`, in the thread of the event loop."""

    def hook_failed(self, failure: HookFailure) -> None:
        """A policy has failed, and the requests of the call have ended."""

    def broke(self, error: BaseException) -> None:
        """The engine has broken, and all requests have ended."""


class AsyncEngine:
    """Serves requests as they come, for asyncio.

    Use it in an ``async with`` block. `submit` and the streams belong to the event loop in which
    the block was entered.

    If a policy fails, the requests of the failing call end with the error, whatever the engine was
    told, and the others go on. Anything else that a step raises ends the engine: every request gets
    a result with the error, and `submit` raises `EngineClosedError`.

    Attributes:
        engine: Runs the steps.
        before_step: Called before each step, in the thread that runs them; ``None``: nothing is.
            It may be set at any time, in any thread. The step begins when it returns, so it can
            hold steps back, count them, or break the engine in a test: what it raises counts as
            raised by the step.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
        listener: EngineListener | None = None,
        before_step: abc.Callable[[], object] | None = None,
    ) -> None:
        """Allocate the cache; the limits are those of `Engine.open_run`.

        Args:
            engine: Runs the steps. It may serve nothing else at the same time.
            max_len: The most tokens of a sequence, prompt and generation together.
            max_prompt_len: The most tokens of a prompt.
            kv_memory: The most bytes of the cache, from which the plan makes a number of slots.
            max_waiting: Requests that may wait while all slots are in use.
            listener: Is told of failures; ``None``: nobody is.
            before_step: See the attribute.

        Raises:
            KVPolicyError: As `Engine.open_run`.
        """
        if (num := engine.adapter.processes.num_processes) > 1:
            msg = (
                f"{num} processes share the model, and a request would not reach all of them "
                "before the same step; serve lists of requests with engine.generate()"
            )
            raise KVPolicyError(msg)
        self._run = engine.open_run(
            max_len=max_len,
            max_prompt_len=max_prompt_len,
            kv_memory=kv_memory,
            max_waiting=max_waiting,
            on_hook_error="answer",
        )
        self.engine = engine
        self.before_step = before_step
        self._listener = listener
        self._broken_by: str | None = None
        self._stats = self._run.stats
        self._unread: dict[int, _Unread] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Event
        self._calls: deque[tuple[abc.Callable[[Run], Any], asyncio.Future[Any]]] = deque()

    async def __aenter__(self) -> "AsyncEngine":
        if self._thread is not None:
            msg = "an AsyncEngine can be entered once; make another"
            raise KVPolicyError(msg)
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        # A daemon, so that a program that fails to close it can end.
        self._thread = threading.Thread(target=self._serve, name="kvpolicy-engine", daemon=True)
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close(finish=False)

    def submit(self, request: Request) -> RequestStream:
        """Have a request served.

        Raises:
            RequestError: If it cannot be served.
            QueueFullError: If all slots are in use and ``max_waiting`` requests wait.
            EngineClosedError: If the engine is closed, has not been started, or has broken.
        """
        if self._thread is None:
            msg = "the engine has not been started; submit within async with AsyncEngine(...)"
            raise EngineClosedError(msg)
        if _running_loop() is not self._loop:
            msg = (
                "submit() was called outside of the event loop in which the AsyncEngine was "
                "entered; call it there, as with loop.call_soon_threadsafe"
            )
            raise KVPolicyError(msg)
        number = self._run.submit(request)
        unread = self._unread[number] = _Unread()
        return RequestStream(number, self._run, request, unread)

    async def close(self, *, finish: bool, timeout_s: float | None = None) -> None:
        """Accept no more requests, and end.

        Args:
            finish: Whether requests that run or wait are served; if not, they are cancelled.
            timeout_s: Serve them no longer than so many seconds, and cancel the rest.
        """
        self._run.close()
        if self._thread is None:
            return
        if not finish:
            self._cancel_all()
        try:
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        except TimeoutError:
            self._cancel_all()
            await self._ended.wait()
        self._thread.join()

    async def between_steps(self, function: abc.Callable[[Run], T]) -> T:
        """Call a function with the run between two steps, in the thread that runs them.

        So a snapshot of a request that runs can be taken, ``lambda run: run.snapshot(stream.id)``,
        or its rows be read. Nothing else happens meanwhile. The function must not call `step`.

        Args:
            function: Gets the run.

        Returns:
            What the function returns; what it raises is raised.

        Raises:
            EngineClosedError: If the engine has ended.
        """
        if self._thread is None or self._ended.is_set():
            msg = "nothing can be called between steps: the engine does not run"
            raise EngineClosedError(msg)
        called: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._calls.append((function, called))
        self._run.wake()
        return await called

    @property
    def is_running(self) -> bool:
        """Whether it has been started, and has neither ended nor broken."""
        is_alive = self._thread is not None and self._thread.is_alive()
        return is_alive and self._broken_by is None

    @property
    def broken_by(self) -> str | None:
        """What has broken it; ``None``: nothing has. It may be read in any thread.

        The class of the exception, or which policy has failed where; no part of a message, which
        may hold parts of prompts.
        """
        return self._broken_by

    @property
    def num_open(self) -> int:
        """Requests that run or wait now. It may be read in any thread."""
        return self._run.num_open

    @property
    def stats(self) -> EngineStats:
        """What the engine does, and what it has cost so far; a tenth of a second old at most.

        A step that takes longer delays it.
        """
        return self._stats

    def _cancel_all(self) -> None:
        for number in list(self._unread):
            self._run.cancel(number)

    # In the thread of the engine

    def _serve(self) -> None:
        run, device = self._run, self.engine.adapter.device
        try:
            # A thread begins with the first GPU, whatever the model is on.
            with as_current(device):
                self._run_steps()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._broken_by = error_kind(error)  # before anybody can know it from a result
            sentence = f"the engine has broken: {error_summary(error)}; start another"
            self._hand_over(self._deliver, run.end(sentence))
            if self._listener is not None:
                self._hand_over(self._listener.broke, error)
        finally:
            self._hand_over(self._fail_waiting_calls)

    def _run_steps(self) -> None:
        run, renewed = self._run, 0.0
        while not run.done:
            if not self._calls:  # a step may have taken what was to wake this thread
                run.wait()
            self._make_calls()
            if (call := self.before_step) is not None:
                call()
            events = run.step()
            try:
                if not run.num_open or time.monotonic() - renewed > _STATS_EVERY_S:
                    self._stats, renewed = run.stats, time.monotonic()
            finally:  # reading seconds waits for a GPU, which may fail
                self._hand_over(self._deliver, events)

    def _make_calls(self) -> None:
        """Call what waits for the time between two steps."""
        while self._calls:
            function, called = self._calls.popleft()
            try:
                answer = function(self._run)
            except Exception as error:  # it belongs to the caller
                self._hand_over(_answer, called.set_exception, called, error)
            else:
                self._hand_over(_answer, called.set_result, called, answer)

    def _hand_over(self, call: abc.Callable[..., object], *arguments: Any) -> None:
        """Call a function in the thread of the event loop."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:  # the loop is closed, so nobody is there to read or submit
            self._run.close()
            self._cancel_all()

    # In the thread of the event loop

    def _fail_waiting_calls(self) -> None:
        self._ended.set()
        while self._calls:
            _, called = self._calls.popleft()
            msg = "the engine ended before the next step"
            _answer(called.set_exception, called, EngineClosedError(msg))

    def _deliver(self, events: Events) -> None:
        for number, token in events.tokens:
            unread = self._unread[number]
            unread.tokens.append(token)
            unread.has_come.set()
        for number, logprobs in events.logprobs.items():
            self._unread[number].logprobs += logprobs
        for result in events.results:
            unread = self._unread.pop(result.id)
            unread.result = result
            unread.has_come.set()
            unread.has_ended.set()
        if self._listener is not None:
            for failure in events.failures:
                self._listener.hook_failed(failure)
