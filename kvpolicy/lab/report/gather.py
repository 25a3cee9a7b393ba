"""Runs put together: groups that occur in several of them are one group."""

from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.lab.archive import RunFolder
from kvpolicy.lab.records import Cell, Group
from kvpolicy.lab.samples import CellTiming, ItemRecord, Sample


@attrs.frozen
class CellView:
    """A cell and all that is known of it.

    Attributes:
        cell: The cell.
        samples: What is done of it, by item and attempt, in their order.
        timing: What it cost; ``None`` if it was not run in one go.
        label: Its name: no other cell of the group has the same.
    """

    cell: Cell
    samples: dict[tuple[int, int], Sample]
    timing: CellTiming | None
    label: str

    @property
    def series(self) -> str:
        """Which line of a plot it is a point of."""
        return self.cell.series

    @property
    def budget(self) -> float | None:
        """Rows that stay after a compaction; ``None`` if everything stays."""
        return self.cell.budget

    @cached_property
    def by_item(self) -> dict[int, list[Sample]]:
        """The samples of each item, rising."""
        found: dict[int, list[Sample]] = {}
        for (item, _), sample in self.samples.items():
            found.setdefault(item, []).append(sample)
        return found


@attrs.frozen
class GroupView:
    """A group with its cells, from whichever run they come.

    Attributes:
        group: The group.
        cells: Those of its cells that have samples.
        items: What they are asked, by number.
        num_expected: Samples there will be when all runs are complete.
    """

    group: Group
    cells: list[CellView]
    items: dict[int, ItemRecord]
    num_expected: int

    @cached_property
    def numbers(self) -> list[int]:
        """The items that any cell has a sample of, rising."""
        return sorted({item for cell in self.cells for item in cell.by_item})


def gather(runs: Sequence[RunFolder]) -> list[GroupView]:
    """Put runs together.

    Args:
        runs: The runs. A cell that several have has the samples of all of them.

    Returns:
        The groups with at least one sample, in the order of the runs.

    Raises:
        ResultsError: No run has a sample, or one is damaged.
    """
    groups = {name: group for run in runs for name, group in run.groups.items()}
    views = [_group(group, runs) for group in groups.values()]
    found = [view for view in views if view.cells]
    if not found:
        names = ", ".join(str(run.path) for run in runs)
        msg = f"{names}: no sample is done yet; there is something to show when the first one is."
        raise ResultsError(msg)
    return found


def _group(group: Group, runs: Sequence[RunFolder]) -> GroupView:
    cells = {
        name: cell for run in runs for name, cell in run.cells.items() if cell.group == group.group
    }
    samples: dict[str, dict[tuple[int, int], Sample]] = {name: {} for name in cells}
    items: dict[int, ItemRecord] = {}
    timings: dict[str, CellTiming] = {}
    for run in runs:
        for sample in run.samples.values():
            if sample.cell in samples:
                samples[sample.cell][sample.item, sample.attempt] = sample
        items |= {one.item: one for one in run.items.values() if one.group == group.group}
        timings |= run.timings
    done = [cell for name, cell in cells.items() if samples[name]]
    views = [
        CellView(
            cell=cell,
            samples=dict(sorted(samples[cell.cell].items())),
            timing=timings.get(cell.cell),
            label=label,
        )
        for cell, label in zip(done, _labels(done), strict=True)
    ]
    return GroupView(group, views, items, len(cells) * group.n * group.attempts)


def _labels(cells: Sequence[Cell]) -> list[str]:
    """A name for each cell: as much as is needed to tell them apart."""
    ways = [
        [_short(cell) for cell in cells],
        [" ".join([_short(cell), *_knobs(cell)]) for cell in cells],
        [f"{_short(cell)} buffer {cell.buffer}" for cell in cells],
        [f"{_short(cell)} {cell.plan}" for cell in cells],
    ]
    return next((names for names in ways if len(set(names)) == len(names)), ways[-1])


def _short(cell: Cell) -> str:
    return cell.series if cell.budget is None else f"{cell.series} {cell.budget:g}"


def _knobs(cell: Cell) -> Iterable[str]:
    return (f"{name}={value}" for name, value in cell.knobs.items())
