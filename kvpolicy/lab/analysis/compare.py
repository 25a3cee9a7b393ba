"""Compare two cells item by item: the paired difference, its interval and an exact test."""

from collections.abc import Callable, Collection, Mapping, Sequence
from math import fsum
from statistics import fmean
from typing import Any, TypeVar

import attrs

from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio_difference,
    holm,
    paired_proportions,
    sign_test,
)
from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.tasks.task import ACCURACY, Column

MCNEMAR, SIGN = "mcnemar", "sign"

Value = TypeVar("Value")


@attrs.frozen
class Pair:
    """One item for which both cells have a value; the value of several attempts is their mean.

    Attributes:
        item: Number of the question.
        a: Value in the first cell.
        b: Value in the baseline.
        facets: Facets of the item.
    """

    item: int
    a: float
    b: float
    facets: Mapping[str, int | str]

    @property
    def difference(self) -> float:
        """The first value minus the second."""
        return self.a - self.b


@attrs.frozen
class ComparedCell:
    """One side of a comparison.

    Attributes:
        cell: The cell.
        estimate: Its value over the paired items; ``None`` without paired items.
        num_unpaired: Items for which it has a value and the other cell has none.
    """

    cell: PooledCell
    estimate: Interval | None
    num_unpaired: int


@attrs.frozen
class CellComparison:
    """One cell minus a baseline, over the items for which both have a value.

    Attributes:
        column: The compared quantity.
        a: The first cell.
        b: The baseline.
        pairs: The items, by number.
        difference: The first cell's value over these items minus the baseline's, see
            `paired_difference`; ``None`` if the cells have no item in common.
        test: ``"mcnemar"`` where every value is correct or wrong, else ``"sign"``: both are the
            exact sign test of the items on which the cells differ.
        p_value: Its p-value; ``None`` if the cells have no item in common.
        p_holm: The p-value adjusted for all comparisons made together.
    """

    column: Column
    a: ComparedCell
    b: ComparedCell
    pairs: tuple[Pair, ...]
    difference: Interval | None
    test: str
    p_value: float | None
    p_holm: float | None = None

    @property
    def num_above(self) -> int:
        """Items on which the first cell has the larger value, or only it is correct."""
        return sum(pair.difference > 0 for pair in self.pairs)

    @property
    def num_below(self) -> int:
        """Items on which the baseline has the larger value."""
        return sum(pair.difference < 0 for pair in self.pairs)

    @property
    def num_equal(self) -> int:
        """Items with equal values."""
        return len(self.pairs) - self.num_above - self.num_below

    @property
    def num_unpaired(self) -> int:
        """Items for which only one of the cells has a value."""
        return self.a.num_unpaired + self.b.num_unpaired

    @property
    def num_both_right(self) -> int | None:
        """Items on which both are correct; ``None`` unless every value is correct or wrong."""
        if self.test != MCNEMAR:
            return None
        return sum(pair.a == pair.b == 1 for pair in self.pairs)

    @property
    def num_neither_right(self) -> int | None:
        """Items on which both are wrong; ``None`` unless every value is correct or wrong."""
        if self.test != MCNEMAR:
            return None
        return sum(pair.a == pair.b == 0 for pair in self.pairs)

    def to_json(self) -> dict[str, Any]:
        """The comparison as plain data."""
        return {
            "column": self.column.name,
            "a": _cell_to_json(self.a),
            "b": _cell_to_json(self.b),
            "num_items": len(self.pairs),
            "difference": self.difference and attrs.asdict(self.difference),
            "num_above": self.num_above,
            "num_below": self.num_below,
            "num_equal": self.num_equal,
            "num_both_right": self.num_both_right,
            "num_neither_right": self.num_neither_right,
            "test": self.test,
            "p_value": self.p_value,
            "p_holm": self.p_holm,
        }


def compare_cells(a: PooledCell, b: PooledCell, column: Column, *, seed: int = 0) -> CellComparison:
    """Compare two cells on the items for which both have a value.

    Args:
        a: The first cell.
        b: The baseline, which is subtracted.
        column: The compared quantity.
        seed: Random seed of the bootstrap.
    """
    return _compare(a, b, column, _facets(a, b), seed)


def compare_by_facet(
    whole: CellComparison, facet: str, *, seed: int = 0
) -> list[tuple[int | str, CellComparison]]:
    """Repeat a comparison for each value of a facet.

    Args:
        whole: The comparison.
        facet: Name of the facet, such as ``depth``.
        seed: Random seed of the bootstrap.

    Returns:
        Value and comparison, sorted by value; empty if no item has the facet.
    """
    a, b = whole.a.cell, whole.b.cell
    groups: dict[int | str, dict[int, Mapping[str, int | str]]] = {}
    for item, facets in _facets(a, b).items():
        if facet in facets:
            groups.setdefault(facets[facet], {})[item] = facets
    ordered = sorted(groups, key=facet_order)
    return [(value, _compare(a, b, whole.column, groups[value], seed)) for value in ordered]


def adjust_p_values(comparisons: Sequence[CellComparison]) -> list[CellComparison]:
    """Correct comparisons that are made together for their number, after Holm.

    Args:
        comparisons: All comparisons; those without an item in common do not count.
    """
    tested = {i: one.p_value for i, one in enumerate(comparisons) if one.p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [attrs.evolve(one, p_holm=adjusted.get(i)) for i, one in enumerate(comparisons)]


def paired_difference(
    column: Column, a: Sequence[Sample], b: Sequence[Sample], *, seed: int = 0
) -> Interval | None:
    """Interval a quantity of one cell minus that of another, over the items of both.

    For a mean over items, this is the mean of the items' differences. For a ratio of sums over
    items, such as the loss per token, it is the difference of the two ratios, in which long texts
    count for more.

    Args:
        column: The quantity.
        a: Samples of the first cell.
        b: Samples of the cell that is subtracted.
        seed: Random seed of the bootstrap.

    Returns:
        The difference. Its interval is `paired_proportions` where every value is correct or
        wrong, else a bootstrap over items; ``None`` if the cells have no item in common.
    """
    if column.parts is not None:
        of_a, of_b = (_by_item(column.parts, samples) for samples in (a, b))
        common = sorted(of_a.keys() & of_b.keys())
        sums = [[_sum_parts(of[item]) for item in common] for of in (of_a, of_b)]
        if not common:
            return None
        return bootstrap_ratio_difference(*sums, of_ratio=column.of_ratio, seed=seed)
    values_a, values_b = values_by_item(column, a), values_by_item(column, b)
    pairs = [(values_a[i], values_b[i]) for i in sorted(values_a.keys() & values_b.keys())]
    if not pairs:
        return None
    if _is_graded(column, pairs):
        counts = (pairs.count(outcome) for outcome in ((1, 1), (1, 0), (0, 1), (0, 0)))
        return paired_proportions(*counts)
    return bootstrap_mean([x - y for x, y in pairs], seed=seed)


def values_by_item(column: Column, samples: Sequence[Sample]) -> dict[int, float]:
    """The value of each item that has one: the mean over its attempts.

    Args:
        column: The quantity.
        samples: Samples of a cell.
    """
    return {item: fmean(values) for item, values in _by_item(column.value, samples).items()}


def facet_order(value: int | str) -> tuple[bool, int | str]:
    """Sort key for the values of a facet: numbers before texts."""
    return isinstance(value, str), value


def _compare(
    a: PooledCell,
    b: PooledCell,
    column: Column,
    facets: Mapping[int, Mapping[str, int | str]],
    seed: int,
) -> CellComparison:
    """Compare two cells on some items, given with their facets."""
    values_a, values_b = (values_by_item(column, _of_items(cell, facets)) for cell in (a, b))
    common = sorted(values_a.keys() & values_b.keys())
    pairs = tuple(Pair(item, values_a[item], values_b[item], facets[item]) for item in common)
    above, below = (sum(sign * pair.difference > 0 for pair in pairs) for sign in (1, -1))
    samples_a, samples_b = (_of_items(cell, set(common)) for cell in (a, b))
    return CellComparison(
        column=column,
        a=ComparedCell(a, column.estimate(samples_a), len(values_a) - len(common)),
        b=ComparedCell(b, column.estimate(samples_b), len(values_b) - len(common)),
        pairs=pairs,
        difference=paired_difference(column, samples_a, samples_b, seed=seed),
        test=MCNEMAR if _is_graded(column, [(pair.a, pair.b) for pair in pairs]) else SIGN,
        p_value=sign_test(above, below) if pairs else None,
    )


def _is_graded(column: Column, pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether every value is correct or wrong, and not the mean of several attempts."""
    return column is ACCURACY and all({x, y} <= {0.0, 1.0} for x, y in pairs)


def _facets(a: PooledCell, b: PooledCell) -> dict[int, Mapping[str, int | str]]:
    """Facets of every item of either cell."""
    return {sample.item: sample.facets for sample in (*b.samples, *a.samples)}


def _of_items(cell: PooledCell, items: Collection[int]) -> list[Sample]:
    return [sample for sample in cell.samples if sample.item in items]


def _by_item(
    get: Callable[[Sample], Value | None], samples: Sequence[Sample]
) -> dict[int, list[Value]]:
    found: dict[int, list[Value]] = {}
    for sample in samples:
        value = get(sample)
        if value is not None:
            found.setdefault(sample.item, []).append(value)
    return found


def _sum_parts(parts: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return fsum(part for part, _ in parts), fsum(whole for _, whole in parts)


def _cell_to_json(side: ComparedCell) -> dict[str, Any]:
    cell = side.cell
    return {
        "cell": cell.id,
        "series": cell.series,
        "budget": cell.budget,
        "model": cell.group.model,
        "task": cell.group.task,
        "seeds": list(cell.seeds),
        "runs": list(cell.runs),
        "estimate": side.estimate and attrs.asdict(side.estimate),
        "num_unpaired": side.num_unpaired,
        **cell.counts(),
    }
