"""How long a comparison may take, extrapolated from probes of a few of its cells.

What the probes say of a sample's time is taken to hold for all samples, and cells in between are
taken to lie in between.
"""

from collections.abc import Sequence
from pathlib import Path

import attrs

from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.group import Group
from kvpolicy.lab.sweep.jobs import Job
from kvpolicy.lab.sweep.probe import Probe, Seconds, budget_of, limit_s_of, place_of

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
        workers: Workers that do it side by side.
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
    pieces: Sequence[Job],
    *,
    folder: Path,
    workers: int,
) -> Estimate:
    """Extrapolate.

    Args:
        comparison: What is to be run.
        probes: What was tried, at least the `representatives`.
        pieces: What is left, in the parts that one worker does in one go.
        folder: Where the results go.
        workers: Workers that do it side by side.
    """
    cell_of = {piece: comparison.cell(piece.cell) for piece in pieces}
    times = {
        piece: _sample_s(comparison.group_of(cell), cell, probes) * len(piece.items)
        for piece, cell in cell_of.items()
    }
    nothing = Seconds(0.0, 0.0)
    shares = []
    for group in comparison.groups:
        cells = comparison.cells_of(group)
        mine = [piece for piece in pieces if cell_of[piece].group == group.id]
        shares.append(
            Share(
                model=group.model.name,
                task=group.task.name,
                seed=group.seed,
                cells=len(cells),
                samples=len(cells) * len(group.items),
                left=sum(len(piece.items) for piece in mine),
                elapsed_s=sum((times[piece] for piece in mine), nothing),
            )
        )
    total = sum((share.elapsed_s for share in shares), nothing) * (1 / workers)
    # The longest piece takes its time, however many workers there are.
    longest = [max((getattr(t, end) for t in times.values()), default=0.0) for end in _ENDS]
    return Estimate(
        run=comparison.name,
        folder=str(folder),
        cells=len(comparison.cells),
        samples=comparison.num_samples,
        left=sum(share.left for share in shares),
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
