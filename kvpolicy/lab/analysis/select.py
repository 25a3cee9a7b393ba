"""Which runs and cells users want to see, in their words."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.hooks.discovery import nearest
from kvpolicy.lab.analysis.naming import budget_word
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.store.read import RunFolder, find_runs, read_run
from kvpolicy.lab.store.records import CellRecord, EvalSettingRecord

Word = TypeVar("Word", str, int)
Value = TypeVar("Value")

RUNS = Path("kvpolicy-ablate")  # where `kvpolicy ablate` puts runs unless told otherwise


def open_runs(names: Sequence[str]) -> list[RunFolder]:
    """Read runs.

    Args:
        names: Folders of runs, folders that runs lie below, or names of folders in
            ``kvpolicy-ablate``.

    Raises:
        ResultsError: One of them is none, or cannot be read.
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
    """Which cells are wanted; of what is not said, all.

    Attributes:
        series: Names of series.
        budgets: Budgets, ``None`` for cells from which nothing leaves.
        models: Models, as they were typed.
        tasks: Tasks, as they are spelled.
        seeds: Seeds.
    """

    series: frozenset[str] = frozenset()
    budgets: frozenset[float | None] = frozenset()
    models: frozenset[str] = frozenset()
    tasks: frozenset[str] = frozenset()
    seeds: frozenset[int] = frozenset()

    def of_any_plan(self) -> "Selection":
        """The same models, tasks and seeds, under whatever plan."""
        return attrs.evolve(self, series=frozenset(), budgets=frozenset())

    def keeps(self, group: EvalSettingRecord, cell: CellRecord) -> bool:
        """Whether a cell is wanted."""
        return all(
            not wanted or value in wanted
            for wanted, value in (
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
    """Say which cells are wanted, in the words of a user; of what is not said, all.

    Args:
        runs: What there is.
        series: Names of series, in capitals or not.
        budgets: Numbers, or ``"all"`` for cells from which nothing leaves.
        models: Models, as they were typed.
        tasks: Tasks, as they are spelled.
        seeds: Seeds.

    Raises:
        ResultsError: The runs have nothing that is called so.
    """
    cells = [cell for run in runs for cell in run.cells.values()]
    groups = [group for run in runs for group in run.groups.values()]
    called = {cell.series.casefold(): cell.series for cell in cells}
    return Selection(
        series=frozenset(_known("series", [name.casefold() for name in series or ()], called)),
        budgets=frozenset(
            _known("budget", budgets, {budget_word(one.budget): one.budget for one in cells})
        ),
        models=frozenset(_known("model", models, {one.model: one.model for one in groups})),
        tasks=frozenset(_known("task", tasks, {one.task: one.task for one in groups})),
        seeds=frozenset(_known("seed", seeds, {one.seed: one.seed for one in groups})),
    )


def check_facet(cells: Sequence[PooledCell], facet: str | None) -> None:
    """Refuse a facet that no sample has.

    Args:
        cells: The cells that are to be broken down by it.
        facet: Its name, if one is asked for.

    Raises:
        ResultsError: No sample of the cells has it.
    """
    known = sorted({name for cell in cells for sample in cell.samples for name in sample.facets})
    if facet is not None and facet not in known:
        msg = f"no sample of the runs has a facet {facet!r}{nearest(facet, known)}"
        raise ResultsError(msg)


def _known(what: str, wanted: Sequence[Word] | None, there: Mapping[Word, Value]) -> list[Value]:
    for word in wanted or ():
        if word not in there:
            hint = nearest(str(word), map(str, there))
            msg = f"the runs have no {what} {word!r}{hint}"
            raise ResultsError(msg)
    return [there[word] for word in wanted or ()]
