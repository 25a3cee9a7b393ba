"""Plain data as JSON that a browser can read: JSON knows no infinity."""

import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """Plain data as ASCII without spaces; ``null`` stands for numbers that are not finite."""
    return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
