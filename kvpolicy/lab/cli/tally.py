"""Counting the samples of a comparison while it runs, and putting the state into words."""

from pathlib import Path
from statistics import fmean

from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.group import Group
from kvpolicy.lab.sweep.runner import CellDone, Event, SampleDone


class Tally:
    """How many samples of each cell are done, and what they come to so far."""

    def __init__(self, comparison: Comparison, store: Store) -> None:
        """Begin with what is done.

        Args:
            comparison: What is run.
            store: What is done.
        """
        self._comparison = comparison
        self._n = {cell.id: len(comparison.group_of(cell).items) for cell in comparison.cells}
        self._done = dict.fromkeys(self._n, 0)
        self._values: dict[str, list[float]] = {id: [] for id in self._n}
        for sample in store.samples.values():
            self._add(sample)

    @property
    def num_done(self) -> int:
        """Samples done in all cells."""
        return sum(self._done.values())

    def count(self, event: Event) -> None:
        """Take an event into account."""
        if isinstance(event, SampleDone):
            self._add(event.sample)

    def cell_line(self, event: Event) -> str:
        """What is to be said of a cell that is finished; nothing of any other event."""
        if not isinstance(event, CellDone):
            return ""
        return f"{self._cells_done()}  {self._describe(event.cell)} in {event.elapsed_s:.1f} s"

    def state_line(self) -> str:
        """How many cells are done, and what those under way come to so far."""
        running = [c for c in self._comparison.cells if 0 < self._done[c.id] < self._n[c.id]]
        said = "; ".join(self._describe(cell) for cell in running)
        return f"{self._cells_done().strip()} cells{', ' if said else ''}{said}"

    def _cells_done(self) -> str:
        num_cells, total = sum(self._done[id] == n for id, n in self._n.items()), len(self._n)
        return f"{num_cells:>{len(str(total))}}/{total}"

    def _add(self, sample: Sample) -> None:
        if sample.cell in self._done:
            self._done[sample.cell] += 1
            group = self._comparison.group_of(self._comparison.cell(sample.cell))
            value = group.task.measure.columns[0].value(sample)
            self._values[sample.cell] += [] if value is None else [value]

    def _describe(self, cell: Cell) -> str:
        done, n, budget = self._done[cell.id], self._n[cell.id], cell.budget
        at = "" if budget is None else f" at {budget:g}"
        part = f"{done}" if done == n else f"{done}/{n}"
        return f"{self._where(cell)}{cell.series}{at}: {self._so_far(cell, part)}"

    def _where(self, cell: Cell) -> str:
        """Model, task and seed, as far as the groups differ in them."""
        groups, mine = self._comparison.groups, self._comparison.group_of(cell)
        told = []
        for words in (_model, _task, _seed):
            if len({words(group) for group in groups}) > 1:
                told.append(words(mine))
        return f"{', '.join(told)}: " if told else ""

    def _so_far(self, cell: Cell, part: str) -> str:
        values = self._values[cell.id]
        column = self._comparison.group_of(cell).task.measure.columns[0]
        if not values:
            return f"{part} failed"
        so_far = column.words(fmean(values))
        return (
            f"{so_far} of {part} {column.title}"
            if column.is_share
            else (f"{column.title} {so_far} over {part}")
        )


def _model(group: Group) -> str:
    return Path(group.model.name).name


def _task(group: Group) -> str:
    return group.task.name


def _seed(group: Group) -> str:
    return f"seed {group.seed}"
