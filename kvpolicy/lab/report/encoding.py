"""Encoding of data for the page: JSON that a browser can read, and compressed blocks of it."""

import base64
import json
import math
import zlib
from typing import Any

BLOCK_OVERHEAD = 80  # bytes that a block takes in addition: its element, and its number


def to_json(value: Any) -> str:
    """Plain data as ASCII without spaces; numbers that are not finite become ``null``."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def pack(value: Any) -> str:
    """One value as a block: JSON, compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(to_json(value).encode("ascii"))).decode("ascii")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
