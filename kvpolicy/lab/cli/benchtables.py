"""What a benchmark found, as tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.cli.output import format_bytes, format_table

if TYPE_CHECKING:
    from kvpolicy.lab.bench.memory import Reading
    from kvpolicy.lab.bench.summary import BenchResult, Ratio


def speed_table(found: "Sequence[BenchResult]", width: int | None) -> str:
    """One row for each contender.

    Args:
        found: How they did.
        width: Characters a line may take, if there is a limit.
    """
    has_ratio = any(one.ratio is not None for one in found)
    headers = ["", "budget", "tok/s", *(["x generate", "least - most"] if has_ratio else [])]
    headers += ["ms/step", "p95", "prefill tok/s", "policy", "KV cache"]
    has_limit = any(one.limit_share is not None for one in found)
    rows = [_speed(one) for one in found]
    if has_limit:
        headers.append("of limit")
        shares = ["-" if one.limit_share is None else f"{one.limit_share:.0%}" for one in found]
        rows = [[*row, share] for row, share in zip(rows, shares, strict=True)]
    table = format_table(headers, rows, right=range(1, len(headers)), width=width)
    return "\n".join([table, *filter(None, map(_against_rival, found))])


def memory_table(readings: "Sequence[Reading]", width: int | None) -> str:
    """One row for each reading.

    Args:
        readings: What was held when.
        width: Characters a line may take, if there is a limit.
    """
    headers = ["", "tokens", "KV cache", "if all stayed", "process", "ms/step"]
    rows = [
        [
            one.name,
            f"{one.new_tokens:,}",
            format_bytes(one.kv_bytes),
            format_bytes(one.full_bytes),
            format_bytes(one.rss_bytes),
            f"{one.step_ms:.2f}",
        ]
        for one in readings
    ]
    return format_table(headers, rows, right=range(1, len(headers)), width=width)


def _speed(one: "BenchResult") -> list[str]:
    ratio = one.ratio
    return [
        one.name,
        "all" if one.budget is None else f"{one.budget:g}",
        f"{one.decode_tok_s:.0f}",
        *([] if ratio is None else [f"{ratio.median:.2f}", _span(ratio)]),
        f"{one.step_ms:.1f}",
        f"{one.step_p95_ms:.1f}",
        "-" if one.prefill_tok_s is None else f"{one.prefill_tok_s:.0f}",
        "-" if one.policy_share is None else f"{one.policy_share:.1%}",
        format_bytes(one.kv_bytes),
    ]


def _against_rival(one: "BenchResult") -> str | None:
    ratio = one.rival_ratio
    if ratio is None:
        return None
    return f"{one.name}: {ratio.median:.2f} x {one.rival} ({_span(ratio)})"


def _span(ratio: "Ratio") -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}"
