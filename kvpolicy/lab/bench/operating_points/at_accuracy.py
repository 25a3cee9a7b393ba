"""For each policy of a sweep, the smallest budget that is as accurate as the full cache."""

from collections.abc import Sequence

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.compare import CellComparison, compare_cells
from kvpolicy.lab.analysis.pooling import PooledCell, blocks_of, column_of
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.sweep.sweep_file import Series
from kvpolicy.lab.tasks.task import ACCURACY


@attrs.frozen
class Choice:
    """What a sweep says about one policy.

    Attributes:
        series: Name of the plan in the sweep, without its budget.
        budget: The smallest budget whose accuracy is within the margin; ``None`` if none is.
        accuracy: Accuracy there; at the largest budget if none is within the margin.
        difference: That minus the full cache's, over the same items.
        num_items: These items.
        num_compacted: Those of them whose cache was compacted: eviction changes no others.
        plan: The content of a plan file with this budget; ``None`` if no budget was found.
    """

    series: str
    budget: float | None
    accuracy: Interval | None
    difference: Interval | None
    num_items: int
    num_compacted: int
    plan: Series | None


def choose_budgets(cells: Sequence[PooledCell], margin: float) -> list[Choice]:
    """Choose a budget for each policy of a sweep.

    A budget is within the margin if the whole interval of the paired difference is above minus the
    margin. One at which no cache was compacted is never chosen, since it says nothing.

    Args:
        cells: The cells of one model and task.
        margin: The accuracy that may be lost, such as 0.02.

    Raises:
        ResultsError: The sweep has several models or tasks, no full cache, or no other policy.
    """
    blocks = blocks_of(cells)
    if len(blocks) != 1:
        msg = (
            f"the sweep has {len(blocks)} combinations of model, task and version; give the folder "
            "of a run with one of each"
        )
        raise ResultsError(msg)
    full = [cell for cell in cells if cell.budget is None and not _has_integers(cell)]
    if len(full) != 1:
        msg = (
            f"the sweep has {len(full)} plans without a budget in the model's precision; one is "
            "needed, the full cache"
        )
        raise ResultsError(msg)
    series: dict[str, list[PooledCell]] = {}
    for cell in cells:
        if cell.budget is not None:
            series.setdefault(cell.series, []).append(cell)
    if not series:
        msg = "the sweep has no plan with a budget; add policies to it"
        raise ResultsError(msg)
    column = column_of(full[0].group, ACCURACY.name)
    return [
        _choose([compare_cells(cell, full[0], column) for cell in of_series], margin)
        for of_series in series.values()
    ]


def _has_integers(cell: PooledCell) -> bool:
    """Whether some of its layers store rows in integers."""
    return any("rows" in layer for layer in cell.record.resolved["layers"])


def _choose(compared: Sequence[CellComparison], margin: float) -> Choice:
    by_budget = sorted(compared, key=lambda one: one.a.cell.budget or 0)
    within = [
        one
        for one in by_budget
        if one.difference is not None and one.difference.low > -margin and one.num_compacted
    ]
    shown = [*within, by_budget[-1]][0]
    cell = shown.a.cell
    return Choice(
        series=cell.series,
        budget=cell.budget if within else None,
        accuracy=shown.a.estimate,
        difference=shown.difference,
        num_items=len(shown.pairs),
        num_compacted=shown.num_compacted,
        plan=_plan_of(cell) if within else None,
    )


def _plan_of(cell: PooledCell) -> Series:
    """The plan of a cell for models with any number of layers.

    Raises:
        ResultsError: Its layers have different plans.
    """
    first, *others = ({**layer, "layer": 0} for layer in cell.record.resolved["layers"])
    if any(other != first for other in others):
        msg = (
            f"the layers of '{cell.name}' have plans of their own, which a model with another "
            "number of layers cannot have; give its plan with --plan, without --at-accuracy"
        )
        raise ResultsError(msg)
    plan = {name: first[name] for name in ("stack", "budget", "buffer", "rows") if name in first}
    return Series(cell.name, plan)
