"""Choosing where work is done: on this machine, or on the workers of a Ray cluster."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors import local
from kvpolicy.lab.executors.ray import RayExecutor, WorkerResources
from kvpolicy.lab.models import ModelCache

Answerer = local.LocalExecutor | RayExecutor  # answers files of prompts


@contextmanager
def open_executor(
    on: str,
    models: ModelCache,
    *,
    address: str | None = None,
    workers: int | None = None,
    cpus: int | None = None,
    gpus: float | None = None,
    info: Callable[[str], None] = lambda _: None,
) -> Iterator[Answerer]:
    """Open the executor that the command line describes.

    Args:
        on: ``"here"`` or ``"ray"``.
        models: How models are loaded.
        address: ``--ray-address``; the environment's ``RAY_ADDRESS`` if not given.
        workers: ``--workers``.
        cpus: ``--cpus-per-worker``.
        gpus: ``--gpus-per-worker``.
        info: Prints a message to the user.

    Yields:
        The executor, usable within the block.

    Raises:
        KVPolicyError: It cannot be used, or the options do not fit together.
    """
    if on == "here":
        _check_no_ray_options(address, cpus, gpus)
        yield local.LocalExecutor(models, workers, local.limit_threads())
        return
    resources = WorkerResources(workers, cpus or 1, gpus)
    address = address or os.environ.get("RAY_ADDRESS")
    with RayExecutor(address, resources, models, info=info) as executor:
        yield executor


def _check_no_ray_options(address: str | None, cpus: int | None, gpus: float | None) -> None:
    given = {"--ray-address": address, "--cpus-per-worker": cpus, "--gpus-per-worker": gpus}
    for option, value in given.items():
        if value is not None:
            msg = f"{option} applies to workers on Ray only; add --on ray, or remove it."
            raise KVPolicyError(msg)
