"""Around every request: its id, its line in the log, its metrics, and headers of every answer."""

import re
import secrets
from typing import Protocol

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpolicy.serve.defects import note_defect
from kvpolicy.serve.logs import log
from kvpolicy.serve.record import Record

_OWN_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_ID_HEADER = b"x-request-id"


class Counts(Protocol):
    """What counts requests."""

    def note(self, record: Record, status: int) -> None:
        """Count a request that has ended."""


class Observer:
    """The outermost layer of a server's application."""

    def __init__(self, app: ASGIApp, metrics: Counts) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and tell of it when it has ended."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record, method = Record(_request_id(scope)), scope["method"]
        scope.setdefault("state", {})["record"] = record
        if method == "HEAD":  # the answer to GET; its body is not sent
            scope = {**scope, "method": "GET"}
        status = 0
        is_read = not _has_body(scope)

        async def read() -> Message:
            nonlocal is_read
            message = await receive()
            is_read = is_read or not message.get("more_body", False)
            return message

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = record.id
                headers["X-Content-Type-Options"] = "nosniff"
                if not is_read:  # what is left of the body may have no end
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, read, answer)
        except Exception as error:  # a defect, which the client has been told: the server goes on
            note_defect(record, error)
        finally:
            self._metrics.note(record, status)
            log(
                "request",
                request_id=record.id,
                method=method,
                path=_known_path(scope),
                status=status,
                elapsed_s=round(record.elapsed_s, 6),
                **record.to_dict(),
            )


def _request_id(scope: Scope) -> str:
    """The id that the client has chosen, if it is one that may stand in a log, or a new one."""
    given = [value for name, value in scope["headers"] if name == _ID_HEADER]
    if len(given) == 1 and _OWN_ID.fullmatch(given[0]):
        return str(given[0].decode())
    return f"req-{secrets.token_hex(12)}"


def _has_body(scope: Scope) -> bool:
    lengths = {b"content-length", b"transfer-encoding"}
    return any(name in lengths and value != b"0" for name, value in scope["headers"])


def _known_path(scope: Scope) -> str:
    """The path of the route: what a client wrote as a path may be anything."""
    route = scope.get("route")
    return str(getattr(route, "path", None) or "unknown")
