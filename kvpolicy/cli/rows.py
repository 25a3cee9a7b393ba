"""The table of a comparison, in words."""

from collections.abc import Sequence

from kvpolicy.cli.columns import columns
from kvpolicy.cli.units import human_bytes
from kvpolicy.lab.table import Row

_HEADERS = (
    "policy",
    "budget",
    "right",
    "95 % CI",
    "n",
    "length",
    "cut off",
    "compacted",
    "KV/sample",
    "tok/s",
)


def table(rows: Sequence[Row], *, width: int | None = None) -> str:
    """Lay out a comparison.

    Args:
        rows: Its rows.
        width: Characters a line may take; no limit if not given.

    Returns:
        The lines. ``length`` and ``compacted`` (times) are means; ``KV/sample`` is the most
        that one sample held; ``tok/s`` is ``-`` for a cell that was interrupted.
    """
    right = range(1, len(_HEADERS))
    return columns(_HEADERS, [_words(row) for row in rows], right=right, width=width)


def _words(row: Row) -> list[str]:
    failed = f" ({row.num_errors} failed)" if row.num_errors else ""
    return [
        row.series,
        "all" if row.budget is None else f"{row.budget:g}",
        f"{row.accuracy.value:.0%}",
        f"{100 * row.accuracy.low:.0f}-{100 * row.accuracy.high:.0f}%",
        f"{row.n}{failed}",
        f"{row.length.value:.0f}" if row.length else "-",
        f"{row.truncated:.0%}",
        f"{row.compactions:.1f}",
        human_bytes(row.peak_bytes),
        "-" if row.throughput_tok_s is None else f"{row.throughput_tok_s:,.0f}",
    ]
