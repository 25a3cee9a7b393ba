"""When, how and with what a run was worked on: the part of a manifest that may change."""

import os
import platform
import shlex
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import kvpolicy

_PACKAGES = ("torch", "transformers", "tokenizers", "numpy")


def describe_session(
    command: list[str], *, workers: int, machine: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Describe the work that begins now.

    Args:
        command: Words of the command line.
        workers: Workers side by side.
        machine: What each of them computes with, as `describe_machine` tells it where it is;
            this process as it is now if not given.

    Returns:
        Plain data for a manifest: ``started`` (UTC), ``command``, ``workers``, and what
        `describe_machine` has.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "workers": workers,
        **(machine or describe_machine(threads=torch.get_num_threads())),
    }


def describe_machine(*, threads: int) -> dict[str, Any]:
    """Describe what a worker on this machine computes with.

    Args:
        threads: Its threads.

    Returns:
        Plain data: ``versions``, ``threads``, and ``cpus`` and ``device`` of the machine.
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
