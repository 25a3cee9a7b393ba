"""Counting the samples of a comparison while it runs, and putting the state into words."""

from statistics import fmean

from kvpolicy.lab.ablate import CellDone, Event, SampleDone
from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.grid import Cell
from kvpolicy.lab.samples import Sample
from kvpolicy.lab.store import Store


class Tally:
    """How many samples of each cell are done, and what they come to so far."""

    def __init__(self, comparison: Comparison, store: Store) -> None:
        """Begin with what is done.

        Args:
            comparison: What is run.
            store: What is done.
        """
        self._n = {cell.id: len(comparison.group_of(cell).items) for cell in comparison.cells}
        self._cells = {cell.id: cell for cell in comparison.cells}
        self._done = dict.fromkeys(self._cells, 0)
        self._values: dict[str, list[float]] = {id: [] for id in self._cells}
        self._columns = {
            cell.id: comparison.group_of(cell).task.measure.columns[0] for cell in comparison.cells
        }
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
        num_cells = sum(done == self._n[id] for id, done in self._done.items())
        place = f"{num_cells:>{len(str(len(self._cells)))}}/{len(self._cells)}"
        return f"{place}  {self._describe(event.cell)} in {event.elapsed_s:.1f} s"

    def state_line(self) -> str:
        """The cells under way."""
        running = [c for id, c in self._cells.items() if 0 < self._done[id] < self._n[id]]
        return "; ".join(self._describe(cell) for cell in running)

    def _add(self, sample: Sample) -> None:
        if sample.cell in self._done:
            self._done[sample.cell] += 1
            value = self._columns[sample.cell].value(sample)
            self._values[sample.cell] += [] if value is None else [value]

    def _describe(self, cell: Cell) -> str:
        done, n, budget = self._done[cell.id], self._n[cell.id], cell.budget
        at = "" if budget is None else f" at {budget:g}"
        part = f"{done}" if done == n else f"{done}/{n}"
        return f"{cell.series}{at}: {self._so_far(cell, part)}"

    def _so_far(self, cell: Cell, part: str) -> str:
        values, column = self._values[cell.id], self._columns[cell.id]
        if not values:
            return f"{part} failed"
        so_far = column.words(fmean(values))
        return (
            f"{so_far} of {part} {column.title}"
            if column.is_share
            else (f"{column.title} {so_far} over {part}")
        )
