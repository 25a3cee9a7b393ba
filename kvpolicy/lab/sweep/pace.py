"""How much of a sweep's work is done: by tokens, since samples of a cell end late and together."""

from collections.abc import Iterable, Mapping
from statistics import fmean

# Samples that are decoded now are taken to be at most this far: nothing says how far they are.
_FARTHEST = 2 / 3


class Pace:
    """Counts the tokens that a run of a sweep has written, and estimates those that are to come."""

    def __init__(self, sizes: Mapping[str, int], finished: Iterable[tuple[str, int]] = ()) -> None:
        """Begin.

        Args:
            sizes: Number of samples of each cell, by its id.
            finished: Cell and number of tokens of each sample that was finished before.
        """
        self._left = dict(sizes)
        self._ended = dict.fromkeys(sizes, 0)  # tokens of samples that ended in this run
        self._written = dict.fromkeys(sizes, 0)  # of all samples in this run, as far as is known
        self._lengths: list[int] = []
        for cell, num_tokens in finished:
            self._end(cell, num_tokens)

    def end_sample(self, cell: str, num_tokens: int) -> None:
        """Note that a sample of so many tokens has ended."""
        self._end(cell, num_tokens)
        self._ended[cell] += num_tokens
        self.go_on(cell, self._ended[cell])

    def go_on(self, cell: str, num_tokens: int) -> None:
        """Note how many tokens this run has written of a cell's samples, ended ones included."""
        self._written[cell] = max(self._written[cell], num_tokens)

    @property
    def share(self) -> float | None:
        """The share of this run's tokens that are written; ``None`` until a sample has ended.

        Samples to come are taken to be as long as those that have ended, and longer than what is
        written of those that are decoded now: the longest end last.
        """
        if not any(self._lengths):
            return None
        in_flight = {
            cell: self._written[cell] - self._ended[cell] for cell, n in self._left.items() if n
        }
        longest = max([0.0, *(num / self._left[cell] for cell, num in in_flight.items())])
        length = max(fmean(self._lengths), longest / _FARTHEST)
        written = sum(self._written.values())
        to_come = length * sum(self._left.values()) - sum(in_flight.values())
        return written / (written + to_come) if written else None

    def _end(self, cell: str, num_tokens: int) -> None:
        self._left[cell] -= 1
        self._lengths.append(num_tokens)
