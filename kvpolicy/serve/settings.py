"""What a server allows its clients."""

import sys

import attrs

if sys.platform != "win32":
    import resource

KEYS = "KVPOLICY_API_KEY"  # environment variable with the keys, with spaces between

MAX_BODY = 2 << 20
MAX_PIXELS = 32 << 20
MAX_REQUESTS = 256
MAX_CONNECTIONS = 1024
REQUEST_TIMEOUT_S = 600.0
SHUTDOWN_TIMEOUT_S = 30.0
_OTHER_FILES = 128  # that a process has open beside its connections


def most_connections() -> int:
    """As many as the process may have open files for, up to a thousand."""
    if sys.platform == "win32":
        return MAX_CONNECTIONS
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, max(soft - _OTHER_FILES, soft // 2))


@attrs.frozen
class ServerSettings:
    """Limits of a server.

    Attributes:
        api_keys: Keys of which a client must send one; none: every client is served.
        origins: Origins of pages in browsers that may read answers; ``"*"`` is any.
        hosts: Names by which clients may call the server, without ports; ``None``: any.
        max_body: The largest body of a request, in bytes.
        max_pixels: The most pixels that the images of a request may have together.
        max_requests: The most requests that are answered at the same time, of all kinds.
        max_connections: The most connections; one more ends that which has been idle longest.
        max_prompt_tokens: The longest prompt; ``None``: what the model has positions for.
        max_new_tokens: The most tokens that a client may ask for; ``None``: the same.
        request_timeout_s: Seconds after which a request ends, from its arrival.
        body_timeout_s: Seconds in which the body of a request must have arrived.
        head_timeout_s: Seconds in which its first line and headers must.
        write_timeout_s: Seconds for which a client may take nothing of what is sent to it.
        shutdown_timeout_s: Seconds in which running requests may end when the server stops.
    """

    api_keys: tuple[str, ...] = attrs.field(default=(), repr=False)
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] | None = None
    max_body: int = MAX_BODY
    max_pixels: int = MAX_PIXELS
    max_requests: int = MAX_REQUESTS
    max_connections: int = attrs.field(factory=most_connections)
    max_prompt_tokens: int | None = None
    max_new_tokens: int | None = None
    request_timeout_s: float = REQUEST_TIMEOUT_S
    body_timeout_s: float = 30.0
    head_timeout_s: float = 10.0
    write_timeout_s: float = 30.0
    shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S
