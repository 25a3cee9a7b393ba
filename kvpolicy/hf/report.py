"""What a `PolicyCache` holds and has cost."""

from typing import Any

import attrs


@attrs.frozen
class CacheReport:
    """What a cache holds and has cost since it was made or reset; valid at any moment.

    Attributes:
        tokens: Tokens each row of the batch has seen, pads left out.
        rows: The most rows any layer holds for each of them now.
        peak_rows: The most rows any layer ever held for one of them.
        peak_kv_bytes: Bytes of the cache at its largest, as in `RunReport`.
        compactions: Compactions of one sequence in one layer, summed over both.
        rows_evicted: Rows that left, summed over layers and sequences, counted per KV head.
        policy_s: Seconds of policy work.
    """

    tokens: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    peak_rows: int = 0
    peak_kv_bytes: int = 0
    compactions: int = 0
    rows_evicted: int = 0
    policy_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return attrs.asdict(self)
