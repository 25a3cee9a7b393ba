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


def describe_session(command: list[str], *, workers: int) -> dict[str, Any]:
    """Describe this process.

    Args:
        command: Words of the command line.
        workers: Processes that run cells side by side.

    Returns:
        Plain data for a manifest: ``started`` (UTC), ``command``, ``versions``, ``workers``,
        ``threads`` of each, ``cpus`` and ``device`` of the machine.
    """
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(command),
        "versions": versions(),
        "workers": workers,
        "threads": torch.get_num_threads(),
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
