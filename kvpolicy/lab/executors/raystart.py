"""Reaching a Ray cluster, or starting one on this machine."""

import importlib
import importlib.util
import logging
import os
import secrets
import socket
from typing import Any

from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.lab.store.session import num_cpus

_OBJECT_STORE_BYTES = 200_000_000  # of a cluster of our own: nothing large goes through it
_KNOCK_S = 10.0
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def start(*, cpus: int) -> Any:
    """Start a cluster of this machine alone, which ends with `ray.shutdown`.

    Args:
        cpus: Processors it is to say it has, if there are not as many.

    Returns:
        The module ``ray``, connected.

    Raises:
        KVPolicyError: Ray is not installed.
    """
    ray = _import_ray(is_ours=True)
    _init(
        ray,
        address="local",
        num_cpus=max(num_cpus(), cpus),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    return ray


def connect(address: str) -> Any:
    """Connect to a cluster that this machine is part of.

    Args:
        address: ``HOST:PORT`` of its head, or ``"auto"``.

    Returns:
        The module ``ray``, connected.

    Raises:
        KVPolicyError: Ray is not installed, or the cluster cannot be reached.
    """
    if "://" in address:
        msg = (
            f"Ray address '{address}' is one of Ray Client, through which results cannot "
            "stream; run the command on a machine of the cluster, with its HOST:PORT or auto."
        )
        raise KVPolicyError(msg)
    ray = _import_ray(is_ours=False)
    try:
        if address != "auto":
            _knock(address)
        _init(ray, address=address)
    except Exception as error:
        msg = (
            f"no Ray cluster answers at '{address}' ({error_summary(error)}); on a machine that "
            "`ray start` made part of it, give its HOST:PORT or auto."
        )
        raise KVPolicyError(msg) from error
    return ray


def _knock(address: str) -> None:
    """Find out whether anybody is there; Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        msg = "it is not HOST:PORT"
        raise ValueError(msg)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_S).close()


def _import_ray(*, is_ours: bool) -> Any:
    if importlib.util.find_spec("ray") is None:
        msg = "Ray is not installed; `pip install 'kvpolicy[ray]'` brings it along."
        raise KVPolicyError(msg)
    # Both are read once, and by every process of a cluster that is started.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_ours and not any(name in os.environ for name in _AUTH):
        # Others on this machine or network could run code in a cluster that asks nobody.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    return importlib.import_module("ray")


def _init(ray: Any, **options: Any) -> None:
    """Connect, and keep what Ray prints out of our output: its logs have it all the same."""
    # Messages of a cluster, such as a node's last words, are written to stdout, log_to_driver
    # or not; this is how Ray's own debugger silences them.
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
