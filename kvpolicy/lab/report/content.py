"""What the page shows of runs, as plain data: figures of cells and samples, without the texts."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvpolicy.lab.archive import RunFolder
from kvpolicy.lab.measures import Column
from kvpolicy.lab.records import Group
from kvpolicy.lab.report.gather import CellView, GroupView
from kvpolicy.lab.report.layers import alike, rest_of
from kvpolicy.lab.report.quantities import MEMORY, column_of, plain, quantities, served
from kvpolicy.lab.report.sentences import kinds_of
from kvpolicy.lab.samples import Sample
from kvpolicy.lab.stats import paired_difference
from kvpolicy.lab.steer.rules import ThoughtRules

_HEAD = 90  # characters of a prompt that the list of samples shows
_MOST_MESSAGES = 20  # of a cell


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
    group, facets = view.group, _facets(view)
    places = {number: place for place, number in enumerate(view.numbers)}
    return {
        "id": group.group,
        "label": label,
        "n": group.n,
        "attempts": _attempts(view),
        "max_new_tokens": group.max_new_tokens,
        "num_expected": view.num_expected,
        "settings": _settings(group),
        "quantities": [one.to_dict() for one in quantities(group.columns)],
        "memory": MEMORY,
        "facets": [{"name": name, "values": values} for name, values in facets.items()],
        "kinds": kinds_of(rules),
        "rules": {"name": rules.name, "source": rules.source},
        "items": [_item(view, number, facets) for number in places],
        "cells": [
            _cell(view, cell, facets, places) | {"series": series.index(cell.cell.series)}
            for cell in view.cells
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


def labels_of(groups: Sequence[Group]) -> list[str]:
    """A name for each group: model, task and seed, and what else tells them apart."""
    plain = [
        f"{Path(group.model).name} \N{MIDDLE DOT} {group.task} \N{MIDDLE DOT} seed {group.seed}"
        for group in groups
    ]
    known = Counter(plain)
    return [
        name if known[name] == 1 else f"{name} \N{MIDDLE DOT} {group.group}"
        for name, group in zip(plain, groups, strict=True)
    ]


def _attempts(view: GroupView) -> int:
    return 1 + max(attempt for cell in view.cells for _, attempt in cell.samples)


def _settings(group: Group) -> list[list[str]]:
    names = (
        "model",
        "model_fingerprint",
        "device",
        "dtype",
        "task",
        "measure",
        "seed",
        "split",
        "n",
        "attempts",
        "sampling",
        "max_new_tokens",
        "slots",
        "prompt_hash",
    )
    return [[name.replace("_", " "), _words(getattr(group, name))] for name in names]


def _words(value: Any) -> str:
    """Plain data in words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_words, value))
    return "none" if value is None else str(value)


def _facets(view: GroupView) -> dict[str, list[Any]]:
    """Every facet with its values, numbers before words."""
    found: dict[str, set[int | str]] = {}
    for cell in view.cells:
        for sample in cell.samples.values():
            for name, value in sample.facets.items():
                found.setdefault(name, set()).add(value)
    return {
        name: sorted(values, key=lambda value: (isinstance(value, str), value))
        for name, values in sorted(found.items())
    }


def _item(view: GroupView, number: int, facets: dict[str, list[Any]]) -> dict[str, Any]:
    item = view.items.get(number)
    said = next(cell.by_item[number][0] for cell in view.cells if number in cell.by_item).facets
    prompt = " ".join(item.prompt[: 4 * _HEAD].split()) if item else ""
    return {
        "item": number,
        "facets": {name: facets[name].index(value) for name, value in said.items()},
        "head": prompt[:_HEAD],
    }


def _cell(
    view: GroupView, cell: CellView, facets: dict[str, list[Any]], places: dict[int, int]
) -> dict[str, Any]:
    resolved = cell.cell.resolved
    return {
        "label": cell.label,
        "budget": cell.cell.budget,
        "buffer": cell.cell.buffer,
        "knobs": cell.cell.knobs,
        "plan": cell.cell.plan,
        "layers": alike(resolved),
        "more": rest_of(resolved),
        "estimates": {
            one.name: plain(one.estimate(cell)) for one in quantities(view.group.columns)
        },
        "row": _row(view, cell),
        "facets": {name: _by_facet(view, cell, name, values) for name, values in facets.items()},
        "problems": _problems(cell),
        "samples": _samples(cell, places),
    }


def _row(view: GroupView, cell: CellView) -> dict[str, Any]:
    samples = list(cell.samples.values())
    fine, timing = served(samples), cell.timing
    return {
        "n": len(samples),
        "num_errors": len(samples) - len(fine),
        "num_truncated": sum(sample.finish_reason == "length" for sample in fine),
        "num_ungraded": sum(sample.ungraded is not None for sample in fine),
        "compactions": sum(sample.compactions for sample in fine) / max(len(fine), 1),
        "policy_share": timing.policy_s / timing.decode_s if timing and timing.decode_s else None,
        "difference": None if cell is view.cells[0] else _difference(view, cell),
    }


def _difference(view: GroupView, cell: CellView) -> list[float | None] | None:
    """The first column less that of the first cell, on the items that both have a value for."""
    column = column_of(view.group.columns[0])
    ours, theirs = (_by_item(column, one) for one in (cell, view.cells[0]))
    pairs = [(ours[item], theirs[item]) for item in ours if item in theirs]
    return plain(paired_difference(*zip(*pairs, strict=True))) if pairs else None


def _by_item(column: Column, cell: CellView) -> dict[int, float]:
    found = {}
    for item, samples in cell.by_item.items():
        values = [value for sample in samples if (value := column.value(sample)) is not None]
        if values:
            found[item] = math.fsum(values) / len(values)
    return found


def _by_facet(
    view: GroupView, cell: CellView, name: str, values: Sequence[int | str]
) -> list[dict[str, Any] | None]:
    column = column_of(view.group.columns[0])
    found: dict[int | str, list[Sample]] = {}
    for sample in cell.samples.values():
        if name in sample.facets:
            found.setdefault(sample.facets[name], []).append(sample)
    return [
        {"n": len(found[value]), "estimate": plain(column.estimate(found[value]))}
        if value in found
        else None
        for value in values
    ]


def _problems(cell: CellView) -> list[tuple[str, int]]:
    """What was said of samples that failed or could not be graded, the most frequent first."""
    said = Counter(
        text
        for sample in cell.samples.values()
        for text in (sample.error, sample.ungraded)
        if text is not None
    )
    return said.most_common(_MOST_MESSAGES)


def _samples(cell: CellView, places: dict[int, int]) -> dict[str, Any]:
    """The samples column by column: a list of 10,000 objects would be slow to read."""
    samples = list(cell.samples.values())
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
