"""Clusters of Ray: connecting to one, or starting one on this machine."""

import importlib
import importlib.util
import logging
import os
import secrets
import socket
from typing import Any

from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.extras import install_extra
from kvpolicy.lab.store.session import num_cpus

_CONNECT_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 200_000_000  # of a cluster that is started here: no large objects
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def start_cluster(*, cpus: int) -> Any:
    """Start a cluster on this machine, which ends with `ray.shutdown`; return the ``ray`` module.

    Args:
        cpus: CPUs to announce, if the machine has fewer.

    Raises:
        KVPolicyError: Ray is not installed.
    """
    ray = _import_ray(is_own_cluster=True)
    _init(
        ray,
        address="local",
        num_cpus=max(num_cpus(), cpus),
        include_dashboard=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    return ray


def connect(address: str) -> Any:
    """Connect to the cluster of this machine; return the ``ray`` module.

    Args:
        address: ``HOST:PORT`` of the cluster's head, or ``"auto"`` for the cluster that this
            machine is part of.

    Raises:
        KVPolicyError: Ray is not installed, or the cluster cannot be reached.
    """
    if "://" in address:
        msg = (
            f"Ray address '{address}' is for Ray Client, which cannot stream results; run the "
            "command on a machine of the cluster, with its HOST:PORT or auto."
        )
        raise KVPolicyError(msg)
    ray = _import_ray(is_own_cluster=False)
    try:
        if address != "auto":
            _check_port(address)
        _init(ray, address=address)
    except Exception as error:
        msg = (
            f"no Ray cluster answers at '{address}' ({error_summary(error)}); on a machine that "
            "`ray start` made part of it, give its HOST:PORT or auto."
        )
        raise KVPolicyError(msg) from error
    return ray


def _check_port(address: str) -> None:
    """Fail early if nothing listens; Ray itself would try for a quarter of an hour."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        msg = "it is not HOST:PORT"
        raise ValueError(msg)
    socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()


def _import_ray(*, is_own_cluster: bool) -> Any:
    if importlib.util.find_spec("ray") is None:
        msg = f"Ray is not installed; run `{install_extra('ray')}`."
        raise KVPolicyError(msg)
    # Ray reads these once, in every process of a cluster that it starts.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if is_own_cluster and not any(name in os.environ for name in _AUTH):
        # Without a token, anyone who reaches the cluster could run code in it.
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))
    return importlib.import_module("ray")


def _init(ray: Any, **options: Any) -> None:
    """Connect, and keep Ray's messages out of stdout; they stay in Ray's logs."""
    # Ray prints messages of the cluster to stdout even with log_to_driver=False; its own
    # debugger silences them in this way.
    worker: Any = importlib.import_module("ray._private.worker")
    worker._worker_logs_enabled = False
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **options)
