"""Options that say where cells are run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from kvpolicy.cli.output import info
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.lab.executors.executor import Place
    from kvpolicy.lab.models import ModelCache


class Where(Enum):
    """Where cells are run."""

    here = "here"
    ray = "ray"


On = Annotated[Where, typer.Option(help="Run on this machine, or on a Ray cluster.")]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help="The cluster. [default: RAY_ADDRESS, or one that is started on this machine]",
    ),
]
CpusPerWorker = Annotated[
    int | None, typer.Option(min=1, help="Processors and threads of a worker on Ray. [default: 1]")
]
GpusPerWorker = Annotated[
    float | None,
    typer.Option(min=0, help="GPUs of a worker on Ray. [default: 1 where there are any]"),
]


@contextmanager
def open_executor(
    where: Where,
    shelf: "ModelCache",
    *,
    address: str | None,
    workers: int | None,
    cpus: int | None,
    gpus: float | None,
) -> "Iterator[Place]":
    """Make ready where cells are run.

    Args:
        where: What ``--on`` says.
        shelf: How models are opened.
        address: ``--ray-address``.
        workers: ``--workers``.
        cpus: ``--cpus-per-worker``.
        gpus: ``--gpus-per-worker``.

    Yields:
        The place, for as long as the block lasts.

    Raises:
        KVPolicyError: It cannot be used, or options do not fit together.
    """
    # Imported here: this brings torch along.
    from kvpolicy.lab.executors.executor import Here, RayExecutor

    if where is Where.here:
        _check_all_is_for_here(address, cpus, gpus)
        from kvpolicy.lab.executors.processes import stay_forkable

        yield Here(shelf, workers, stay_forkable())
        return
    from kvpolicy.lab.executors.raycluster import RayCluster
    from kvpolicy.lab.executors.room import Room

    room = Room(workers, cpus or 1, gpus)
    with RayCluster(address or os.environ.get("RAY_ADDRESS"), room, shelf, tell=info) as cluster:
        yield RayExecutor(cluster)


def _check_all_is_for_here(address: str | None, cpus: int | None, gpus: float | None) -> None:
    given = {"--ray-address": address, "--cpus-per-worker": cpus, "--gpus-per-worker": gpus}
    for option, value in given.items():
        if value is not None:
            msg = f"{option} is about workers on Ray; give --on ray as well, or leave it out."
            raise KVPolicyError(msg)
