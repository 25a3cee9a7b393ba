"""How long a comparison may take, extrapolated from probes of a few of its cells.

What the probes say of a sample's time is taken to hold for all samples, and cells in between are
taken to lie in between.
"""

from collections.abc import Container, Sequence
from pathlib import Path

import attrs

from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.grid import Cell
from kvpolicy.lab.group import Group
from kvpolicy.lab.probe import Probe, Seconds, budget_of, limit_s_of, place_of

HOW = (
    "one batch of the smallest and the largest budget and of the full cache, of each model and "
    "task, stopped after {limit_s:.0f} s; cells in between lie in between; loading not included"
)

_ENDS = ("low", "high")


@attrs.frozen
class Share:
    """What the cells of one group have left to do.

    Attributes:
        model: The model, as typed.
        task: The task.
        seed: Chose the items.
        cells: Cells.
        samples: Samples in all.
        left: Samples still to be done.
        elapsed_s: Seconds they take one process.
    """

    model: str
    task: str
    seed: int
    cells: int
    samples: int
    left: int
    elapsed_s: Seconds


@attrs.frozen
class Estimate:
    """How long a comparison may take.

    Attributes:
        run: What the user calls it.
        folder: Where its results go.
        cells: Cells.
        samples: Samples in all.
        left: Samples still to be done.
        workers: Processes that do it side by side.
        minutes: How long it takes, with that many.
        groups: What each group has left to do.
        probes: What was tried.
        how: How this was estimated, in words.
    """

    run: str
    folder: str
    cells: int
    samples: int
    left: int
    workers: int
    minutes: Seconds
    groups: Sequence[Share]
    probes: Sequence[Probe]
    how: str


def estimate(
    comparison: Comparison,
    probes: Sequence[Probe],
    done: Container[str],
    *,
    folder: Path,
    workers: int,
) -> Estimate:
    """Extrapolate.

    Args:
        comparison: What is to be run.
        probes: What was tried, at least the `representatives`.
        done: Keys of the samples that are done.
        folder: Where the results go.
        workers: Processes that do it side by side.
    """
    left = {cell.id: len(comparison.left(cell, done)) for cell in comparison.cells}
    times = {
        cell.id: _sample_s(comparison.group_of(cell), cell, probes) * left[cell.id]
        for cell in comparison.cells
        if left[cell.id]
    }
    nothing = Seconds(0.0, 0.0)
    shares = []
    for group in comparison.groups:
        cells = comparison.cells_of(group)
        shares.append(
            Share(
                model=group.model.name,
                task=group.task.name,
                seed=group.seed,
                cells=len(cells),
                samples=len(cells) * len(group.items),
                left=sum(left[cell.id] for cell in cells),
                elapsed_s=sum((times.get(cell.id, nothing) for cell in cells), nothing),
            )
        )
    total = sum((share.elapsed_s for share in shares), nothing) * (1 / workers)
    # No cell is divided among workers: the longest one takes its time.
    longest = [max((getattr(t, end) for t in times.values()), default=0.0) for end in _ENDS]
    return Estimate(
        run=comparison.name,
        folder=str(folder),
        cells=len(comparison.cells),
        samples=comparison.num_samples,
        left=sum(left.values()),
        workers=workers,
        minutes=Seconds(max(total.low, longest[0]), max(total.high, longest[1])) * (1 / 60),
        groups=shares,
        probes=probes,
        how=HOW.format(limit_s=limit_s_of(len(probes))),
    )


def _sample_s(group: Group, cell: Cell, probes: Sequence[Probe]) -> Seconds:
    """Seconds for one sample of a cell, from what was tried of its model and task."""
    mine = [one for one in probes if (one.model, one.task) == place_of(group)]
    bounded = sorted((one for one in mine if one.budget is not None), key=budget_of)
    if cell.budget is None or not bounded:
        return next((one.sample_s for one in mine if one.budget is None), mine[-1].sample_s)
    least, most = bounded[0], bounded[-1]
    width = budget_of(most) - budget_of(least)
    part = (cell.budget - budget_of(least)) / width if width else 0.0
    return least.sample_s * (1 - part) + most.sample_s * part
