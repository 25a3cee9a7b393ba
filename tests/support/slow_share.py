"""The share of their work that slow tests do: all of it, or `KVPOLICY_SLOW_PERCENT` per cent."""

import os


def share_of(num: int) -> int:
    """Cases, requests or repetitions for a slow test that has ``num`` of them in full."""
    return max(1, num * int(os.environ.get("KVPOLICY_SLOW_PERCENT", "100")) // 100)
