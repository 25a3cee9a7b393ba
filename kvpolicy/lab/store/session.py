"""Describe a session: when, how, with which versions and on which machine a run is worked on."""

import os
import platform
import shlex
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import kvpolicy

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "numba", "triton")


def describe_session(
    command: list[str],
    *,
    workers: int,
    record: int = 0,
    machine: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Describe the session that begins now.

    Args:
        command: Arguments of the command line.
        workers: Number of workers.
        record: Items of each cell whose kept rows are recorded.
        machine: What `describe_machine` returned on a worker's machine; this process if not
            given.

    Returns:
        Plain data for a manifest: ``started`` (UTC), ``command``, ``workers``, ``record``, and
        the entries of `describe_machine`.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "workers": workers,
        "record": record,
        **(machine or describe_machine(threads=torch.get_num_threads())),
    }


def describe_machine(*, threads: int) -> dict[str, Any]:
    """Describe the machine and the packages that a worker computes with.

    Args:
        threads: Threads of the worker.

    Returns:
        Plain data: ``versions``, ``threads``, ``cpus`` and ``device``.
    """
    return {
        "versions": versions(),
        "threads": threads,
        "cpus": num_cpus(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that results depend on."""
    found = {"python": platform.python_version(), "kvpolicy": kvpolicy.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def num_cpus() -> int:
    """Processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
