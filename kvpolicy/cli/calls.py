"""The tables of a trace, in words."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvpolicy.cli.output import format_table

if TYPE_CHECKING:
    from kvpolicy.engine.hookcall import HookCall, Left
    from kvpolicy.engine.tracing import Total

_CALLS = ("#", "request", "token", "hook", "layer", "answered by", "answer", "µs", "asked with")
_TOTALS = ("hook", "policy", "calls", "ms", "p50 µs", "p95 µs", "of the time")
_LONGEST = 28  # characters of the tokens of one range
_WIDEST = 72  # characters of a line about rows that leave
_NOTHING = "-"


def call_table(calls: "Sequence[HookCall]", *, width: int | None = None) -> str:
    """Lay out calls, each with the rows it removes below it.

    Args:
        calls: The calls.
        width: Characters a line may take; no limit if not given.

    Returns:
        The lines. ``token`` counts the tokens that the requests had generated.
    """
    rows = []
    for call in calls:
        rows.append(_call(call))
        for left in call.left:
            rows += _left(left)
    return format_table(_CALLS, rows, right=(0, 1, 2, 4, 7), width=width)


def total_table(totals: "Sequence[Total]", *, width: int | None = None) -> str:
    """Lay out totals.

    Args:
        totals: The totals.
        width: Characters a line may take; no limit if not given.
    """
    rows = [
        [
            one.hook,
            one.policy,
            f"{one.calls:,}",
            f"{one.total_ms:,.1f}",
            f"{one.p50_us:,.0f}",
            f"{one.p95_us:,.0f}",
            f"{one.share:.1%}",
        ]
        for one in totals
    ]
    return format_table(_TOTALS, rows, right=range(2, len(_TOTALS)), width=width)


def _call(call: "HookCall") -> list[str]:
    named = ", ".join(f"{name} {value}" for name, value in call.arguments.items())
    return [
        str(call.number),
        _few(call.requests),
        _few(sorted(set(call.tokens))),
        call.hook,
        _NOTHING if call.layer is None else str(call.layer),
        call.answered_by or _NOTHING,
        _answer(call),
        f"{call.us:,.0f}",
        named if call.error is None else call.error,
    ]


def _answer(call: "HookCall") -> str:
    if call.error is not None:
        return "FAILED"
    if isinstance(call.answer, list):
        return ", ".join(map(str, call.answer)) or _NOTHING
    return _NOTHING if call.answer is None else str(call.answer)


def _few(numbers: Sequence[int]) -> str:
    """Numbers, or the first and the last of them where there are more than three."""
    if len(numbers) > 3:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers)) or _NOTHING


def _left(left: "Left") -> list[list[str]]:
    heads = ",".join(map(str, left.heads))
    texts = left.texts or ("",) * len(left.ranges)
    lines = [f"{left.num_rows} rows leave head {heads}:"]
    for (first, last), text in zip(left.ranges, texts, strict=True):
        said = f" {_short(text)}" if text else ""
        piece = f" {first if first == last else f'{first}-{last}'}{said}"
        if len(lines[-1]) + len(piece) > _WIDEST:  # never within a text: spaces matter there
            lines.append(" ")
        lines[-1] += piece
    blank = [""] * (len(_CALLS) - 3)
    return [["", str(left.request) if i == 0 else "", *blank, line] for i, line in enumerate(lines)]


def _short(text: str) -> str:
    """A text in quotes, without its middle if it is long."""
    half = _LONGEST // 2
    return repr(text if len(text) <= _LONGEST else f"{text[: half - 1]}…{text[-half:]}")
