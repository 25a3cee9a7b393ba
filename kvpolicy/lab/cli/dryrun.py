"""What a comparison would do and how long it may take: told before anything is written."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvpolicy.cli.output import format_table, print_json, print_text, terminal_width

if TYPE_CHECKING:
    from kvpolicy.lab.executors.executor import Place
    from kvpolicy.lab.sweep.comparison import Comparison
    from kvpolicy.lab.sweep.estimate import Estimate
    from kvpolicy.lab.sweep.probe import Probe, Seconds


def tell(
    comparison: "Comparison", folder: Path, place: "Place", *, workers: int, json: bool
) -> None:
    """Try a few cells and tell what that means for all of them.

    Args:
        comparison: What would be run.
        folder: Where its results would go.
        place: Where it would be run.
        workers: Workers that would do it side by side.
        json: Whether to tell it to a machine.

    Raises:
        KVPolicyError: The folder is not for this run.
    """
    import attrs

    from kvpolicy.cli.output import Progress
    from kvpolicy.lab.store.store import done_keys
    from kvpolicy.lab.sweep.estimate import estimate
    from kvpolicy.lab.sweep.probe import limit_s_of, representatives
    from kvpolicy.lab.sweep.runner import jobs

    done = done_keys(folder, comparison.to_dict())
    cells = representatives(comparison, done)
    probes: list[Probe] = []
    with Progress(len(cells)) as progress:
        for cell in cells:
            progress.update(f"trying {cell.series}", len(probes))
            probes.append(place.probe(comparison, cell, limit_s_of(len(cells))))
    pieces = place.pieces(comparison, jobs(comparison, done))
    found = estimate(comparison, probes, pieces, folder=folder, workers=workers)
    if json:
        print_json(attrs.asdict(found))
    else:
        _show(found)


def _show(found: "Estimate") -> None:
    headers = ["model", "task", "seed", "cells", "samples", "left", "minutes, one worker"]
    words = [
        [
            Path(one.model).name,
            one.task,
            str(one.seed),
            str(one.cells),
            str(one.samples),
            str(one.left),
            _minutes(one.elapsed_s * (1 / 60)),
        ]
        for one in found.groups
    ]
    print_text(format_table(headers, words, right=range(2, 7), width=terminal_width()) + "\n\n")
    done = found.samples - found.left
    there = f", {done} of them done in {found.folder}" if done else f", into {found.folder}"
    print_text(f"{found.cells} cells, {found.samples} samples{there}.\n")
    side_by_side = f" with {found.workers} workers" if found.workers > 1 else ""
    print_text(
        f"About {_minutes(found.minutes)} minutes{side_by_side}. Estimated from {found.how}.\n"
    )
    for one in found.probes:
        if one.problem is not None:
            at = "" if one.budget is None else f" at {one.budget:g}"
            print_text(f"A sample of {one.series}{at} failed: {one.problem}\n")
    print_text("Nothing was written.\n")


def _minutes(time: "Seconds") -> str:
    low, high = (f"{x:.1f}" if x < 10 else f"{x:,.0f}" for x in (time.low, time.high))
    return low if low == high else f"{low} to {high}"
