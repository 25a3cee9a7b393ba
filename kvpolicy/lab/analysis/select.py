"""Select runs and cells by the names that users type, and label cells unambiguously."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from kvpolicy.entry_points import nearest
from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.pooling import PooledCell, blocks_of
from kvpolicy.lab.store.read import RunFolder, find_runs, read_run
from kvpolicy.lab.store.records import CellRecord, EvalSettingRecord

Name = TypeVar("Name", str, int)
Value = TypeVar("Value")

RUNS = Path("kvpolicy-ablate")  # the default output folder of `kvpolicy ablate`

# Settings that follow from others, or that tables show in another way.
_IGNORED_SETTINGS = frozenset(
    {"group", "seed", "prompt_hash", "n", "columns", "measure", "temperature", "top_p"}
)
_MIN_ID_DIGITS = 4  # fewer may be the beginning of a name


def open_runs(names: Sequence[str]) -> list[RunFolder]:
    """Read runs.

    Args:
        names: Folders of runs, folders that contain some, or names of folders in
            ``kvpolicy-ablate``.

    Raises:
        ResultsError: One of them has no run, or a run cannot be read.
    """
    found: dict[Path, RunFolder] = {}
    for name in names:
        folder = Path(name)
        if not folder.exists() and (RUNS / name).exists():
            folder = RUNS / name
        inside = find_runs(folder) if folder.is_dir() else []
        for path in inside or [folder]:
            found.setdefault(path.resolve(), read_run(path))
    return list(found.values())


@attrs.frozen
class Selection:
    """Which cells to keep; an empty set keeps all.

    Attributes:
        series: Names of series.
        budgets: Budgets; ``None`` for cells that evict nothing.
        models: Models as the user typed them.
        tasks: Tasks with their options.
        seeds: Seeds.
    """

    series: frozenset[str] = frozenset()
    budgets: frozenset[float | None] = frozenset()
    models: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()
    seeds: frozenset[int] = frozenset()

    def for_any_plan(self) -> "Selection":
        """The same models, tasks and seeds, with any plan."""
        return attrs.evolve(self, series=frozenset(), budgets=frozenset())

    def keeps(self, group: EvalSettingRecord, cell: CellRecord) -> bool:
        """Whether a cell is selected."""
        return all(
            not selected or value in selected
            for selected, value in (
                (self.series, cell.series),
                (self.budgets, cell.budget),
                (self.models, group.model),
                (self.tasks, group.task),
                (self.seeds, group.seed),
            )
        )


def select(
    runs: Sequence[RunFolder],
    *,
    series: Sequence[str] | None = None,
    budgets: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Selection:
    """Build a selection from what the user typed; options not given keep all cells.

    Args:
        runs: The runs to select from.
        series: Names of series, in upper or lower case.
        budgets: Numbers, or ``"all"`` for cells that evict nothing.
        models: Models as the user typed them for the run.
        tasks: Tasks with their options.
        seeds: Seeds.

    Raises:
        ResultsError: The runs have nothing of such a name.
    """
    cells = [cell for run in runs for cell in run.cells.values()]
    groups = [group for run in runs for group in run.groups.values()]
    by_name = {cell.series.casefold(): cell.series for cell in cells}
    by_budget = {format_budget(cell.budget): cell.budget for cell in cells}
    return Selection(
        series=frozenset(_known("series", [name.casefold() for name in series or ()], by_name)),
        budgets=frozenset(_known("budget", budgets, by_budget)),
        models=frozenset(_known("model", models, {one.model: one.model for one in groups})),
        tasks=frozenset(_known("task", tasks, {one.task: one.task for one in groups})),
        seeds=frozenset(_known("seed", seeds, {one.seed: one.seed for one in groups})),
    )


def check_facet(cells: Sequence[PooledCell], facet: str | None) -> None:
    """Refuse a facet that no sample has.

    Args:
        cells: The cells to break down.
        facet: Name of the facet, if one was given.

    Raises:
        ResultsError: No sample of the cells has it.
    """
    known = sorted({name for cell in cells for sample in cell.samples for name in sample.facets})
    if facet is not None and facet not in known:
        msg = f"no sample of the runs has a facet {facet!r}{nearest(facet, known)}"
        raise ResultsError(msg)


def find_cell(cells: Sequence[PooledCell], text: str) -> PooledCell:
    """Find the cell that a user names.

    Args:
        cells: The cells.
        text: ``SERIES@BUDGET``, ``SERIES`` if it has one budget only, an unambiguous beginning of
            either, or the first digits of an id; each optionally after ``RUN:``, the name of the
            run's folder.

    Raises:
        ResultsError: No cell or several cells have this name.
    """
    found = _matches(cells, text)
    if len(found) == 1:
        return found[0]
    if found:
        labels = unique_labels(found)
        msg = (
            f"{text!r} may be any of {len(found)} cells: {'; '.join(labels[:4])}"
            f"{'; ...' if len(labels) > 4 else ''}; give SERIES@BUDGET, narrow it with --model, "
            "--task or --seed, or write RUN:CELL."
        )
        raise ResultsError(msg)
    hint = nearest(text, list(dict.fromkeys(cell.name for cell in cells)))
    msg = f"the runs have no cell {text!r}{hint}; give SERIES@BUDGET or the first digits of an id."
    raise ResultsError(msg)


def pairs_with(cells: Sequence[PooledCell], text: str) -> list[tuple[PooledCell, PooledCell]]:
    """Pair every cell with the baseline of the same model and task.

    Args:
        cells: The cells.
        text: The baseline as in `find_cell`; each model and task has its own.

    Returns:
        Pairs of a cell and its baseline. A model and task without a baseline has no pairs.

    Raises:
        ResultsError: No model and task has the baseline, or one of them has several.
    """
    blocks = [block for block in blocks_of(cells) if _matches(block, text)]
    if not blocks:
        find_cell(cells, text)  # raises
    found = [(block, find_cell(block, text)) for block in blocks]
    return [(cell, baseline) for block, baseline in found for cell in block if cell is not baseline]


def format_budget(budget: float | None) -> str:
    """A budget as users write it."""
    return "all" if budget is None else f"{budget:g}"


def differing_settings(cells: Sequence[PooledCell]) -> list[str]:
    """Names of the settings in which cells differ, besides their plans.

    Args:
        cells: The cells.
    """
    names = [f.name for f in attrs.fields(EvalSettingRecord) if f.name not in _IGNORED_SETTINGS]
    found = [
        name
        for name in (*names, "version")
        if len({format_setting(cell, name) for cell in cells}) > 1
    ]
    models = {cell.group.model for cell in cells}
    if len({(cell.group.model, cell.group.model_fingerprint) for cell in cells}) == len(models):
        found = [name for name in found if name != "model_fingerprint"]  # the name is enough
    if any(len(cell.seeds) > 1 for cell in cells) or len({cell.seeds for cell in cells}) > 1:
        found.append("seeds")
    return found


def format_setting(cell: PooledCell, name: str) -> str:
    """The value of a setting as text.

    Args:
        cell: The cell.
        name: A name from `differing_settings`.
    """
    if name == "seeds":
        return ",".join(map(str, cell.seeds))
    return cell.version if name == "version" else str(getattr(cell.group, name))


def unique_labels(cells: Sequence[PooledCell]) -> list[str]:
    """Names of cells, each with the settings in which the cells differ.

    Args:
        cells: The cells.
    """
    names = [
        name
        for name in differing_settings(cells)
        if len({format_setting(cell, name) for cell in cells}) > 1
    ]
    return [
        ", ".join([cell.name, *(f"{name} {format_setting(cell, name)}" for name in names)])
        for cell in cells
    ]


def _known(kind: str, selected: Sequence[Name] | None, values: Mapping[Name, Value]) -> list[Value]:
    for name in selected or ():
        if name not in values:
            hint = nearest(str(name), map(str, values))
            msg = f"the runs have no {kind} {name!r}{hint}"
            raise ResultsError(msg)
    return [values[name] for name in selected or ()]


def _matches(cells: Sequence[PooledCell], text: str) -> list[PooledCell]:
    """The cells that fit a name, by the first rule under which any fits."""
    run, colon, rest = text.partition(":")
    in_run = [cell for cell in cells if run in cell.runs] if colon else []
    # Without such a run, the colon belongs to the name of a series.
    name, candidates = (rest, in_run) if in_run else (text, list(cells))
    folded = name.casefold()
    rules = (
        lambda cell: (
            folded
            in (
                cell.name.casefold(),
                f"{cell.series}@{format_budget(cell.budget)}".casefold(),
            )
        ),
        lambda cell: cell.series.casefold() == folded,
        lambda cell: (
            len(name) >= _MIN_ID_DIGITS and any(one.startswith(name) for one in cell.cells)
        ),
        lambda cell: bool(name) and cell.name.casefold().startswith(folded),
    )
    for rule in rules:
        found = [cell for cell in candidates if rule(cell)]
        if found:
            return found
    return []
