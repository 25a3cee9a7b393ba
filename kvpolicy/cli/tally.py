"""Counting the samples of a comparison while it runs, and putting the state into words."""

from kvpolicy.lab.ablate import CellDone, Comparison, Event, SampleDone
from kvpolicy.lab.grid import Cell
from kvpolicy.lab.store import Store


class Tally:
    """How many samples of each cell are done, and how many of them are right."""

    def __init__(self, comparison: Comparison, store: Store) -> None:
        """Begin with what is done.

        Args:
            comparison: What is run.
            store: What is done.
        """
        self._n = len(comparison.items)
        self._cells = {cell.digest: cell for cell in comparison.cells}
        self._done = dict.fromkeys(self._cells, 0)
        self._correct = dict.fromkeys(self._cells, 0)
        for sample in store.samples.values():
            self._add(sample.cell, sample.correct)

    @property
    def num_done(self) -> int:
        """Samples done in all cells."""
        return sum(self._done.values())

    def count(self, event: Event) -> None:
        """Take an event into account."""
        if isinstance(event, SampleDone):
            self._add(event.cell.digest, event.sample.correct)

    def cell_line(self, event: Event) -> str:
        """What is to be said of a cell that is finished; nothing of any other event."""
        if not isinstance(event, CellDone):
            return ""
        num_cells = sum(done == self._n for done in self._done.values())
        place = f"{num_cells:>{len(str(len(self._cells)))}}/{len(self._cells)}"
        return f"{place}  {self._describe(event.cell)} in {event.elapsed_s:.1f} s"

    def state_line(self) -> str:
        """The cells under way."""
        running = [cell for d, cell in self._cells.items() if 0 < self._done[d] < self._n]
        return "; ".join(self._describe(cell) for cell in running)

    def _add(self, digest: str, correct: bool) -> None:
        if digest in self._done:
            self._done[digest] += 1
            self._correct[digest] += correct

    def _describe(self, cell: Cell) -> str:
        done, budget = self._done[cell.digest], cell.budget
        at = "" if budget is None else f" at {budget:g}"
        share = self._correct[cell.digest] / done
        part = f"{done}" if done == self._n else f"{done}/{self._n}"
        return f"{cell.series}{at}: {share:.0%} of {part} right"
