"""Tables and figure of related.md, from the results of its runs.

    python docs/benchmarks/related.py tables RESULTS... [--epicache EPICACHE.json]
    python docs/benchmarks/related.py figure RESULTS... --output FILE.png

RESULTS are folders of ``kvpolicy ablate``; EPICACHE.json is what ``kvpolicy epicache evaluate
--json`` printed.

`tables`: what every series reached, and each system minus what it builds on, paired by problem as
by ``kvpolicy results compare``. P-values are corrected by Holm for all comparisons of all runs
given together; a difference is in bold where p is below 0.05 after that. For accuracies that
are not significant, the last table says how many problems show a difference of five points.
`figure`: the same differences with their intervals, one column for each setting.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.lab.analysis.compare import MCNEMAR, CellComparison, compare_cells
from kvpolicy.lab.analysis.pooling import PooledCell, column_of, columns_of, pool
from kvpolicy.lab.analysis.select import open_runs
from kvpolicy.lab.statistics import Interval, bootstrap_mean, holm, sign_test

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kvpolicy.lab.figure import LegendContent

SIGNIFICANT = 0.05
POWER, DIFFERENCE = 0.8, 0.05  # the difference that is to be seen, and how probably

# A system, and what it builds on or is compared with in its paper. A setting that lacks one of the
# two has no such row.
PAIRS = (
    ("TRIM-KV", "H2O"),
    ("TRIM-KV", "R-KV"),
    ("TRIM-KV", "SnapKV"),
    ("TRIM-KV, heads share", "TRIM-KV"),
    ("LAQ", "SnapKV"),
    ("LAQ++", "SnapKV"),
    ("OBCache V, window", "SnapKV"),
    ("OBCache K, window", "SnapKV"),
    ("OBCache V+K, window", "SnapKV"),
    ("OBCache V, sums", "H2O"),
    ("OBCache K, sums", "H2O"),
    ("OBCache V+K, sums", "H2O"),
    ("H2O + CAOTE", "H2O"),
    ("H2O + FastCAOTE", "H2O"),
    ("SnapKV + CAOTE", "SnapKV"),
    ("TOVA + CAOTE", "TOVA"),
    ("SnapKV + Ada-KV", "SnapKV"),
    ("H2O + Ada-KV", "H2O"),
    ("H2O + CAOTE + Ada-KV", "H2O"),
    ("EpiCache, one cache", "SnapKV"),
    ("H2O + layer_sensitivity", "H2O"),
    ("H2O + layer_sensitivity, exponent 2", "H2O"),
    ("KeyDiff", "SnapKV"),
    ("ExpectedAttention", "SnapKV"),
    ("LazyEviction", "H2O"),
    ("LazyEviction", "R-KV"),
)


@attrs.frozen
class Difference:
    """One comparison of the page.

    Attributes:
        setting: Model and task, and the quantity.
        system: What is compared.
        base: What is subtracted.
        interval: The difference.
        p_value: Of the exact sign test.
        is_share: Whether the difference is in points of a percentage.
        p_holm: The p-value corrected for all comparisons of the page.
    """

    setting: str
    system: str
    base: str
    interval: Interval
    p_value: float
    is_share: bool
    p_holm: float = 1.0

    @property
    def is_significant(self) -> bool:
        """Whether it is below 5 % after Holm's correction."""
        return self.p_holm < SIGNIFICANT

    def text(self) -> str:
        """The difference with its interval, in bold if it is significant."""
        values = attrs.astuple(self.interval)
        form = "{:+.3f} ({:+.3f} {:+.3f})"
        if self.is_share:
            form, values = "{:+.1f} ({:+.1f} {:+.1f})", tuple(100 * value for value in values)
        told = form.format(*values)
        return f"**{told}**" if self.is_significant else told


def settings_of(cells: Sequence[PooledCell]) -> dict[str, list[PooledCell]]:
    """The cells by model, task and budget, as headings."""
    found: dict[str, list[PooledCell]] = {}
    budgets = {_place(cell): cell.budget for cell in cells if cell.budget is not None}
    for cell in cells:
        if cell.samples:
            budget = budgets.get(_place(cell))
            found.setdefault(" ".join(_place(cell)) + f", {budget:g} rows", []).append(cell)
    return found


def comparisons(cells: Sequence[PooledCell]) -> Iterator[tuple[str, CellComparison]]:
    """Every pair of `PAIRS` in every setting and column, with the heading of both."""
    for setting, own in settings_of(cells).items():
        by_series = {cell.series: cell for cell in own}
        for column in columns_of(own[0].group):
            for system, base in PAIRS:
                if system in by_series and base in by_series:
                    found = compare_cells(by_series[system], by_series[base], column)
                    yield f"{setting}: {column.name}", found


def differences(cells: Sequence[PooledCell], epicache: Path | None) -> list[Difference]:
    """All differences of the page, corrected together."""
    found = [
        Difference(
            setting,
            one.a.cell.series,
            one.b.cell.series,
            one.difference,
            one.p_value,
            one.column.is_share,
        )
        for setting, one in comparisons(cells)
        if one.difference is not None and one.p_value is not None
    ]
    if epicache is not None:
        found += of_epicache(json.loads(epicache.read_text(encoding="utf-8")))
    adjusted = holm([one.p_value for one in found])
    return [attrs.evolve(one, p_holm=p) for one, p in zip(found, adjusted, strict=True)]


def of_epicache(figures: dict[str, Any]) -> Iterator[Difference]:
    """One cache for each topic minus the others; a pair is a conversation."""
    shares = {
        name: [sum(answers) / len(answers) for answers in conversations]
        for name, conversations in figures["answers"].items()
    }
    (name, first), *others = shares.items()
    for other, values in others:
        each = [a - b for a, b in zip(first, values, strict=True)]
        p_value = sign_test(sum(one > 0 for one in each), sum(one < 0 for one in each))
        setting = f"{figures['task']}, {figures['conversations']} conversations"
        yield Difference(setting, name, other, bootstrap_mean(each), p_value, is_share=True)


def print_tables(cells: Sequence[PooledCell], epicache: Path | None) -> None:
    """Print values, differences and the problems that five points need."""
    found = differences(cells, epicache)
    print(f"{len(found)} comparisons, {sum(one.is_significant for one in found)} significant")
    values = {
        (cell.series, f"{setting}: {column.name}"): _value(cell, column.name)
        for setting, own in settings_of(cells).items()
        for cell in own
        for column in columns_of(cell.group)
    }
    told = {(f"{one.system} - {one.base}", one.setting): one.text() for one in found}
    for accuracy in (True, False):
        for title, table in (("series", values), ("difference", told)):
            _print_table(title, {k: v for k, v in table.items() if _is_accuracy(k[1]) == accuracy})
    print_problems_needed(cells, found)


def _print_table(title: str, table: dict[tuple[str, str], str]) -> None:
    """Print texts by row and column, with an empty cell where there is none."""
    columns = list(dict.fromkeys(column for _, column in table))
    print(f"\n| {title} | " + " | ".join(columns) + " |\n|---" + "|--:" * len(columns) + "|")
    for row in dict.fromkeys(row for row, _ in table):
        print(f"| {row} | " + " | ".join(table.get((row, one), "") for one in columns) + " |")


def _is_accuracy(setting: str) -> bool:
    return setting.endswith((": accuracy", " conversations"))


def print_problems_needed(cells: Sequence[PooledCell], found: Sequence[Difference]) -> None:
    """Print how many problems show five points in the comparisons that are not significant.

    From the share of problems on which the two series differ, at the level of Holm's next step.
    """
    unsure = {(one.setting, one.system, one.base) for one in found if not one.is_significant}
    normal = NormalDist()
    quantiles = normal.inv_cdf(1 - SIGNIFICANT / 2 / len(unsure)) + normal.inv_cdf(POWER)
    print("\n| setting | problems | undecided comparisons differ on | problems for five points |")
    print("|---|--:|--:|--:|")
    for setting, some in groupby(comparisons(cells), key=lambda one: one[0]):
        graded = [
            one
            for _, one in some
            if one.test == MCNEMAR and (setting, one.a.cell.series, one.b.cell.series) in unsure
        ]
        if graded:
            share = max(len(one.differing) / len(one.pairs) for one in graded)
            needed = math.ceil(quantiles**2 * share / DIFFERENCE**2)
            num = len(graded[0].pairs)
            print(f"| {setting} | {num} | at most {share:.0%} | at most {needed:,} |")


def save_differences(cells: Sequence[PooledCell], path: Path, epicache: Path | None) -> None:
    """Draw the differences of accuracies and of retained attention, one column for a setting."""
    from kvpolicy.lab.figure import FAINT, LegendContent, Size, legend_entry, save_figure
    from kvpolicy.lab.looks import COLOURS, MARKERS, Look

    found = [one for one in differences(cells, epicache) if _is_drawn(one)]
    settings = list(dict.fromkeys(one.setting for one in found))
    rows = [pair for pair in PAIRS if any((one.system, one.base) == pair for one in found)]
    looks = {True: Look("blue", MARKERS[0], ()), False: Look("grey", MARKERS[1], ())}

    def draw(figure: "Figure") -> "LegendContent":
        columns = figure.subplots(1, len(settings), sharey=True, squeeze=False)[0]
        for axes, setting in zip(columns, settings, strict=True):
            axes.axvline(0, color=FAINT, linewidth=0.8)
            for one in found:
                if one.setting == setting:
                    low, high = one.interval.low, one.interval.high
                    axes.errorbar(
                        100 * one.interval.value,
                        rows.index((one.system, one.base)),
                        xerr=[
                            [100 * (one.interval.value - low)],
                            [100 * (high - one.interval.value)],
                        ],
                        fmt=looks[one.is_significant].marker,
                        color=COLOURS[looks[one.is_significant].colour].light,
                        markersize=4,
                    )
            task, column = _parts(setting)
            axes.set_title(task, fontsize="medium")
            axes.set_xlabel(f"{column.replace('_', ' ')}, points")
            axes.grid(visible=True)
        columns[0].set_yticks(range(len(rows)), [f"{one} - {other}" for one, other in rows])
        columns[0].invert_yaxis()
        labels = {True: "significant after Holm's correction", False: "not significant"}
        return LegendContent(
            [(labels[which], legend_entry(look, linestyle="none")) for which, look in looks.items()]
        )

    save_figure([path], Size(3.4 + 1.75 * len(settings), 0.26 * len(rows) + 1.6, 9.0, 110), draw)


def _is_drawn(one: Difference) -> bool:
    return one.setting.endswith((": accuracy", ": retained_attention"))


def _parts(setting: str) -> tuple[str, str]:
    """Task, without ``retention:of=``, and column of a heading."""
    place, column = setting.rsplit(": ", 1)
    return place.split(", ")[0].split(" ")[1].removeprefix("retention:of="), column


def _place(cell: PooledCell) -> tuple[str, str]:
    return cell.group.model, cell.group.task


def _value(cell: PooledCell, name: str) -> str:
    column = column_of(cell.group, name)
    found = column.estimate(cell.samples)
    if found is None:
        return ""
    values = attrs.astuple(found)
    if column.is_share:
        return "{:.1f} % ({:.1f}-{:.1f})".format(*(100 * value for value in values))
    return "{:.3f} ({:.3f}-{:.3f})".format(*values)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["tables", "figure"])
    parser.add_argument("results", nargs="+", help="folders of ablations")
    parser.add_argument("--epicache", type=Path, help="JSON of `kvpolicy epicache evaluate`")
    parser.add_argument("--output", type=Path, default=Path("related.png"), help="the figure")
    given = parser.parse_args()
    cells = pool(open_runs(given.results, warn=print))
    if given.what == "figure":
        save_differences(cells, given.output, given.epicache)
    else:
        print_tables(cells, given.epicache)


if __name__ == "__main__":
    main()
