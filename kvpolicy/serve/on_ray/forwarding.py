"""Passing a request to a replica, and to another one if that is lost or full.

A replica answers with the messages of ASGI. Nothing of an answer is sent to the client before its
first bytes are there, so until then another replica may answer instead, and nobody notices:
greedy and seeded requests have the same tokens everywhere. A stream that has begun cannot be
continued elsewhere; it ends with an error event.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from time import monotonic
from typing import Any, Protocol

import attrs
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from starlette.types import Message, Scope, Send

from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.on_ray.router_metrics import RouterMetrics

# The header in which a replica gives its name.
REPLICA_HEADER = b"x-kvpolicy-replica"

_OF_THE_ROUTER = (b"authorization", b"connection", b"cookie", b"transfer-encoding")
_REFUSING = (429, 503)  # its queue is full; it stops, or its engine has broken
_FIRST_WAIT_S = 0.05  # before another replica is asked after a loss
_LONGEST_WAIT_S = 1.0

BROKEN = "the replica that was answering is lost; send the request again"
LOST = "every replica that was asked is lost; send the request again"


@attrs.frozen
class HttpCall:
    """A request as it is passed to a replica.

    Attributes:
        method: Its method.
        path: Its path, decoded.
        query: What follows ``?``.
        headers: Its headers, with names in lower case.
        body: Its body.
    """

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @classmethod
    def of(cls, scope: Scope, body: bytes, headers: Mapping[bytes, bytes]) -> "HttpCall":
        """Take what a replica needs; keys were checked and stay here.

        Args:
            scope: The request's scope.
            body: Its body.
            headers: Headers to add, or to replace.
        """
        left_out = {*headers, *_OF_THE_ROUTER}
        kept = [(name, value) for name, value in scope["headers"] if name not in left_out]
        given = (*kept, *headers.items())
        return cls(scope["method"], scope["path"], scope["query_string"], given, body)

    def scope(self) -> Scope:
        """The scope of the request for an application."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": list(self.headers),
            "client": None,
            "server": None,
        }


class LostReplicaError(Exception):
    """The replica that had a request is gone."""


class Replicas(Protocol):
    """The replicas of an engine."""

    def ask(
        self, call: HttpCall, conversation: str | None, tried: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """Have one of them answer.

        Args:
            call: The request.
            conversation: Key of its conversation, all requests of which go to one replica.
            tried: Names of replicas that have refused it; others are asked while there are any.

        Yields:
            Messages of the answer: its start, and the parts of its body.

        Raises:
            LostReplicaError: The replica is gone.
            ApiError: No replica takes requests now.
        """

    async def each(self, method: str) -> list[Any]:
        """Call a method of every replica.

        Args:
            method: Its name; it takes no arguments.

        Returns:
            What those that are alive return.
        """


class Answer:
    """One answer on its way to a client.

    Attributes:
        is_started: Whether the client has its status and headers.
        has_content: Whether the client has any part of the answer but comments of a stream.
        is_over: Whether the client has all of it.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self.is_started = self.has_content = self.is_over = False

    def begin(self, start: Message) -> None:
        """Note the start of a replica's answer; it is sent with the first bytes."""
        self._start = start

    async def send(self, part: Message) -> None:
        """Send a part of the body."""
        body: bytes = part.get("body", b"")
        assert self._start is not None
        if self.is_started and self._start["status"] != 200:
            # The client has the status of a stream that only waited, from a replica now lost.
            await self.end_with(json.loads(body))
            return
        if not self.is_started:
            self.is_started = True
            await self._send(self._start)
        self.is_over = not part.get("more_body", False)
        self.has_content = self.has_content or self.is_over or body != KEEPALIVE_COMMENT
        await self._send(part)

    async def end_with(self, error: dict[str, Any]) -> None:
        """End a stream with an error event."""
        self.has_content = self.is_over = True
        event = format_sse_event(data_str=json.dumps(error, separators=(",", ":")))
        await self._send({"type": "http.response.body", "body": event, "more_body": False})


async def forward(
    replicas: Replicas,
    call: HttpCall,
    conversation: str | None,
    send: Send,
    metrics: RouterMetrics,
    *,
    timeout_s: float,
    first_wait_s: float = _FIRST_WAIT_S,
) -> None:
    """Have a request answered by a replica that is there and has room.

    Args:
        replicas: The replicas.
        call: The request.
        conversation: See `Replicas.ask`.
        send: Takes the answer.
        metrics: Counts retries and broken streams.
        timeout_s: Seconds after which no further replica is asked.
        first_wait_s: Seconds before another one is asked after the first loss; they double.

    Raises:
        ApiError: There is no answer; nothing was sent.
    """
    answer, tried = Answer(send), list[str]()
    until, wait_s = monotonic() + timeout_s, first_wait_s
    while True:
        try:
            refused_by = await _try(replicas, call, conversation, tried, answer)
            if refused_by is None:
                return
            tried.append(refused_by)
            metrics.note_retry("refused")
        except LostReplicaError as error:
            if answer.is_over:
                return
            if answer.has_content:
                metrics.note_broken_stream()
                await answer.end_with(ApiError(503, BROKEN, code="replica_lost").body())
                return
            if monotonic() > until:
                await _fail(answer, ApiError(503, LOST, headers={"Retry-After": "5"}), error)
                return
            metrics.note_retry("lost")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        except ApiError as error:
            await _fail(answer, error, error)
            return


async def _try(
    replicas: Replicas,
    call: HttpCall,
    conversation: str | None,
    tried: Sequence[str],
    answer: Answer,
) -> str | None:
    """Ask one replica; return its name if it refuses and another one is to be asked."""
    async with aclosing(replicas.ask(call, conversation, tuple(tried))) as messages:
        start = await anext(messages)
        name = dict(start["headers"]).get(REPLICA_HEADER, b"").decode()
        if start["status"] in _REFUSING and name not in tried:
            return name
        answer.begin(start)
        async for part in messages:
            await answer.send(part)
    return None


async def _fail(answer: Answer, error: ApiError, cause: Exception) -> None:
    if not answer.is_started:
        raise error from (cause if cause is not error else None)
    await answer.end_with(error.body())
