"""By how much one cell has more than another, on the items that both have a value for.

Of a mean over items, this is the mean of the items' differences. Of a ratio of sums over items,
such as the loss of a token, it is the difference of the two ratios: a text of a thousand tokens
counts a hundred times as much as one of ten, between two cells as in each of them.
"""

from collections.abc import Callable, Sequence
from math import fsum
from statistics import fmean
from typing import TypeVar

from kvpolicy.lab.analysis.paired import bootstrap_mean, bootstrap_ratios
from kvpolicy.lab.statistics import Estimate
from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.tasks.measures import Column

Value = TypeVar("Value")


def paired_difference(
    column: Column, ours: Sequence[Sample], theirs: Sequence[Sample], *, seed: int = 0
) -> Estimate | None:
    """Estimate a quantity of one cell less that of another, over the items that both have.

    Args:
        column: The quantity.
        ours: Samples of the first cell.
        theirs: Samples of the one that is subtracted.
        seed: Of the bootstrap.

    Returns:
        The difference of what `Column.estimate` says of each over these items, with its bootstrap
        interval, in which items vary; ``None`` if the cells have no item in common.
    """
    if column.parts is None:
        values, others = values_of(column, ours), values_of(column, theirs)
        pairs = [(values[item], others[item]) for item in sorted(values.keys() & others.keys())]
        return bootstrap_mean([a - b for a, b in pairs], seed=seed) if pairs else None
    sums, more = _sums(column.parts, ours), _sums(column.parts, theirs)
    common = sorted(sums.keys() & more.keys())
    if not common:
        return None
    both = [sums[item] for item in common], [more[item] for item in common]
    return bootstrap_ratios(*both, of_ratio=column.of_ratio, seed=seed)


def values_of(column: Column, samples: Sequence[Sample]) -> dict[int, float]:
    """The value of each item that has one: the mean over its attempts.

    Args:
        column: What is measured.
        samples: The samples of a cell.
    """
    return {item: fmean(said) for item, said in _by_number(column.value, samples).items()}


def _sums(
    parts: Callable[[Sample], tuple[float, float] | None], samples: Sequence[Sample]
) -> dict[int, tuple[float, float]]:
    """What each item adds to both sums, all its attempts together."""
    found = _by_number(parts, samples)
    return {
        item: (fsum(a for a, _ in said), fsum(b for _, b in said)) for item, said in found.items()
    }


def _by_number(
    says: Callable[[Sample], Value | None], samples: Sequence[Sample]
) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for sample in samples:
        said = says(sample)
        if said is not None:
            found.setdefault(sample.item, []).append(said)
    return found
