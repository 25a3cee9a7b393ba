"""Samples as one flat table, for pandas, duckdb, spreadsheets and statistics programs.

The fixed columns are always there, each with its type, also where all of it is empty. Facets,
values and knobs follow, as the runs have them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import attrs

from kvpolicy.lab.analysis.flattable import Kind, Table, in_kind
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import CellRecord, EvalSettingRecord, Sample

_NESTED = ("facets", "values")
_OF_GROUP = (
    *("model_fingerprint", "device", "dtype", "split", "sampling", "temperature", "top_p"),
    *("max_new_tokens", "slots", "measure"),
)
_OF_ITEM = ("prompt", "answer", "reference")
_KINDS: dict[type, Kind] = {str: "text", int: "whole", float: "number", bool: "truth"}
_MOST = 2**63  # whole numbers of a column lie below, and not below the negative


def flatten(
    runs: Sequence[RunFolder],
    keep: Callable[[EvalSettingRecord, CellRecord], bool] = lambda group, cell: True,
    *,
    items: bool = False,
) -> Table:
    """Lay out every sample as one row.

    Args:
        runs: The runs, in order. A sample that is in two of them is there twice, with the
            names of both.
        keep: Which cells are wanted.
        items: Whether prompt, answer and reference of its item stand beside each sample.

    Returns:
        The columns are ``run`` and ``version``; the fields of `Sample` but for ``facets`` and
        ``values``; settings of the group; ``prompt``, ``answer`` and ``reference`` if wanted;
        then ``facet_NAME``, ``value_NAME`` and ``knob_POLICY__KNOB``, each in the order of
        the alphabet.
    """
    records = [
        _record(run, sample)
        for run in runs
        for cell in run.cells.values()
        if keep(run.groups[cell.group], cell)
        for sample in run.samples_of[cell.cell]
    ]
    kinds = {**fixed_columns(items=items), **_open_columns(runs)}
    rows = [[in_kind(one.get(name), kind) for name, kind in kinds.items()] for one in records]
    return Table(kinds, rows)


def fixed_columns(*, items: bool = False) -> dict[str, Kind]:
    """The columns of every export, with what they hold.

    Args:
        items: Whether what was asked stands beside each sample.
    """
    sample, group = _kinds_of(Sample), _kinds_of(EvalSettingRecord)
    return {
        "run": "text",
        "version": "text",
        **{name: kind for name, kind in sample.items() if name not in _NESTED},
        **{name: group[name] for name in _OF_GROUP},
        **(dict.fromkeys(_OF_ITEM, "text") if items else {}),
    }


def _record(run: RunFolder, sample: Sample) -> dict[str, Any]:
    group, cell = run.groups[sample.group], run.cells[sample.cell]
    item = run.items.get((sample.group, sample.item))
    return {
        "run": run.path.name,
        "version": run.version,
        **attrs.asdict(sample, recurse=False),
        **{name: getattr(group, name) for name in _OF_GROUP},
        **{name: getattr(item, name) for name in _OF_ITEM if item is not None},
        **{_facet(name): value for name, value in sample.facets.items()},
        **{_value(name): value for name, value in sample.values.items()},
        **{_knob(name): value for name, value in cell.knobs.items()},
    }


def _facet(name: str) -> str:
    return f"facet_{name}"


def _value(name: str) -> str:
    return f"value_{name}"


def _knob(name: str) -> str:
    """Without the dot, which would have to be quoted in SQL."""
    return f"knob_{name.replace('.', '__')}"


def _open_columns(runs: Sequence[RunFolder]) -> dict[str, Kind]:
    """The columns that depend on what was asked, measured and varied."""
    facets, values, knobs = _Seen(), _Seen(), _Seen()
    for run in runs:
        for item in run.items.values():
            facets.see(_facet, item.facets)
        for sample in run.samples.values():
            facets.see(_facet, sample.facets)
            values.see(_value, {name: float(value) for name, value in sample.values.items()})
        for cell in run.cells.values():
            knobs.see(_knob, cell.knobs)
    return {**facets.kinds(), **values.kinds(), **knobs.kinds()}


class _Seen:
    """What stands under names, to find one type for each."""

    def __init__(self) -> None:
        self._values: dict[str, set[Kind]] = {}

    def see(self, column: Callable[[str], str], found: Mapping[str, Any]) -> None:
        for name, value in found.items():
            self._values.setdefault(column(name), set()).add(_kind_of_value(value))

    def kinds(self) -> dict[str, Kind]:
        """One type for each column, in the order of the alphabet: text where they differ."""
        return {name: _common(self._values[name]) for name in sorted(self._values)}


def _kind_of_value(value: object) -> Kind:
    kind = _KINDS.get(type(value), "text")
    if kind == "whole" and isinstance(value, int) and not -_MOST <= value < _MOST:
        return "text"
    return kind


def _common(kinds: set[Kind]) -> Kind:
    if kinds == {"whole", "number"}:
        return "number"
    return kinds.pop() if len(kinds) == 1 else "text"


def _kinds_of(cls: Any) -> dict[str, Kind]:
    """What the fields of a record hold, by its annotations; ``None`` may stand in any."""
    found: dict[str, Kind] = {}
    for name, hint in get_type_hints(cls).items():
        kinds = [_KINDS[part] for part in (hint, *get_args(hint)) if part in _KINDS]
        if kinds:
            found[name] = kinds[0]
    return found
