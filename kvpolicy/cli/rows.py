"""The table of a comparison, in words."""

from collections.abc import Sequence

from kvpolicy.cli.columns import columns
from kvpolicy.cli.units import human_bytes
from kvpolicy.lab.table import Row

_HEADERS = (
    "policy",
    "budget",
    "right",
    "95 % interval",
    "n",
    "length",
    "cut off",
    "compactions",
    "KV/sample",
    "KV in all",
    "tok/s",
)
_UNKNOWN = "not measured"


def table(rows: Sequence[Row]) -> str:
    """Lay out a comparison.

    Args:
        rows: Its rows.

    Returns:
        The lines. ``length`` and ``compactions`` are means; ``KV/sample`` is the most that one
        sample held, ``KV in all`` the cache of all slots.
    """
    return columns(_HEADERS, [_words(row) for row in rows], right=range(1, len(_HEADERS)))


def _words(row: Row) -> list[str]:
    failed = f" ({row.num_errors} failed)" if row.num_errors else ""
    return [
        row.series,
        "all" if row.budget is None else f"{row.budget:g}",
        f"{row.accuracy.value:.1%}",
        f"{row.accuracy.low:.1%} - {row.accuracy.high:.1%}",
        f"{row.n}{failed}",
        f"{row.length.value:.0f}" if row.length else "-",
        f"{row.truncated:.0%}",
        f"{row.compactions:.1f}",
        human_bytes(row.peak_bytes),
        _UNKNOWN if row.peak_kv_bytes is None else human_bytes(row.peak_kv_bytes),
        _UNKNOWN if row.throughput_tok_s is None else f"{row.throughput_tok_s:.0f}",
    ]
