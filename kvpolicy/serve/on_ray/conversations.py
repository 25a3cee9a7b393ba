"""What the requests of one conversation have in common, so that one replica answers them all.

A replica holds what it has computed for a conversation, and the next request of the conversation
begins with the same messages.
"""

import hashlib
import json
from typing import Any

from kvpolicy.files import parse_json

# The header that Ray Serve itself uses for the session of a request.
SESSION_HEADER = "x-session-id"
_DIGITS = 32  # hexadecimal ones


def conversation_of(session: str | None, body: bytes) -> str | None:
    """The key of a request's conversation; ``None`` if nothing tells which one it belongs to.

    It is the session that the client has sent, or else, of a chat, the model and its messages up
    to the first one of the user: a conversation goes on with the same ones. Either is hashed.
    A prompt of a completion alone says nothing.

    Args:
        session: Value of the header ``X-Session-Id``, if there is one.
        body: Body of the request, which may be anything.
    """
    if session:
        return _digest(["session", session])
    try:
        given = parse_json(body)
    except ValueError:
        return None
    messages = given.get("messages") if isinstance(given, dict) else None
    if not isinstance(messages, list):
        return None
    roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
    if "user" not in roles:
        return None
    return _digest(["messages", given.get("model"), messages[: roles.index("user") + 1]])


def _digest(key: Any) -> str:
    text = json.dumps(key, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
