"""From a configuration to a server on a Ray cluster, until a signal stops it."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from kvpolicy.cli.stopping import stop_signals
from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.lab.executors.ray_cluster import connect, start_cluster
from kvpolicy.serve.on_ray.config import ServeConfig
from kvpolicy.serve.on_ray.options import APPLICATION, REPLICA


@contextmanager
def ray_cluster(address: str | None, *, cpus: int) -> Iterator[Any]:
    """A connection to a cluster, or a cluster on this machine that ends with the block.

    Args:
        address: ``HOST:PORT`` or ``"auto"``; ``None`` to start one.
        cpus: CPUs that are needed.

    Yields:
        The ``ray`` module.

    Raises:
        KVPolicyError: Ray is not installed, or the cluster cannot be reached.
    """
    ray = start_cluster(cpus=cpus) if address is None else connect(address)
    try:
        yield ray
    finally:
        ray.shutdown()


def serve_on(
    config: ServeConfig,
    keys: Sequence[str],
    options: Mapping[str, Mapping[str, Any]],
    *,
    host: str,
    port: int,
    is_own: bool,
    on_start: Callable[[], None],
) -> None:
    """Serve on the cluster that this process is connected to, until a signal stops it.

    An application that runs there under the same name is replaced, replica by replica.

    Args:
        config: What is served.
        keys: Keys of which clients must send one.
        options: Options of each deployment by its name.
        host: Interface that the head's HTTP proxy listens on.
        port: Its port.
        is_own: Whether the cluster ends with this process.
        on_start: Called when requests are answered.

    Raises:
        KVPolicyError: It cannot be served there.
    """
    from ray import serve

    from kvpolicy.serve.on_ray.deployment import application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    with stop_signals() as stopped:
        serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
        _check_address(host, port)
        try:
            try:
                serve.run(application(config, keys, options), name=APPLICATION, route_prefix="/")
            except RuntimeError as error:
                raise _cannot_serve(error) from error
            on_start()
            stopped.wait()
        finally:
            # Requests that run have as long as the deployments give them.
            if is_own:
                serve.shutdown()
            else:
                serve.delete(APPLICATION)


def _check_address(host: str, port: int) -> None:
    """Refuse an address that another use of Ray Serve on this cluster keeps from being used."""
    from ray.serve.context import _get_global_client

    found = _get_global_client().get_serve_details()["http_options"]
    if (found["host"], found["port"]) != (host, port):
        msg = (
            f"Ray Serve runs on this cluster already, at {found['host']} port {found['port']}; "
            "give it with --host and --port, or end it there with serve shutdown."
        )
        raise KVPolicyError(msg)


def _cannot_serve(error: RuntimeError) -> KVPolicyError:
    """The reason why replicas do not start."""
    from ray import serve

    found = serve.status().applications.get(APPLICATION)
    replicas = None if found is None else found.deployments.get(REPLICA)
    lines = [] if replicas is None else replicas.message.splitlines()
    reasons = [line.partition("KVPolicyError: ")[2] for line in lines if "KVPolicyError: " in line]
    reason = reasons[-1].strip() if reasons else error_summary(error)
    msg = (
        f"replicas cannot start: {reason}; kvpolicy, the packages of the plans' policies and the "
        "model must be there for the Python of every machine"
    )
    return KVPolicyError(msg)
