"""The choices of one body: requests to an engine, followed until each has its result.

A stream looks at every chunk of its choices, an answer in one piece at the first one only; what
comes of a choice is noted in one place for both.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence

import attrs

from kvpolicy.engine.async_engine import RequestStream, StreamChunk
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import EngineClosedError, QueueFullError, RequestError
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.bodies import GenerationBody
from kvpolicy.serve.plans import ServedPlan
from kvpolicy.serve.prompts import Prompt
from kvpolicy.serve.record import Record
from kvpolicy.validators import MAX_SEED

PING_S = 15.0  # proxies end connections on which nothing comes for a minute or less

SHUTTING_DOWN = "the server is shutting down; send the request again, to another server"


@attrs.frozen
class Limits:
    """What ends the generation of a body.

    Attributes:
        max_new_tokens: The most tokens of each choice.
        deadline_s: Seconds until it ends without an answer.
        logprobs: See `Request.logprobs`.
        prompt_logprobs: See `Request.prompt_logprobs`.
    """

    max_new_tokens: int
    deadline_s: float
    logprobs: int | None
    prompt_logprobs: int | None = None


def requests_of(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    limits: Limits,
    stop_ids: Sequence[int] | None,
    *,
    snapshot: bool = False,
) -> list[Request]:
    """The requests of a body: ``n`` for each of its prompts, in order.

    The choices of a prompt have seeds that follow each other.

    Args:
        body: The body.
        prompts: Its prompts.
        sampling: How its first choice is sampled.
        limits: Its limits.
        stop_ids: Tokens that end a choice; ``None``: the model's own.
        snapshot: Whether sequences are wanted as they are at their ends.
    """
    seeds = [(sampling.seed + i) % (MAX_SEED + 1) for i in range(body.n)]
    return [
        Request(
            prompt.tokens,
            limits.max_new_tokens,
            attrs.evolve(sampling, seed=seed),
            tuple(body.stop),
            None if stop_ids is None else tuple(stop_ids),
            min_new_tokens=body.min_tokens,
            deadline_s=limits.deadline_s,
            logprobs=limits.logprobs,
            prompt_logprobs=limits.prompt_logprobs,
            snapshot=snapshot,
            include_stop=body.include_stop_str_in_output,
            images=prompt.images,
        )
        for prompt in prompts
        for seed in seeds
    ]


def random_seed() -> int:
    """A seed for a request that gives none."""
    return secrets.randbelow(MAX_SEED)


class Generation:
    """The choices of one body while they are generated.

    Attributes:
        plan: The plan that serves them.
        results: Result of each choice that has ended.
    """

    def __init__(self, plan: ServedPlan, requests: Sequence[Request], record: Record) -> None:
        """Submit requests, all of them or none.

        Args:
            plan: The plan that serves them.
            requests: One for each choice.
            record: Notes what happens.

        Raises:
            ApiError: They cannot be served, or not now.
        """
        self.plan = plan
        self.results: dict[int, Result] = {}
        self._record = record
        self._streams: list[RequestStream] = []
        try:
            for request in requests:
                self._streams.append(plan.submit(request, record))
        except RequestError as error:
            self.cancel()
            raise ApiError(400, str(error)) from error
        except QueueFullError as error:
            self.cancel()
            retry = {"Retry-After": str(plan.retry_after_s)}
            raise ApiError(429, str(error), headers=retry) from error
        except EngineClosedError as error:
            self.cancel()
            raise ApiError(503, str(error), headers={"Retry-After": "5"}) from error

    @property
    def numbers(self) -> list[int]:
        """Number of each choice in the engine."""
        return [stream.id for stream in self._streams]

    def cancel(self) -> None:
        """End what has not ended yet."""
        for index, stream in enumerate(self._streams):
            if index not in self.results:
                stream.cancel()

    async def finish(self) -> None:
        """Wait until every choice has its result.

        Raises:
            ApiError: As for `chunks`.
        """
        try:
            await asyncio.gather(*(self._to_end(index) for index in range(len(self._streams))))
        finally:
            self.cancel()

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk] | None]:
        """Yield what is generated, as the number of the choice and its chunk.

        Yields ``None`` if nothing has come for a while.

        Raises:
            ApiError: A choice has ended without an answer; the others are cancelled.
        """
        coming = {self._coming(index): index for index in range(len(self._streams))}
        try:
            while coming:
                done, _ = await asyncio.wait(
                    coming, timeout=PING_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    yield None
                for task in sorted(done, key=coming.__getitem__):
                    index, chunk = coming.pop(task), task.result()
                    if chunk.result is None:
                        coming[self._coming(index)] = index
                    yield index, chunk
        finally:
            for task in coming:
                task.cancel()
            self.cancel()

    def _coming(self, index: int) -> "asyncio.Task[StreamChunk]":
        return asyncio.ensure_future(self._next(index))

    async def _to_end(self, index: int) -> None:
        """Wait for a choice without looking at each of its tokens, which takes time."""
        first = await self._next(index)
        if first.result is None:
            result = await self._streams[index].result()
            self._record.note_tokens(len(result.tokens) - len(first.tokens))
            self._note_result(index, result)

    async def _next(self, index: int) -> StreamChunk:
        try:
            chunk = await anext(self._streams[index])
        except RequestError as error:  # of the tokenizer
            raise ApiError(500, str(error), code="request_failed") from error
        if chunk.tokens:
            self._record.note_tokens(len(chunk.tokens))
        if chunk.result is not None:
            self._note_result(index, chunk.result)
        return chunk

    def _note_result(self, index: int, result: Result) -> None:
        self.results[index] = result
        self._record.note_result(result)
        # What a client's leaving has cancelled is not read any more.
        self.plan.num_cancelled += result.finish_reason == "cancelled"
        _check(result)


def _check(result: Result) -> None:
    """Refuse a result that is no answer."""
    if result.finish_reason == "error":
        raise ApiError(500, f"the request has failed: {result.error}", code="request_failed")
    if result.finish_reason == "deadline":
        message = (
            f"the request has not ended in time, after {len(result.tokens)} tokens; ask for fewer, "
            "or start the server with a longer --request-timeout"
        )
        raise ApiError(504, message)
    if result.finish_reason == "cancelled":
        raise ApiError(503, SHUTTING_DOWN, code="shutting_down")
