"""The process of a server: its socket, its connections, and how it stops.

The first SIGTERM or SIGINT lets what runs go on: new requests are refused with 503, and the process
ends when the last one has its answer, or cancels them when the time for that is over. The second
one cancels them at once.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import attrs
import uvicorn
from h11 import ERROR, IDLE, SEND_BODY
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.serve.app import create_app
from kvpolicy.serve.logs import log
from kvpolicy.serve.service import Service
from kvpolicy.serve.settings import ServerSettings

KEEP_ALIVE_S = 10
HALF_CLOSED_S = 0.5  # for an answer to a client that has closed its side of the connection
LINGER_S = 2.0  # for a client that is still sending to read its answer
LINGER_BYTES = 16 << 20  # that it may send meanwhile
MAX_HEAD = 16 << 10  # bytes of the first line and the headers
_FLUSH_S = 5  # for what has been generated to reach the clients, at the end


@attrs.frozen
class Certificate:
    """What a server proves its name with.

    Attributes:
        certfile: File with the certificate, and those above it.
        keyfile: File with its private key; ``None``: it is in the same file.

    Raises:
        KVPolicyError: The files hold no certificate and its key.
    """

    certfile: Path
    keyfile: Path | None = None

    def __attrs_post_init__(self) -> None:
        try:
            # A key with a password would be asked for on a terminal.
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
                self.certfile, self.keyfile, password=""
            )
        except (OSError, ValueError) as error:
            key = "" if self.keyfile is None else f" and --ssl-keyfile {self.keyfile}"
            msg = (
                f"--ssl-certfile {self.certfile}{key} give no certificate with its key: "
                f"{error_summary(error)}; give files in PEM, without a password"
            )
            raise KVPolicyError(msg) from error


class Server(uvicorn.Server):
    """A server that finishes what runs before it stops."""

    def __init__(
        self,
        service: Service,
        on_start: Callable[[], None] = lambda: None,
        certificate: Certificate | None = None,
    ) -> None:
        """Prepare to serve.

        Args:
            service: What answers.
            on_start: Called when connections are accepted.
            certificate: Connections use TLS with it; ``None``: they do not.
        """
        super().__init__(
            uvicorn.Config(
                create_app(service),
                http=_protocol(service.settings),
                ws="none",
                loop="asyncio",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FLUSH_S,
                h11_max_incomplete_event_size=MAX_HEAD,
                ssl_certfile=None if certificate is None else certificate.certfile,
                ssl_keyfile=None if certificate is None else certificate.keyfile,
            )
        )
        self._service, self._on_start = service, on_start
        self._times_asked = 0
        self._draining: asyncio.Task[None] | None = None
        self._hurrying: asyncio.Task[None] | None = None

    @property
    def num_cancelled(self) -> int:
        """Choices that were cancelled because they took too long to end."""
        return sum(plan.num_cancelled for plan in self._service.model.plans)

    def stop(self) -> None:
        """Ask the server to stop; the second time, at once. May be called in any thread."""
        self._times_asked += 1

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; called for signals."""
        self.stop()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await super().startup(sockets)
        self._on_start()

    async def on_tick(self, counter: int) -> bool:
        """Look ten times a second whether the server is to stop."""
        settings = self._service.settings
        if self._times_asked and self._draining is None:
            self._service.draining = True
            log("stopping", open_requests=len(self.server_state.tasks))
            self._draining = asyncio.create_task(self._end_within(settings.shutdown_timeout_s))
        if self._times_asked > 1 and self._hurrying is None:
            self._hurrying = asyncio.create_task(self._end_within(0))
        return await super().on_tick(counter)

    async def _end_within(self, seconds: float) -> None:
        """Let what runs end within a time, cancel the rest, and stop."""
        running = [plan.running for plan in self._service.model.plans]
        closing = [one.close(finish=True, timeout_s=seconds) for one in running]
        await asyncio.gather(*closing, return_exceptions=True)
        self.should_exit = True


def _protocol(settings: ServerSettings) -> type[asyncio.Protocol]:
    idle: dict[asyncio.Protocol, None] = {}  # without a request, the longest first

    class TimedProtocol(H11Protocol):
        """A connection that ends if its client sends no request, or reads no answer, for a time."""

        def connection_made(self, transport: Any) -> None:
            self._lingering = _Lingering(self.loop, transport, self._is_receiving)
            super().connection_made(cast("Any", self._lingering))
            if len(self.connections) > settings.max_connections:
                # The newest itself, if all others have a request.
                cast("TimedProtocol", next(iter(idle), self)).transport.abort()
            self._head = _Timer(self.loop, settings.head_timeout_s, self.transport.close)
            self._write = _Timer(self.loop, settings.write_timeout_s, self.transport.abort)
            self._half = _Timer(self.loop, HALF_CLOSED_S, self.transport.close)
            self._await_head()

        def data_received(self, data: bytes) -> None:
            if self._lingering.runs:
                self._lingering.drop(data)
                return
            super().data_received(data)
            self._await_head()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._half.runs:
                self.transport.close()
            self._await_head()

        def eof_received(self) -> bool:  # type: ignore[override]  # as asyncio has it
            """Whether the client, which sends nothing more, may still read an answer.

            Most have gone; what they have asked for is cancelled after a moment.
            """
            if self.cycle is None or self.cycle.response_complete:
                return False
            self._half.start()
            return True

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write.start()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._write.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._head.stop()
            self._write.stop()
            self._half.stop()
            self._lingering.stop()
            idle.pop(self, None)
            super().connection_lost(exc)

        def _await_head(self) -> None:
            """Run a timer while the head of a request is not complete."""
            if self.conn.their_state is IDLE and not self.transport.is_closing():
                self._head.start()
                idle.setdefault(self)
            else:
                self._head.stop()
                idle.pop(self, None)

        def _is_receiving(self) -> bool:
            """Whether the client may send more of a request, or of what is none."""
            return self.conn.their_state in (SEND_BODY, ERROR)

    return TimedProtocol


class _Timer:
    """Calls a function unless it is stopped in time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, call: Callable[[], None]
    ) -> None:
        self._loop, self._seconds, self._call = loop, seconds, call
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        """Whether it waits."""
        return self._handle is not None

    def start(self) -> None:
        """Begin to wait, if it does not yet."""
        if self._handle is None:
            self._handle = self._loop.call_later(self._seconds, self._call)

    def stop(self) -> None:
        """Do not call."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class _Lingering:
    """A transport whose `close` waits for a client that is still sending.

    A connection that is closed before all that was sent has been read is reset, and the client
    loses the answer. So it is told that nothing more comes, and what it sends is dropped until it
    closes its side, too, or has taken too long or sent too much (RFC 9112, section 9.6).
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        transport: asyncio.Transport,
        is_receiving: Callable[[], bool],
    ) -> None:
        self._transport, self._is_receiving = transport, is_receiving
        self._timer = _Timer(loop, LINGER_S, transport.close)
        self._left = LINGER_BYTES

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def runs(self) -> bool:
        """Whether it waits."""
        return self._timer.runs

    def is_closing(self) -> bool:
        """Whether nothing more is sent."""
        return self.runs or self._transport.is_closing()

    def close(self) -> None:
        """Send nothing more, and close the connection; called again, at once."""
        if self.is_closing() or not self._is_receiving():
            self._transport.close()
            return
        if self._transport.can_write_eof():  # not with TLS
            self._transport.write_eof()
        self._transport.resume_reading()
        self._timer.start()

    def drop(self, data: bytes) -> None:
        """Take what the client sends while this waits."""
        self._left -= len(data)
        if self._left < 0:
            self._transport.close()

    def stop(self) -> None:
        """Wait no longer."""
        self._timer.stop()
