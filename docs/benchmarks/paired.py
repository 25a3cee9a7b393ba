"""Differences between two series of an ablation at every budget, paired by problem.

    kvpolicy ablate --preset merge --output RESULTS
    python docs/benchmarks/paired.py RESULTS "H2O + merge" "H2O"

For each pair of series, prints the first minus the second: accuracy in points and length in
tokens, with normal 95 % intervals. A series with one budget only is compared at that budget.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvpolicy.lab.statistics import Interval, mean

Samples = dict[int, dict[str, Any]]  # by item


def read(folder: Path) -> dict[str, dict[float | None, Samples]]:
    """The samples of a results folder, by series and budget."""
    found: dict[str, dict[float | None, Samples]] = defaultdict(lambda: defaultdict(dict))
    for line in (folder / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        found[sample["series"]][sample["budget"]][sample["item"]] = sample
    return found


def difference(one: Samples, other: Samples, field: str) -> Interval:
    """Mean difference of a field over the items that both series have."""
    items = sorted(one.keys() & other.keys())
    return mean([float(one[i][field]) - float(other[i][field]) for i in items])


def main() -> None:
    """Read the command line, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("series", nargs="+", help="pairs: ONE OTHER ONE OTHER ...")
    given = parser.parse_args()
    found = read(given.results)
    print("| difference | budget | accuracy | length |\n|---|--:|--:|--:|")
    for one, other in zip(given.series[::2], given.series[1::2], strict=True):
        for budget, samples in found[one].items():
            rivals = found[other]
            rival = rivals[budget] if budget in rivals else next(iter(rivals.values()))
            accuracy = difference(samples, rival, "correct")
            length = difference(samples, rival, "num_tokens")
            points = "{:+.1f} ({:+.1f} {:+.1f})".format(
                *(100 * x for x in (accuracy.value, accuracy.low, accuracy.high))
            )
            tokens = f"{length.value:+.0f} ({length.low:+.0f} {length.high:+.0f})"
            print(f"| {one} - {other} | {budget:.0f} | {points} | {tokens} |")


if __name__ == "__main__":
    main()
