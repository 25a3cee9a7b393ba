"""Running a comparison in front of a user: what is there, how far it is, what is kept."""

import sys
from typing import TYPE_CHECKING

from kvpolicy.cli.app import Interrupted
from kvpolicy.cli.output import info

if TYPE_CHECKING:
    from kvpolicy.lab.executors.executor import Place
    from kvpolicy.lab.store.store import Store
    from kvpolicy.lab.sweep.comparison import Comparison
    from kvpolicy.lab.sweep.jobs import Pool


def follow(comparison: "Comparison", store: "Store", place: "Place", *, workers: int) -> None:
    """Do what is left of a comparison, and tell about it on stderr.

    Args:
        comparison: What is run.
        store: What is done, and where it is kept.
        place: Where it is done.
        workers: How many do it side by side.

    Raises:
        Interrupted: By Ctrl-C; says what is kept.
    """
    from kvpolicy.lab.store.session import describe_session

    try:
        num_left = comparison.num_left(store.samples)
        if num_left:
            command, machine = ["kvpolicy", *sys.argv[1:]], place.machine(comparison)
            store.begin(describe_session(command, workers=workers, machine=machine))
        for note in store.notes:
            info(note)
        _say_what_is_done(comparison, store, num_left)
        if num_left:
            _do(comparison, store, place.pool(comparison))
    except KeyboardInterrupt:
        num_done = comparison.num_samples - comparison.num_left(store.samples)
        msg = (
            f"interrupted; {num_done} of {comparison.num_samples} samples are kept in "
            f"{store.folder}, and the same command goes on from there."
        )
        raise Interrupted(msg) from None


def _say_what_is_done(comparison: "Comparison", store: "Store", num_left: int) -> None:
    total = comparison.num_samples
    if not num_left:
        info(f"all {total} samples are in {store.folder} already; nothing is computed again.")
    elif num_left < total:
        info(f"going on in {store.folder}: {total - num_left} of {total} samples are there.")
    else:
        info(f"{len(comparison.cells)} cells, {total} samples, into {store.folder}.")
    unrecorded = comparison.num_unrecorded(store.samples, store.recorded)
    if unrecorded:
        info(
            f"{unrecorded} samples of --record {comparison.record} were done without a record of "
            "what was kept, and have none; another --output makes them anew."
        )


def _do(comparison: "Comparison", store: "Store", pool: "Pool") -> None:
    from kvpolicy.cli.output import Progress
    from kvpolicy.lab.cli.tally import Tally
    from kvpolicy.lab.sweep.runner import run

    tally = Tally(comparison, store)
    with Progress(comparison.num_samples, tally.num_done) as progress:
        for event in run(comparison, store, pool):
            tally.count(event)
            line = tally.cell_line(event)
            if line:
                progress.log(line)
            progress.update(tally.state_line(), tally.num_done)
