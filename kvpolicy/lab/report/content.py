"""What the page shows of runs, as plain data: figures of cells and samples, without the texts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.lab.analysis.pooling import columns_of
from kvpolicy.lab.analysis.table import Row, tabulate
from kvpolicy.lab.report.breakdown import Facets, breakdown, facets_of
from kvpolicy.lab.report.gather import CellView, GroupView
from kvpolicy.lab.report.layers import alike, rest_of
from kvpolicy.lab.report.metrics import MEMORY, plain, quantities
from kvpolicy.lab.report.sentences import kinds_of
from kvpolicy.lab.steer.rules import ThoughtRules
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import Sample

_HEAD = 90  # characters of a prompt that the list of samples shows
_DOT = " \N{MIDDLE DOT} "
_MOST_MESSAGES = 20  # of a cell
_OF_ONE_SEED = ("n", "prompt_hash")  # settings that seeds taken together do not share


def group_content(
    view: GroupView, rules: ThoughtRules, series: Sequence[str], label: str
) -> dict[str, Any]:
    """A group.

    Args:
        view: The group.
        rules: What its thoughts are called by.
        series: All series of the report; cells name theirs by its place.
        label: What the group is called.
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
        "facets": [{"name": name, "values": values} for name, values in facets.shown.items()],
        "left_out": [{"name": name, "num": num} for name, num in facets.left_out.items()],
        "kinds": kinds_of(rules),
        "rules": {"name": rules.name, "source": rules.source},
        "pooled": view.is_pooled,
        "items": [] if view.is_pooled else [_item(view, one, facets) for one in view.numbers],
        "cells": [
            cell | {"series": series.index(one.series)}
            for cell, one in zip(_cells(view, facets), view.cells, strict=True)
        ],
    }


def run_content(run: RunFolder) -> dict[str, Any]:
    """Where a run's figures come from."""
    return {
        "name": run.name,
        "folder": str(run.path),
        "version": run.version,
        "groups": list(run.groups),
        "sessions": [
            [[name, _words(value)] for name, value in session.items()] for session in run.sessions
        ],
    }


def labels_of(views: Sequence[GroupView]) -> list[str]:
    """A name for each group: model, task and seeds, and what else tells them apart."""
    names = [_label(view) for view in views]
    names = _told_apart(names, [f"kvpolicy {view.version}" for view in views])
    names = _told_apart(names, [view.group.model for view in views])
    return _told_apart(names, [view.group.group for view in views])


def _told_apart(names: Sequence[str], more: Sequence[str]) -> list[str]:
    """Names, those of several with what tells some of them apart."""
    said: dict[str, set[str]] = {}
    for name, one in zip(names, more, strict=True):
        said.setdefault(name, set()).add(one)
    return [
        name if len(said[name]) == 1 else f"{name}{_DOT}{one}"
        for name, one in zip(names, more, strict=True)
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
    shared = [name for name in names if not (view.is_pooled and name in _OF_ONE_SEED)]
    settings = [[name.replace("_", " "), _words(getattr(view.group, name))] for name in shared]
    return [seeds, *settings, ["kvpolicy", view.version]]


def _words(value: Any) -> str:
    """Plain data in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_words, value))
    return "none" if value is None else str(value)


def _item(view: GroupView, number: int, facets: Facets) -> dict[str, Any]:
    item = view.items.get(number)
    said = next(cell.by_item[number][0] for cell in view.cells if number in cell.by_item).facets
    prompt = " ".join(item.prompt[: 4 * _HEAD].split()) if item else ""
    return {
        "item": number,
        "facets": {
            name: facets.shown[name].index(value)
            for name, value in said.items()
            if name in facets.shown
        },
        "others": [f"{name} {value}" for name, value in said.items() if name in facets.left_out],
        "head": prompt[:_HEAD],
    }


def _cells(view: GroupView, facets: Facets) -> list[dict[str, Any]]:
    rows = tabulate(view.cells, columns_of(view.group))
    by_facet = breakdown(view, facets)
    places = {number: place for place, number in enumerate(view.numbers)}
    return [
        {
            **_cell(view, cell),
            "row": _row(row),
            "facets": by_facet[cell.digest],
            "samples": _samples(() if view.is_pooled else cell.samples, places),
        }
        for cell, row in zip(view.cells, rows, strict=True)
    ]


def _cell(view: GroupView, cell: CellView) -> dict[str, Any]:
    resolved = cell.cell.resolved
    return {
        "label": cell.label,
        "budget": cell.cell.budget,
        "buffer": cell.cell.buffer,
        "knobs": cell.cell.knobs,
        "plan": cell.cell.plan,
        "layers": alike(resolved),
        "more": rest_of(resolved),
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
    }


def _problems(cell: CellView) -> list[tuple[str, int]]:
    """What was said of samples that failed or could not be graded, the most frequent first."""
    said = Counter(
        text
        for sample in cell.samples
        for text in (sample.error, sample.ungraded)
        if text is not None
    )
    return said.most_common(_MOST_MESSAGES)


def _samples(samples: Sequence[Sample], places: dict[int, int]) -> dict[str, Any]:
    """Samples column by column: a list of 10,000 objects would be slow to read."""
    return {
        "place": [places[sample.item] for sample in samples],
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
