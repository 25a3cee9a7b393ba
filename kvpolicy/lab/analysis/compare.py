"""Two cells, item by item: what differs, by how much, and whether chance might do that."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.lab.analysis.paired import holm, sign_test
from kvpolicy.lab.analysis.paired_difference import paired_difference, values_of
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.statistics import Estimate
from kvpolicy.lab.store.records import Sample
from kvpolicy.lab.tasks.measures import ACCURACY, Column

MCNEMAR, SIGN = "mcnemar", "sign"


@attrs.frozen
class Pair:
    """One item that both cells have a value for; of several attempts, their mean.

    Attributes:
        item: Number of the question.
        a: Value in the first cell.
        b: Value in the second one.
        facets: What the items of the task differ in.
    """

    item: int
    a: float
    b: float
    facets: Mapping[str, int | str]

    @property
    def difference(self) -> float:
        """By how much the first cell has more."""
        return self.a - self.b


@attrs.frozen
class Side:
    """What a comparison says of one of the cells.

    Attributes:
        cell: The cell.
        estimate: Its value over the items that both have; ``None`` if there is none.
        num_unpaired: Items that it has a value for and the other has not.
    """

    cell: PooledCell
    estimate: Estimate | None
    num_unpaired: int


@attrs.frozen
class Contrast:
    """One cell less another, on the items that both have a value for.

    Attributes:
        column: What is compared.
        a: The first cell.
        b: The second one.
        pairs: The items, in order of their numbers.
        difference: The first cell's value over these items less the second one's, with its
            bootstrap interval; ``None`` if the cells have no item in common.
        test: ``"mcnemar"`` where all values are right or wrong, else ``"sign"``: both are the
            exact sign test of the items on which the cells part.
        p_value: Its p-value; ``None`` if the cells have no item in common.
        p_holm: The same, adjusted for all comparisons that were made with it.
    """

    column: Column
    a: Side
    b: Side
    pairs: tuple[Pair, ...]
    difference: Estimate | None
    test: str
    p_value: float | None
    p_holm: float | None = None

    @property
    def num_above(self) -> int:
        """Items on which the first cell has more; where answers are graded, only it is right."""
        return sum(pair.difference > 0 for pair in self.pairs)

    @property
    def num_below(self) -> int:
        """Items on which the second cell has more."""
        return sum(pair.difference < 0 for pair in self.pairs)

    @property
    def num_equal(self) -> int:
        """Items on which they are the same."""
        return len(self.pairs) - self.num_above - self.num_below

    @property
    def num_unpaired(self) -> int:
        """Items that one of the cells has a value for, and the other has not."""
        return self.a.num_unpaired + self.b.num_unpaired

    @property
    def num_both_right(self) -> int | None:
        """Items that both have right; ``None`` where values are not just right or wrong."""
        if self.test != MCNEMAR:
            return None
        return sum(pair.a == pair.b == 1 for pair in self.pairs)

    @property
    def num_neither_right(self) -> int | None:
        """Items that neither has right; ``None`` likewise."""
        if self.test != MCNEMAR:
            return None
        return sum(pair.a == pair.b == 0 for pair in self.pairs)


def contrast(a: PooledCell, b: PooledCell, column: Column, *, seed: int = 0) -> Contrast:
    """Compare two cells on the items that both have a value for.

    Args:
        a: The first cell.
        b: The one that is subtracted.
        column: What to compare.
        seed: Of the bootstrap.
    """
    return _contrast(a, b, column, _facets(a, b), seed)


def adjust(found: Sequence[Contrast]) -> list[Contrast]:
    """Correct comparisons that are made together for their number, after Holm.

    Args:
        found: All that are made; those of cells without an item in common are not counted.
    """
    tested = {i: one.p_value for i, one in enumerate(found) if one.p_value is not None}
    adjusted = dict(zip(tested, holm(list(tested.values())), strict=True))
    return [attrs.evolve(one, p_holm=adjusted.get(i)) for i, one in enumerate(found)]


def by_facet(whole: Contrast, facet: str, *, seed: int = 0) -> list[tuple[int | str, Contrast]]:
    """The same comparison for each value of a facet.

    Args:
        whole: The comparison.
        facet: The facet, such as ``depth``.
        seed: Of the bootstrap.

    Returns:
        Value and comparison, in order of the values; nothing if no item has the facet.
    """
    a, b = whole.a.cell, whole.b.cell
    groups: dict[int | str, dict[int, Mapping[str, int | str]]] = {}
    for item, facets in _facets(a, b).items():
        if facet in facets:
            groups.setdefault(facets[facet], {})[item] = facets
    ordered = sorted(groups, key=lambda value: (isinstance(value, str), value))
    return [(value, _contrast(a, b, whole.column, groups[value], seed)) for value in ordered]


def to_json(found: Contrast) -> dict[str, Any]:
    """A comparison as plain data."""
    return {
        "column": found.column.name,
        "a": _side(found.a),
        "b": _side(found.b),
        "num_items": len(found.pairs),
        "difference": found.difference and attrs.asdict(found.difference),
        "num_above": found.num_above,
        "num_below": found.num_below,
        "num_equal": found.num_equal,
        "num_both_right": found.num_both_right,
        "num_neither_right": found.num_neither_right,
        "test": found.test,
        "p_value": found.p_value,
        "p_holm": found.p_holm,
    }


def _contrast(
    a: PooledCell,
    b: PooledCell,
    column: Column,
    asked: Mapping[int, Mapping[str, int | str]],
    seed: int,
) -> Contrast:
    """Compare two cells on some items, which come with their facets."""
    values, others = (values_of(column, _of_items(cell, asked)) for cell in (a, b))
    common = sorted(values.keys() & others.keys())
    pairs = tuple(Pair(item, values[item], others[item], asked[item]) for item in common)
    above, below = (sum(sign * pair.difference > 0 for pair in pairs) for sign in (1, -1))
    is_graded = column is ACCURACY and all({pair.a, pair.b} <= {0.0, 1.0} for pair in pairs)
    ours, theirs = (_of_items(cell, set(common)) for cell in (a, b))
    return Contrast(
        column=column,
        a=Side(a, column.estimate(ours), len(values) - len(common)),
        b=Side(b, column.estimate(theirs), len(others) - len(common)),
        pairs=pairs,
        difference=paired_difference(column, ours, theirs, seed=seed),
        test=MCNEMAR if is_graded else SIGN,
        p_value=sign_test(above, below) if pairs else None,
    )


def _facets(a: PooledCell, b: PooledCell) -> dict[int, Mapping[str, int | str]]:
    """The facets of every item that one of the cells was asked."""
    return {sample.item: sample.facets for sample in (*b.samples, *a.samples)}


def _of_items(cell: PooledCell, items: Collection[int]) -> list[Sample]:
    return [sample for sample in cell.samples if sample.item in items]


def _side(side: Side) -> dict[str, Any]:
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
