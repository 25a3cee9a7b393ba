"""Completions and chats: from a checked body to an answer, in one piece or as a stream."""

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import attrs
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.types import Receive, Scope, Send

from kvpolicy.engine.requests.request import Sampling
from kvpolicy.quantities import format_count
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.bodies import ChatBody, CompletionBody, StreamOptions
from kvpolicy.serve.defects import answer_to_defect, note_defect
from kvpolicy.serve.generation import SHUTTING_DOWN, Generation, Limits, random_seed, requests_of
from kvpolicy.serve.kept import KeptRows
from kvpolicy.serve.plans import ServedModel, ServedPlan
from kvpolicy.serve.prompts import Prompt, PromptEncoder
from kvpolicy.serve.record import Outcome, Record
from kvpolicy.serve.replies import ChatReply, CompletionReply, Reply, cached_tokens, token_counts
from kvpolicy.serve.settings import ServerSettings

DEFAULT_COMPLETION_TOKENS = 16  # of OpenAI's interface
_SAMPLING = (
    *("temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "logit_bias"),
)
CLIENT_GONE = 499  # what proxies write into logs; nobody receives it

# How requests end whose errors have these codes.
_OUTCOMES: dict[str, Outcome] = {
    "queue_full": "refused",
    "request_timeout": "timeout",
    "shutting_down": "shutting_down",
}

_Made = TypeVar("_Made")


class ClientGoneError(Exception):
    """The client has closed its connection."""


@attrs.define(eq=False)
class Service:
    """What answers completions and chats.

    Attributes:
        model: The model, with its plans.
        settings: What clients may ask for.
        draining: Whether the server is shutting down, and takes no new requests.
        encoder: Makes tokens of prompts.
    """

    model: ServedModel
    settings: ServerSettings
    draining: bool = False
    encoder: PromptEncoder = attrs.field(init=False)

    @encoder.default
    def _encoder(self) -> PromptEncoder:
        plans = self.model.plans
        longest = max(plan.max_prompt_len for plan in plans)
        return PromptEncoder(self.model, longest, self.settings.max_pixels)

    async def complete(self, http: HttpRequest, body: CompletionBody) -> Response:
        """Answer a completion.

        Args:
            http: The request.
            body: Its body.

        Raises:
            ApiError: It cannot be answered.
        """
        plan, record = self._begin(http, body)
        prompts = await self.encoder.prompts(body.prompt)
        most = self._most_tokens(
            plan, prompts, body.max_tokens, DEFAULT_COMPLETION_TOKENS, param="prompt"
        )
        limits = Limits(
            most,
            self._time_left(record),
            body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
        )
        echoed = [prompt.tokens for prompt in prompts] if body.echo else None
        reply = CompletionReply(body, self.model, plan, echoed)
        return await self._answer(http, body, prompts, limits, reply, plan)

    async def chat(self, http: HttpRequest, body: ChatBody) -> Response:
        """Answer a chat.

        Args:
            http: The request.
            body: Its body.

        Raises:
            ApiError: It cannot be answered.
        """
        plan, record = self._begin(http, body)
        prompts = [await self.encoder.chat(body)]
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        wanted = body.max_completion_tokens or body.max_tokens
        most = self._most_tokens(plan, prompts, wanted, None, param="messages")
        limits = Limits(most, self._time_left(record), logprobs)
        reply = ChatReply(body, self.model, plan)
        return await self._answer(http, body, prompts, limits, reply, plan)

    def _begin(
        self, http: HttpRequest, body: CompletionBody | ChatBody
    ) -> tuple[ServedPlan, Record]:
        record: Record = http.state.record
        record.stream = body.stream
        plan = self.model.plan_of(body.model)
        record.plan = plan.name
        if self.draining:
            record.outcome = "shutting_down"
            retry = {"Retry-After": "5"}
            raise ApiError(503, SHUTTING_DOWN, code="shutting_down", headers=retry)
        return plan, record

    def _most_tokens(
        self,
        plan: ServedPlan,
        prompts: Sequence[Prompt],
        wanted: int | None,
        usual: int | None,
        *,
        param: str,
    ) -> int:
        """The most new tokens: as many as wanted, or else the usual number within the limits."""
        longest = max(len(prompt.tokens) for prompt in prompts)
        has = f"the prompt has {format_count(longest, 'token')}"
        if longest > plan.max_prompt_len:
            message = f"{has}; this server takes prompts of up to {plan.max_prompt_len:,}"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        room = plan.max_len - longest
        most = self.settings.max_new_tokens or room
        if wanted is None:
            return min(usual or room, most, room)
        if wanted > most and self.settings.max_new_tokens is not None:
            message = f"{wanted:,} new tokens are asked for; this server generates up to {most:,}"
            raise ApiError(400, message, param="max_tokens")
        if wanted > room:
            message = (
                f"{has}, and {wanted:,} new ones are asked for; together they may be "
                f"{plan.max_len:,}"
            )
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        return wanted

    def _time_left(self, record: Record) -> float:
        """Seconds until a request must have ended."""
        return max(self.settings.request_timeout_s - record.elapsed_s, 0.001)

    def _sampling(self, body: CompletionBody | ChatBody, plan: ServedPlan) -> Sampling:
        """What the body says, then the model's generation config, then OpenAI's defaults."""
        asked = {name: getattr(body, name) for name in _SAMPLING}
        asked = {name: value for name, value in asked.items() if value is not None}
        usual = {"temperature": 1.0, "seed": random_seed(), **plan.engine.rules.sampling}
        return Sampling(**usual | asked)

    async def _answer(
        self,
        http: HttpRequest,
        body: CompletionBody | ChatBody,
        prompts: Sequence[Prompt],
        limits: Limits,
        reply: Reply,
        plan: ServedPlan,
    ) -> Response:
        record: Record = http.state.record
        record.prompt_tokens = sum(len(prompt.tokens) for prompt in prompts)
        num_choices = body.n * len(prompts)
        if num_choices > plan.max_choices:
            message = (
                f"{num_choices} choices are asked for; this server takes up to {plan.max_choices} "
                "at a time"
            )
            raise ApiError(400, message, param="n")
        # Sequences of some policies cannot be copied; their last rows are not told.
        can_show_end = body.kvpolicy.kept and plan.engine.resuming.problem is None
        sampling = self._sampling(body, plan)
        ends = _stop_ids(body, plan)
        requests = requests_of(body, prompts, sampling, limits, ends, snapshot=can_show_end)
        record.choices = len(requests)
        try:
            generation = Generation(plan, requests, record)
        except ApiError as error:
            note_error(record, error)
            raise
        record.outcome = "cancelled"  # unless it ends in another way
        if body.stream:
            watched = prompts[0].tokens
            kept = KeptRows(generation, self.model, watched) if body.kvpolicy.kept else None
            return _Stream(_events(generation, reply, body, record, kept), generation)
        try:
            await unless_gone(http, generation.finish())
        except ClientGoneError:
            return Response(status_code=CLIENT_GONE)
        except ApiError as error:
            note_error(record, error)
            raise
        _note_completed(record, generation, body)
        return JSONResponse(reply.whole(generation.results, record.prompt_tokens))


def _stop_ids(body: CompletionBody | ChatBody, plan: ServedPlan) -> list[int] | None:
    """Tokens that end a choice, unless these are the model's own alone."""
    given, further = body.kvpolicy.stop_ids, body.stop_token_ids or []
    if given is None and not further and not body.ignore_eos:
        return None
    own = () if body.ignore_eos else plan.engine.adapter.stop_ids
    return [*(own if given is None else given), *further]


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, _Made]) -> _Made:
    """Do some work unless the client closes its connection before it is done.

    Args:
        http: The request; its body has been read.
        work: The work; cancelled if the client has gone.

    Raises:
        ClientGoneError: The client has gone.
    """
    job, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait([job, gone], return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            raise ClientGoneError
        return job.result()
    finally:
        for task in (job, gone):
            task.cancel()
        with suppress(asyncio.CancelledError, ApiError):
            await job


async def _until_gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def note_error(record: Record, error: ApiError) -> None:
    """Note how a request has ended without an answer.

    Args:
        record: Its record.
        error: What the client is told.
    """
    usual: Outcome = "invalid" if error.status_code < 500 else "failed"
    record.outcome = _OUTCOMES.get(error.code, usual)


def _note_completed(
    record: Record, generation: Generation, body: CompletionBody | ChatBody
) -> None:
    record.outcome = "completed"
    if generation.plan.engine.prefixes is not None:
        record.cached_tokens = cached_tokens(generation.results, body.n)
    generation.plan.note_duration(record.elapsed_s)


class _Stream(StreamingResponse):
    """Server-sent events; what has not been generated is cancelled when the client goes away."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], generation: Generation) -> None:
        # Proxies such as nginx would hold events back.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(events, headers=headers)
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.cancel()


async def _events(
    generation: Generation,
    reply: Reply,
    body: CompletionBody | ChatBody,
    record: Record,
    kept: KeptRows | None,
) -> AsyncIterator[bytes]:
    unopened = set(range(record.choices))
    options = body.stream_options or StreamOptions()

    def event(data: dict[str, Any]) -> bytes:
        if options.continuous_usage_stats:
            data["usage"] = token_counts(record.prompt_tokens, record.new_tokens)
        return _event(data)

    try:
        async for found in generation.chunks():
            if found is None:
                yield KEEPALIVE_COMMENT
                continue
            index, chunk = found
            # Not before: a stream that only waits can still be answered by another replica.
            opening = reply.opening(index) if index in unopened else None
            unopened.discard(index)
            if opening is not None:
                yield event(opening)
            for piece in reply.pieces(index, chunk):
                yield event(piece)
            if kept is not None and (rows := await kept.event(chunk)) is not None:
                yield _event(reply.kept(rows))
        if options.include_usage:
            yield _event(reply.last(generation.results, record.prompt_tokens))
        _note_completed(record, generation, body)
        yield format_sse_event(data_str="[DONE]")
    except ApiError as error:
        note_error(record, error)
        yield _event(error.body())
    except Exception as error:  # a defect; the status has been sent
        note_defect(record, error)
        yield _event(answer_to_defect(record).body())


def _event(data: dict[str, Any]) -> bytes:
    return format_sse_event(data_str=json.dumps(data, separators=(",", ":")))
