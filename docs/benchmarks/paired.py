"""Differences between two lines of a comparison, paired by problem, at every budget.

    kvpolicy ablate --preset merge --output RESULTS
    python docs/benchmarks/paired.py RESULTS "H2O + merge" "H2O"

Of each pair of series, the first less the second: accuracy in points, and length in tokens, with
normal 95 % intervals. Series that have one budget each are compared as they are.
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
    """Of what both have done."""
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
            right = difference(samples, rival, "correct")
            length = difference(samples, rival, "num_tokens")
            points = "{:+.1f} ({:+.1f} {:+.1f})".format(
                *(100 * x for x in (right.value, right.low, right.high))
            )
            tokens = f"{length.value:+.0f} ({length.low:+.0f} {length.high:+.0f})"
            print(f"| {one} - {other} | {budget:.0f} | {points} | {tokens} |")


if __name__ == "__main__":
    main()
