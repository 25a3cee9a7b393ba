"""Choosing where work is done: on this machine, or on the workers of a Ray cluster."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kvpolicy.engine.reuse.store import PrefixStore
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
    prefix_store: Mapping[str, Any] | None = None,
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
        prefix_store: Arguments of the `PrefixStore` that each process has for itself, when it
            answers the prompts of a file; ``None``: it has none.
        info: Prints a message to the user.

    Yields:
        The executor, usable within the block.

    Raises:
        KVPolicyError: It cannot be used, or the options do not fit together.
    """
    if on == "here":
        _check_no_ray_options(address, cpus, gpus)
        store = None if prefix_store is None else PrefixStore(**prefix_store)
        yield local.LocalExecutor(models, workers, local.limit_threads(), store)
        return
    resources = WorkerResources(workers, cpus or 1, gpus)
    address = address or os.environ.get("RAY_ADDRESS")
    if prefix_store is not None:
        _check_store_of_workers(prefix_store)
    with RayExecutor(address, resources, models, prefix_store=prefix_store, info=info) as executor:
        yield executor


def _check_store_of_workers(prefix_store: Mapping[str, Any]) -> None:
    if "spill" in prefix_store:
        msg = (
            "--prefix-spill was given for workers on Ray, which cannot share a folder; remove it, "
            "or answer the prompts on this machine without --on ray."
        )
        raise KVPolicyError(msg)
    PrefixStore(**prefix_store)  # what is wrong is found before the cluster


def _check_no_ray_options(address: str | None, cpus: int | None, gpus: float | None) -> None:
    given = {"--ray-address": address, "--cpus-per-worker": cpus, "--gpus-per-worker": gpus}
    for option, value in given.items():
        if value is not None:
            msg = f"{option} applies to workers on Ray only; add --on ray, or remove it."
            raise KVPolicyError(msg)
