"""The table of an evaluation by lm-evaluation-harness, in words."""

from collections.abc import Iterator, Mapping
from typing import Any

from kvpolicy.cli.columns import columns
from kvpolicy.cli.units import human_bytes

_HEADERS = (
    *("task", "metric", "filter", "value", "± error", "shots", "n"),
    *("length", "cut off", "compacted", "rows", "KV/sequence"),
)
_STDERR = "_stderr"
_NOTHING = "-"


def table(record: Mapping[str, Any], *, width: int | None = None) -> str:
    """Lay out an evaluation.

    Args:
        record: As `kvpolicy.lab.lm_eval.evaluate.evaluate` makes it.
        width: Characters a line may take; no limit if not given.

    Returns:
        The lines: one for each metric of each task or group. ``length`` (new tokens) and
        ``compacted`` (times) are means over a task's sequences; ``rows`` and ``KV/sequence`` the
        most that one of them held.
    """
    rows = [row for name in record["results"] for row in _rows(record, name)]
    return columns(_HEADERS, rows, right=range(3, len(_HEADERS)), width=width)


def _rows(record: Mapping[str, Any], name: str) -> Iterator[list[str]]:
    figures = record["results"][name]
    shots = record.get("n-shot", {}).get(name)
    count = record.get("n-samples", {}).get(name)
    cost = _cost(record["kvpolicy"]["costs"].get(name))
    for key, value in figures.items():
        metric, comma, kept = key.partition(",")
        if not comma or metric.endswith(_STDERR):
            continue
        error = figures.get(f"{metric}{_STDERR},{kept}")
        yield [
            figures.get("alias", name),
            metric,
            "" if kept == "none" else kept,
            _number(value),
            _number(error),
            _NOTHING if shots is None else str(shots),
            _NOTHING if count is None else str(count["effective"]),
            *cost,
        ]
        cost = [""] * len(cost)  # once for each task


def _cost(cost: Mapping[str, Any] | None) -> list[str]:
    if not cost or not cost["num_sequences"]:
        return [_NOTHING] * 5
    num = cost["num_sequences"]
    return [
        f"{cost['new_tokens'] / num:.0f}",
        f"{cost['num_cut_off'] / num:.0%}",
        f"{cost['compactions'] / num:.1f}",
        f"{cost['peak_rows']:,}",
        human_bytes(cost["peak_bytes"]),
    ]


def _number(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else _NOTHING
