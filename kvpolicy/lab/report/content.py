"""Content of the page as plain data: numbers of cells and samples, without their texts."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.lab.analysis.compare import facet_order
from kvpolicy.lab.analysis.pooling import PooledCell, columns_of, is_by_bytes
from kvpolicy.lab.analysis.table import Row, break_down, tabulate
from kvpolicy.lab.report.gather import GroupView
from kvpolicy.lab.report.metrics import MEMORY, plain, quantities
from kvpolicy.lab.report.texts import kinds_of
from kvpolicy.lab.steer.thoughts import ThoughtRules
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import Sample

_PROMPT_CHARS = 90  # of a prompt in the list of samples
_DOT = " \N{MIDDLE DOT} "
_MAX_MESSAGES = 20  # of a cell
_PER_SEED = ("n", "prompt_hash")  # settings that differ between pooled seeds
_MAX_VALUES = 32  # a facet with more values identifies items rather than groups of them

# What cells are charted against: their budget, or bytes if they were run for bytes.
_SIZES = {
    False: {"title": "budget, rows kept per layer and KV head", "kind": "rows"},
    True: {"title": "KV bytes of a sequence", "kind": "bytes"},
}

Value = int | str
# By plan of the cell and name of the facet: the first quantity for each value of the facet.
Breakdown = dict[str, dict[str, list[dict[str, Any] | None]]]


@attrs.frozen
class Facets:
    """Facets in which the items of a group differ, and kinds of parts that their samples have.

    Attributes:
        shown: Facets with their values, numbers before strings.
        left_out: Facets with too many values for a table, with their number of values.
        of_items: Those in which items differ.
    """

    shown: dict[str, list[Value]]
    left_out: dict[str, int]
    of_items: frozenset[str]


def group_content(
    view: GroupView, rules: ThoughtRules, series: Sequence[str], label: str
) -> dict[str, Any]:
    """Content of a group.

    Args:
        view: The group.
        rules: Rules that classify its thoughts.
        series: All series of the report; cells refer to theirs by index.
        label: Name of the group.
    """
    group, facets = view.group, facets_of(view)
    return {
        "groups": list(view.groups),
        "version": view.version,
        "label": label,
        "graded": any(one.correct is not None or one.ungraded is not None for one in view.samples),
        "attempts": _attempts(view),
        "max_new_tokens": group.max_new_tokens,
        "num_expected": view.num_expected,
        "settings": _settings(view),
        "quantities": [one.to_dict() for one in quantities(group)],
        "memory": MEMORY,
        "size": _SIZES[is_by_bytes(view.cells)],
        "facets": [
            {"name": name, "values": values, "of_items": name in facets.of_items}
            for name, values in facets.shown.items()
        ],
        "left_out": [{"name": name, "num": num} for name, num in facets.left_out.items()],
        "kinds": kinds_of(rules),
        "rules": {"name": rules.name, "source": rules.source},
        "pooled": view.is_pooled,
        "seeds": list(view.seeds),
        "items": [] if view.is_pooled else [_item(view, one, facets) for one in view.numbers],
        "cells": [
            cell | {"series": series.index(one.series)}
            for cell, one in zip(_cells(view, facets), view.cells, strict=True)
        ],
    }


def run_content(run: RunFolder) -> dict[str, Any]:
    """Manifest of a run."""
    return {
        "name": run.name,
        "folder": str(run.path),
        "version": run.version,
        "groups": list(run.groups),
        "sessions": [
            [[name, _format(value)] for name, value in session.items()] for session in run.sessions
        ],
    }


def labels_of(views: Sequence[GroupView]) -> list[str]:
    """A name for each group: model, task, seeds, and what distinguishes groups equal in these."""
    names = [_label(view) for view in views]
    names = _distinguish(names, [f"kvpolicy {view.version}" for view in views])
    names = _distinguish(names, [view.group.model for view in views])
    return _distinguish(names, [view.group.group for view in views])


def facets_of(view: GroupView) -> Facets:
    """Facets of a group's items and samples, by name."""
    found: dict[str, set[Value]] = {}
    for sample in view.samples:
        for name, part in sample.breakdowns.items():
            found.setdefault(name, set()).update(part.parts)
        for name, value in sample.facets.items():
            found.setdefault(name, set()).add(value)
    of_items = frozenset(name for sample in view.samples for name in sample.facets)
    facets = Facets({}, {}, of_items)
    for name, values in sorted(found.items()):
        if len(values) > _MAX_VALUES:
            facets.left_out[name] = len(values)
        else:
            facets.shown[name] = sorted(values, key=facet_order)
    return facets


def breakdown(view: GroupView, facets: Facets) -> Breakdown:
    """First quantity of each cell for each value of each shown facet."""
    columns = columns_of(view.group)[:1]
    found: Breakdown = {
        cell.record.plan: {name: [None] * len(values) for name, values in facets.shown.items()}
        for cell in view.cells
    }
    for row in break_down(view.cells, columns, facets=facets.shown):
        assert row.facet is not None
        index = facets.shown[row.facet].index(row.facet_value)
        estimate = plain(row.measured[columns[0].name])
        found[row.cell.record.plan][row.facet][index] = {"n": row.n, "estimate": estimate}
    return found


def grouped_layers(resolved: dict[str, Any]) -> list[dict[str, Any]]:
    """Layers of a plan, equal ones in one entry.

    Args:
        resolved: A resolved plan as plain data, see `ResolvedPlan.to_dict`.

    Returns:
        In the order of first layers: ``layers`` such as ``"0 to 3, 7"``, ``budget``, ``buffer``,
        ``stack`` as ``{"policy", "knobs"}``, and ``more``, all other entries.
    """
    kinds: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for number, layer in enumerate(resolved.get("layers", [])):
        entries = {name: value for name, value in layer.items() if name != "layer"}
        key = json.dumps(entries, sort_keys=True)
        kinds.setdefault(key, (entries, []))[1].append(layer.get("layer", number))
    return [_layer_entry(entries, numbers) for entries, numbers in kinds.values()]


def plan_without_layers(resolved: dict[str, Any]) -> dict[str, Any]:
    """Entries of a plan besides its layers that have a value."""
    return {name: value for name, value in resolved.items() if name != "layers" and value}


def _layer_entry(entries: dict[str, Any], numbers: list[int]) -> dict[str, Any]:
    known = ("stack", "budget", "buffer")
    stack = [
        {
            "policy": spec.get("policy", ""),
            "knobs": {name: value for name, value in spec.items() if name != "policy"},
        }
        for spec in entries.get("stack", [])
    ]
    return {
        "layers": ranges(numbers),
        "budget": entries.get("budget"),
        "buffer": entries.get("buffer"),
        "stack": stack,
        "more": {name: value for name, value in entries.items() if name not in known},
    }


def ranges(numbers: Sequence[int]) -> str:
    """Format rising numbers, such as ``"0 to 3, 7"``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join(" to ".join(map(str, run)) for run in runs)


def _distinguish(names: Sequence[str], details: Sequence[str]) -> list[str]:
    """Add a detail to equal names that differ in it."""
    found: dict[str, set[str]] = {}
    for name, detail in zip(names, details, strict=True):
        found.setdefault(name, set()).add(detail)
    return [
        name if len(found[name]) == 1 else f"{name}{_DOT}{detail}"
        for name, detail in zip(names, details, strict=True)
    ]


def _label(view: GroupView) -> str:
    seeds = f"seed{'s' if view.is_pooled else ''} {', '.join(map(str, view.seeds))}"
    return _DOT.join([Path(view.group.model).name, view.group.task, seeds])


def _attempts(view: GroupView) -> int:
    return 1 + max(sample.attempt for sample in view.samples)


def _settings(view: GroupView) -> list[list[str]]:
    names = (
        "model",
        "model_fingerprint",
        "device",
        "dtype",
        "task",
        "measure",
        "split",
        "n",
        "attempts",
        "sampling",
        "max_new_tokens",
        "slots",
        "prompt_hash",
    )
    seeds = ["seeds" if view.is_pooled else "seed", ", ".join(map(str, view.seeds))]
    shared = [name for name in names if not (view.is_pooled and name in _PER_SEED)]
    settings = [[name.replace("_", " "), _format(getattr(view.group, name))] for name in shared]
    return [seeds, *settings, ["kvpolicy", view.version]]


def _format(value: Any) -> str:
    """Plain data as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_format, value))
    return "none" if value is None else str(value)


def _item(view: GroupView, number: int, facets: Facets) -> dict[str, Any]:
    item = view.items.get(number)
    values = next(cell.by_item[number][0] for cell in view.cells if number in cell.by_item).facets
    prompt = " ".join(item.prompt[: 4 * _PROMPT_CHARS].split()) if item else ""
    return {
        "item": number,
        "facets": {
            name: facets.shown[name].index(value)
            for name, value in values.items()
            if name in facets.shown
        },
        "others": [f"{name} {value}" for name, value in values.items() if name in facets.left_out],
        "head": prompt[:_PROMPT_CHARS],
    }


def _cells(view: GroupView, facets: Facets) -> list[dict[str, Any]]:
    rows = tabulate(view.cells, columns_of(view.group))
    by_facet = breakdown(view, facets)
    indices = {item: index for index, item in enumerate(view.numbers)}
    return [
        {
            **_cell(view, cell, label),
            "row": _row(row),
            "facets": by_facet[cell.record.plan],
            "samples": _samples(() if view.is_pooled else cell.samples, indices),
        }
        for cell, label, row in zip(view.cells, view.labels, rows, strict=True)
    ]


def _cell(view: GroupView, cell: PooledCell, label: str) -> dict[str, Any]:
    plan = cell.record
    return {
        "label": label,
        "budget": plan.budget,
        "buffer": plan.buffer,
        "size": plan.bytes_per_sequence if is_by_bytes(view.cells) else plan.budget,
        "knobs": plan.knobs,
        "plan": plan.plan,
        "layers": grouped_layers(plan.resolved),
        "more": plan_without_layers(plan.resolved),
        "estimates": {one.name: plain(one.estimate(cell)) for one in quantities(view.group)},
        "problems": _problems(cell),
        "kept": {},
    }


def _row(row: Row) -> dict[str, Any]:
    return {
        "n": row.n,
        "num_errors": row.num_errors,
        "num_truncated": round(row.truncated * row.n),
        "num_ungraded": row.num_ungraded,
        "compactions": row.compactions,
        "policy_share": row.policy_share,
        "difference": plain(row.difference),
        "compacted": plain(row.compacted),
        "num_compacted": row.num_compacted,
    }


def _problems(cell: PooledCell) -> list[tuple[str, int]]:
    """Messages of samples that failed or could not be graded, with counts, most frequent first."""
    messages = Counter(
        text
        for sample in cell.samples
        for text in (sample.error, sample.ungraded)
        if text is not None
    )
    return messages.most_common(_MAX_MESSAGES)


def _samples(samples: Sequence[Sample], indices: dict[int, int]) -> dict[str, Any]:
    """Samples as columns: a list of 10,000 objects would be slow to read."""
    return {
        "place": [indices[sample.item] for sample in samples],
        "attempt": [sample.attempt for sample in samples],
        "verdict": "".join(map(_verdict, samples)),
        "finish": "".join(sample.finish_reason[:1] for sample in samples),
        "tokens": [sample.num_tokens for sample in samples],
        "prompt": [sample.prompt_len for sample in samples],
        "compactions": [sample.compactions for sample in samples],
        "evicted": [sample.rows_evicted for sample in samples],
        "bytes": [sample.peak_bytes for sample in samples],
        "seconds": [sample.decode_s for sample in samples],
    }


def _verdict(sample: Sample) -> str:
    if sample.ungraded is not None:
        return "?"
    return "-" if sample.correct is None else str(int(sample.correct))
