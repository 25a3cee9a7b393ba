"""Compare two cells item by item: the paired difference, its interval and an exact test."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.statistics import (
    RESAMPLES,
    Interval,
    bootstrap_mean,
    bootstrap_ratio_difference,
    holm,
    paired_proportions,
    sign_test,
)
from kvpolicy.lab.store.records import ItemRecord, Sample
from kvpolicy.lab.tasks.task import Column, mean_by_example, sums_by_example

MCNEMAR, SIGN = "mcnemar", "sign"


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

    def texts(self, item: int) -> list[str]:
        """What the cell generated for an item, or the error of a failed sample."""
        samples = self.cell.by_item.get(item, [])
        return [one.text if one.error is None else f"({one.error})" for one in samples]

    def to_json(self) -> dict[str, Any]:
        """The side as plain data."""
        cell = self.cell
        return {
            "cell": cell.id,
            "series": cell.series,
            "budget": cell.budget,
            "bytes_per_sequence": cell.record.bytes_per_sequence,
            "byte_limits": list(cell.byte_limits),
            "model": cell.group.model,
            "task": cell.group.task,
            "seeds": list(cell.seeds),
            "runs": list(cell.runs),
            "estimate": self.estimate and attrs.asdict(self.estimate),
            "num_unpaired": self.num_unpaired,
            **cell.counts(),
        }


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
        p_holm: The p-value adjusted for all comparisons made together.
    """

    column: Column
    a: ComparedCell
    b: ComparedCell
    pairs: tuple[Pair, ...]
    difference: Interval | None
    p_holm: float | None = None

    @property
    def test(self) -> str:
        """``"mcnemar"`` where every value is 0 or 1, else ``"sign"``.

        Both are the exact sign test of the items on which the cells differ.
        """
        is_binary = _is_binary(self.column, [(pair.a, pair.b) for pair in self.pairs])
        return MCNEMAR if is_binary else SIGN

    @property
    def p_value(self) -> float | None:
        """P-value of the test; ``None`` if the cells have no item in common."""
        return sign_test(self.num_above, self.num_below) if self.pairs else None

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
    def num_compacted(self) -> int:
        """Items for which a cache was compacted, in either cell."""
        return len(_compacted(self) & {pair.item for pair in self.pairs})

    @property
    def num_both_right(self) -> int | None:
        """Items on which both have 1, as correct ones have; ``None`` unless all are 0 or 1."""
        return self._num_both(1)

    @property
    def num_neither_right(self) -> int | None:
        """Items on which both have 0; ``None`` unless all are 0 or 1."""
        return self._num_both(0)

    @property
    def differing(self) -> list[Pair]:
        """The items on which the cells differ."""
        return [pair for pair in self.pairs if pair.difference]

    def item(self, pair: Pair) -> ItemRecord | None:
        """The record of an item; ``None`` if the runs have none."""
        return self.a.cell.items.get(pair.item) or self.b.cell.items.get(pair.item)

    def to_json(
        self, *, by: str | None = None, items: bool = False, seed: int = 0
    ) -> dict[str, Any]:
        """The comparison as plain data.

        Args:
            by: Add the comparisons for each value of this facet.
            items: Add the items on which the cells differ, with texts.
            seed: Random seed of the bootstrap.
        """
        record = {
            "column": self.column.name,
            "a": self.a.to_json(),
            "b": self.b.to_json(),
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
            "compacted": _over_compacted(compare_compacted(self, seed=seed)),
        }
        if by is not None:
            record["facets"] = [
                {"facet": by, "value": value, **part.to_json()}
                for value, part in compare_by_facet(self, by, seed=seed)
            ]
        if items:
            record["parted"] = [self._pair_to_json(pair) for pair in self.differing]
        return record

    def _num_both(self, value: int) -> int | None:
        if self.test != MCNEMAR:
            return None
        return sum(pair.a == pair.b == value for pair in self.pairs)

    def _pair_to_json(self, pair: Pair) -> dict[str, Any]:
        item = self.item(pair)
        return {
            "item": item.item if item else None,
            "seed": item.seed if item else None,
            "facets": dict(pair.facets),
            "prompt": item.prompt if item else None,
            "answer": item.answer if item else None,
            "a": pair.a,
            "b": pair.b,
            "a_texts": self.a.texts(pair.item),
            "b_texts": self.b.texts(pair.item),
        }


def compare_cells(
    a: PooledCell,
    b: PooledCell,
    column: Column,
    *,
    items: Collection[int] | None = None,
    seed: int = 0,
) -> CellComparison:
    """Compare two cells on the items for which both have a value.

    Args:
        a: The first cell.
        b: The baseline, which is subtracted.
        column: The compared quantity.
        items: Compare on these items only.
        seed: Random seed of the bootstrap.
    """
    facets = _facets(a, b)
    selected = facets.keys() if items is None else items
    samples_a, samples_b = _of_items(a, selected), _of_items(b, selected)
    values_a, values_b = (mean_by_example(s, column.value) for s in (samples_a, samples_b))
    common = sorted(values_a.keys() & values_b.keys())
    pairs = tuple(Pair(item, values_a[item], values_b[item], facets[item]) for item in common)
    paired_a, paired_b = _of_items(a, set(common)), _of_items(b, set(common))
    return CellComparison(
        column=column,
        a=ComparedCell(a, column.estimate(paired_a), len(values_a) - len(common)),
        b=ComparedCell(b, column.estimate(paired_b), len(values_b) - len(common)),
        pairs=pairs,
        difference=paired_difference(column, paired_a, paired_b, seed=seed),
    )


def compare_by_facet(
    whole: CellComparison, facet: str, *, seed: int = 0
) -> list[tuple[int | str, CellComparison]]:
    """Repeat a comparison for each value of a facet.

    Args:
        whole: The comparison.
        facet: Name of the facet, such as ``depth``.
        seed: Random seed of the bootstrap.

    Returns:
        Value and comparison, sorted by value; empty if no sample has the facet.
    """
    a, b = whole.a.cell, whole.b.cell
    parts_a, parts_b = a.by_facet(facet), b.by_facet(facet)
    found = []
    for value in sorted({*parts_a, *parts_b}, key=facet_order):
        part_a, part_b = (
            attrs.evolve(cell, samples=tuple(parts.get(value, ())))
            for cell, parts in ((a, parts_a), (b, parts_b))
        )
        found.append((value, compare_cells(part_a, part_b, whole.column, seed=seed)))
    return found


def compare_compacted(whole: CellComparison, *, seed: int = 0) -> CellComparison:
    """Repeat a comparison for the items for which a cache was compacted, in either cell.

    Eviction changes no others.

    Args:
        whole: The comparison.
        seed: Random seed of the bootstrap.
    """
    a, b = whole.a.cell, whole.b.cell
    return compare_cells(a, b, whole.column, items=_compacted(whole), seed=seed)


def adjust_p_values(comparisons: Sequence[CellComparison]) -> list[CellComparison]:
    """Correct comparisons that are made together for their number, after Holm.

    Args:
        comparisons: All comparisons; those without an item in common do not count.
    """
    p_values = [one.p_value for one in comparisons]
    tested = {i: p_value for i, p_value in enumerate(p_values) if p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [attrs.evolve(one, p_holm=adjusted.get(i)) for i, one in enumerate(comparisons)]


def interval_method(comparisons: Sequence[CellComparison], *, seed: int) -> str:
    """How the intervals of comparisons were computed.

    Args:
        comparisons: The comparisons.
        seed: Random seed of the bootstrap.
    """
    methods = {
        MCNEMAR: "Newcombe's for paired proportions",
        SIGN: f"BCa bootstrap over items, {RESAMPLES:,} resamples, seed {seed}",
    }
    tests = {one.test for one in comparisons} or {SIGN}
    return f"95 %, {' or '.join(method for test, method in methods.items() if test in tests)}"


def paired_difference(
    column: Column, a: Sequence[Sample], b: Sequence[Sample], *, seed: int = 0
) -> Interval | None:
    """Estimate a quantity of one cell minus that of another, over the items of both.

    For a mean over items, this is the mean of the items' differences. For a ratio of sums over
    items, such as the loss per token, it is the difference of the two ratios, in which long texts
    count for more.

    Args:
        column: The quantity.
        a: Samples of the first cell.
        b: Samples of the cell that is subtracted.
        seed: Random seed of the bootstrap.

    Returns:
        The difference. Its interval is `paired_proportions` where every value is 0 or
        1, else a bootstrap over items; ``None`` if the cells have no item in common.
    """
    if column.parts is not None:
        sums_a, sums_b = sums_by_example(a, column.parts), sums_by_example(b, column.parts)
        common = sorted(sums_a.keys() & sums_b.keys())
        if not common:
            return None
        return bootstrap_ratio_difference(
            [sums_a[item] for item in common],
            [sums_b[item] for item in common],
            of_ratio=column.of_ratio,
            seed=seed,
        )
    values_a, values_b = mean_by_example(a, column.value), mean_by_example(b, column.value)
    pairs = [(values_a[i], values_b[i]) for i in sorted(values_a.keys() & values_b.keys())]
    if not pairs:
        return None
    if _is_binary(column, pairs):
        counts = (pairs.count(outcome) for outcome in ((1, 1), (1, 0), (0, 1), (0, 0)))
        return paired_proportions(*counts)
    return bootstrap_mean([x - y for x, y in pairs], seed=seed)


def facet_order(value: int | str) -> tuple[bool, int | str]:
    """Sort key for the values of a facet: numbers before texts."""
    return isinstance(value, str), value


def _is_binary(column: Column, pairs: Sequence[tuple[float, float]]) -> bool:
    """Whether every value is 0 or 1, and not the mean of several attempts."""
    return column.is_binary and all({x, y} <= {0.0, 1.0} for x, y in pairs)


def _compacted(found: CellComparison) -> set[int]:
    samples = (*found.a.cell.samples, *found.b.cell.samples)
    return {sample.item for sample in samples if sample.compactions}


def _over_compacted(found: CellComparison) -> dict[str, Any]:
    estimates = {"a": found.a.estimate, "b": found.b.estimate, "difference": found.difference}
    return {
        "num_items": len(found.pairs),
        **{name: one and attrs.asdict(one) for name, one in estimates.items()},
    }


def _facets(a: PooledCell, b: PooledCell) -> dict[int, Mapping[str, int | str]]:
    """Facets of every item of either cell."""
    return {sample.item: sample.facets for sample in (*b.samples, *a.samples)}


def _of_items(cell: PooledCell, items: Collection[int]) -> list[Sample]:
    return [sample for sample in cell.samples if sample.item in items]
