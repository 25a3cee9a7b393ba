"""What is checked of a request before it is looked at: whom it calls, and its key.

A browser sends requests to servers on its own machine for any page that has a name resolve to
127.0.0.1. The header Host has that name then, so a server on the loopback interface answers to
the names of this machine only.
"""

import hmac

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.settings import ServerSettings

LOOPBACK_HOSTS = frozenset({"localhost", "127.0.0.1", "[::1]"})

# Anybody may ask for these: they tell no more than that a server is here, or why it is not well.
_OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/", "/assets/")


def guarded(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """An application behind what is checked of each request.

    Browsers are answered first whether a page may ask: they send no key with that question.

    Args:
        app: The application.
        settings: What clients may ask for.
    """
    checked = Guard(app, settings)
    if not settings.origins:
        return checked
    return CORSMiddleware(
        checked,
        allow_origins=settings.origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-Id"],
    )


class Guard:
    """Refuses requests for other hosts, those without a key, and those that are too many."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._hosts = settings.hosts
        self._keys = [key.encode() for key in settings.api_keys]
        self._most, self._num = settings.max_requests, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            _check_length(scope)
            self._check_host(scope)
            self._check_key(scope)
            self._check_number(scope)
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        self._num += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num -= 1

    def _check_host(self, scope: Scope) -> None:
        if self._hosts is None:
            return
        name = _host_name(_values(scope, b"host"))
        if name not in self._hosts:
            names = ", ".join(sorted(self._hosts))
            message = f"the header Host names another host than this server's: {names}"
            raise ApiError(421, message)

    def _check_number(self, scope: Scope) -> None:
        if self._num >= self._most and not scope["path"].startswith("/health"):
            message = f"{self._num} requests are being answered; try again later"
            raise ApiError(429, message, code="too_many_requests", headers={"Retry-After": "1"})

    def _check_key(self, scope: Scope) -> None:
        path: str = scope["path"]
        is_open = path in _OPEN_PATHS or path.startswith("/assets/")
        if not self._keys or is_open:
            return
        scheme, _, given = _only(_values(scope, b"authorization")).partition(b" ")
        # Every key is compared, in a time that does not tell which bytes are right.
        found = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        if scheme.lower() != b"bearer" or not any(found):
            message = "this server needs a key: send the header Authorization: Bearer KEY"
            raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})


def _check_length(scope: Scope) -> None:
    """Refuse a body of two lengths: a proxy may see the other one, and a request behind it."""
    if _values(scope, b"transfer-encoding") and _values(scope, b"content-length"):
        message = "the headers Content-Length and Transfer-Encoding exclude each other; send one"
        raise ApiError(400, message)


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


def _only(values: list[bytes]) -> bytes:
    """The value of a header that is there once; empty otherwise."""
    return values[0] if len(values) == 1 else b""


def _host_name(values: list[bytes]) -> str:
    """The name in a header Host, without its port."""
    name, colon, port = _only(values).decode("latin-1").lower().rpartition(":")
    has_port = colon and port.isascii() and port.isdigit()
    whole = _only(values).decode("latin-1").lower()
    return name if has_port else whole
