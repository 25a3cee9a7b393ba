"""Does one measurement rank policies as another does? Rank correlations, with intervals.

    python docs/benchmarks/ranks.py RESULTS... --reference MODEL TASK [--budgets N,...]

RESULTS are folders of ``kvpolicy ablate``. The reference is the accuracy of a model in a task, or
the first column of its metric. Every other quantity that the folders have, of any model and task,
is compared with it: accuracies of other models, or what `retention` measures.

Series are matched by label, and budgets by their order: the smallest of one setting with the
smallest of the other, so that they may be the same shares of texts of different lengths;
`--budgets` leaves out others, of whichever model. At each budget the policies are ranked twice, and
the correlation of the ranks is averaged over budgets; over all cells together, any two quantities
would agree that more rows are better. Series without a budget, such as the full cache, are left
out. A quantity that is better when it is smaller counts negatively.

Intervals are 95 % percentiles of a bootstrap over the examples: those of a setting are drawn anew
for all its series together, because they are paired. The policies and budgets are fixed: what the
interval says is how well the ranks are known of these, not how others would rank. A correlation of
five or six policies is a rough number whatever its interval.
"""

import argparse
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau, spearmanr

from kvpolicy.lab.analysis.pooling import PooledCell, columns_of, pool
from kvpolicy.lab.analysis.select import open_runs
from kvpolicy.lab.tasks.task import Column, mean_by_example

RESAMPLES = 1_000
SMALLER_IS_BETTER = frozenset({"output_error", "nll", "perplexity"})
MIN_SERIES = 3  # of two, ranks say only which is the better one

Means = NDArray[np.float64]


@attrs.frozen(eq=False)
class Quantity:
    """One column of a model and a task, with the values of all examples.

    Attributes:
        model: The model.
        task: The task.
        column: Name of the column.
        series: Labels of the policies.
        values: By budget, from the smallest: ``[S, N]``, one row for each series.
    """

    model: str
    task: str
    column: str
    series: tuple[str, ...]
    values: tuple[NDArray[np.float64], ...]

    @property
    def sign(self) -> int:
        """-1 if smaller is better."""
        return -1 if self.column in SMALLER_IS_BETTER else 1

    def of(self, series: Sequence[str]) -> list[NDArray[np.float64]]:
        """The values of some series, in this order."""
        rows = [self.series.index(one) for one in series]
        return [values[rows] for values in self.values]


@attrs.frozen
class Correlation:
    """How alike two quantities rank policies.

    Attributes:
        quantity: What is compared with the reference.
        num_series: Policies that both have.
        kendall: Kendall's tau-b, the mean over budgets, and the ends of its interval.
        spearman: Spearman's rho, likewise.
    """

    quantity: Quantity
    num_series: int
    kendall: tuple[float, float, float]
    spearman: tuple[float, float, float]


def quantities_of(cells: Sequence[PooledCell]) -> list[Quantity]:
    """Every column of every model and task; examples that a cell lacks are left out for all."""
    settings: dict[tuple[str, str], list[PooledCell]] = {}
    for cell in cells:
        if cell.budget is not None and cell.samples:
            settings.setdefault((cell.group.model, cell.group.task), []).append(cell)
    return [
        quantity
        for (model, task), own in settings.items()
        for column in columns_of(own[0].group)
        if (quantity := _quantity(model, task, own, column)) is not None
    ]


def _quantity(
    model: str, task: str, cells: Sequence[PooledCell], column: Column
) -> Quantity | None:
    budgets = sorted({cell.budget for cell in cells if cell.budget is not None})
    found = {
        (cell.series, cell.budget): mean_by_example(cell.samples, column.value) for cell in cells
    }
    # A series that lacks a budget cannot be ranked there.
    series = [
        one
        for one in dict.fromkeys(cell.series for cell in cells)
        if all((one, budget) in found for budget in budgets)
    ]
    whole = [found[one, budget] for one in series for budget in budgets]
    items = sorted(set.intersection(*map(set, whole))) if whole else []
    if not items:
        return None
    values = tuple(
        np.array([[found[one, budget][item] for item in items] for one in series])
        for budget in budgets
    )
    return Quantity(model, task, column.name, tuple(series), values)


def correlations(
    cells: Sequence[PooledCell], model: str, task: str, *, seed: int = 0
) -> Iterator[Correlation]:
    """Compare every quantity with the first one of a model and a task.

    Args:
        cells: Cells of all runs.
        model: Model of the reference.
        task: Its task.
        seed: Random seed of the bootstrap.

    Raises:
        SystemExit: There is no such reference.
    """
    found = quantities_of(cells)
    reference = next((one for one in found if (one.model, one.task) == (model, task)), None)
    if reference is None:
        names = ", ".join(dict.fromkeys(f"{one.model} {one.task}" for one in found))
        msg = f"no results are of '{model} {task}'; the folders have: {names}"
        raise SystemExit(msg)
    for one in found:
        common = [name for name in reference.series if name in one.series]
        is_same = len(one.values) == len(reference.values)
        if one is not reference and is_same and len(common) >= MIN_SERIES:
            yield correlate(reference, one, common, seed=seed)


def correlate(
    reference: Quantity, other: Quantity, series: Sequence[str], *, seed: int = 0
) -> Correlation:
    """Correlate the ranks of some series in two quantities of the same number of budgets."""
    rng = np.random.default_rng(seed)
    pairs = list(zip(reference.of(series), other.of(series), strict=True))
    sign = reference.sign * other.sign
    found = _mean_correlations([(a.mean(1), sign * b.mean(1)) for a, b in pairs])
    drawn = []
    for _ in range(RESAMPLES):
        # The same examples at every budget and for every series: they are paired.
        picks = [rng.integers(values.shape[1], size=values.shape[1]) for values in pairs[0]]
        drawn.append(
            _mean_correlations(
                [(a[:, picks[0]].mean(1), sign * b[:, picks[1]].mean(1)) for a, b in pairs]
            )
        )
    ends = np.nanquantile(np.array(drawn), [0.025, 0.975], axis=0)
    kendall, spearman = (
        (found[which], float(ends[0, which]), float(ends[1, which])) for which in (0, 1)
    )
    return Correlation(other, len(series), kendall, spearman)


def _mean_correlations(means: Sequence[tuple[Means, Means]]) -> tuple[float, float]:
    """Kendall's and Spearman's, averaged over budgets; without those where a side is all ties."""
    told = [(a, b) for a, b in means if np.ptp(a) > 0 and np.ptp(b) > 0]
    if not told:
        return float("nan"), float("nan")
    taus = [float(kendalltau(a, b).statistic) for a, b in told]
    rhos = [float(spearmanr(a, b).statistic) for a, b in told]
    return float(np.mean(taus)), float(np.mean(rhos))


def print_table(found: Sequence[Correlation]) -> None:
    """Print one row for each quantity."""
    print("| model | task | quantity | policies | budgets | examples | Kendall | Spearman |")
    print("|---|---|---|--:|--:|--:|--:|--:|")
    for one in found:
        quantity = one.quantity
        cells: list[Any] = [quantity.model, quantity.task, quantity.column, one.num_series]
        cells += [len(quantity.values), quantity.values[0].shape[1]]
        cells += ["{:+.2f} ({:+.2f} {:+.2f})".format(*both) for both in (one.kendall, one.spearman)]
        print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="+", help="folders of sweeps")
    parser.add_argument(
        "--reference", nargs=2, required=True, metavar=("MODEL", "TASK"), help="what ranks"
    )
    parser.add_argument(
        "--budgets", type=lambda text: set(map(float, text.split(","))), help="only these"
    )
    given = parser.parse_args()
    print_table(list(correlations(read(given.results, given.budgets), *given.reference)))


def read(results: Sequence[str], budgets: Collection[float] | None = None) -> list[PooledCell]:
    """The cells of some folders, or those of some budgets."""
    return pool(
        open_runs(results, warn=print), lambda _, cell: not budgets or cell.budget in budgets
    )


if __name__ == "__main__":
    main()
