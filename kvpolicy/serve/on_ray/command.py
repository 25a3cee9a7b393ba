"""What ``kvpolicy serve`` does with a Ray cluster: serve on it, or write a deployment file."""

import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.cli.output import info, print_lines
from kvpolicy.errors import KVPolicyError
from kvpolicy.extras import install_extra
from kvpolicy.files import atomic_write
from kvpolicy.lab.executors.process_setup import ProcessSetup
from kvpolicy.lab.executors.ray import WorkerResources
from kvpolicy.plan.plan import Plan
from kvpolicy.serve.on_ray.config import ServeConfig, plan_data
from kvpolicy.serve.settings import KEYS, ServerSettings


@attrs.frozen
class RayOptions:
    """Options of the command for Ray.

    Attributes:
        address: ``--ray-address``.
        replicas: ``--replicas``.
        max_replicas: ``--max-replicas``.
        requests: ``--requests-per-replica``.
        cpus: ``--cpus-per-replica``.
        gpus: ``--gpus-per-replica``.
    """

    address: str | None
    replicas: int
    max_replicas: int | None
    requests: int | None
    cpus: int
    gpus: float | None


def serve_on_ray(
    names: Sequence[str],
    model: str,
    loading: Mapping[str, Any],
    plans: Mapping[str, Plan],
    engine: Mapping[str, Any],
    settings: ServerSettings,
    ray: RayOptions,
    *,
    prefix_store: Mapping[str, Any] | None,
    host: str,
    port: int,
    json_logs: bool,
    output: Path | None,
) -> None:
    """Serve on a Ray cluster until a signal comes, or write a deployment file.

    Args:
        names: What clients call the model.
        model: Its name, hub id or folder.
        loading: Further arguments of `load_model`.
        plans: The plans by their names.
        engine: Further arguments of `served_model`.
        settings: What clients may ask for.
        ray: Options for Ray.
        prefix_store: Arguments of the `PrefixStore` of each replica; ``None``: it has none.
        host: Interface to listen on.
        port: The port; 0: a free one.
        json_logs: Whether lines of the log are JSON.
        output: The file to write; ``None``: serve.

    Raises:
        KVPolicyError: Ray Serve is not installed, or it cannot be served there.
    """
    slots = engine["slots"] * len(plans)
    config = ServeConfig(
        names[0],
        model,
        dict(loading),
        {plan_name: plan_data(plan) for plan_name, plan in plans.items()},
        dict(engine),
        attrs.evolve(settings, api_keys=()),
        needs_key=bool(settings.api_keys),
        json_logs=json_logs,
        requests=ray.requests or 2 * slots,
        setup=ProcessSetup.of_this_process(threads=ray.cpus),
        prefix_store=None if prefix_store is None else dict(prefix_store),
        aliases=tuple(names[1:]),
    )
    if output is not None:
        _write(config, ray, slots, host, port, output)
    else:
        _serve(config, ray, slots, settings, host, port)


def _write(
    config: ServeConfig, ray: RayOptions, slots: int, host: str, port: int, output: Path
) -> None:
    from kvpolicy.serve.on_ray.options import deployment_file

    options = _options(ray, config, slots, [], None)
    text = deployment_file(config, options, host, port or 8000, output.name)
    atomic_write(output, text)
    info(f"{output} is written; deploy it on a Ray cluster: serve deploy {output}")


def _serve(
    config: ServeConfig,
    ray: RayOptions,
    slots: int,
    settings: ServerSettings,
    host: str,
    port: int,
) -> None:
    _check_installed()
    from kvpolicy.serve.example import curl_line, example_completion
    from kvpolicy.serve.launch import bound_to, socket_url
    from kvpolicy.serve.on_ray.launch import ray_cluster, serve_on

    address = ray.address or os.environ.get("RAY_ADDRESS")
    if address is None:
        info("no Ray address is given: starting a cluster on this machine.")
    with bound_to(host, port) as free:  # a port that is taken is found before the cluster
        url, port = socket_url(free), free.getsockname()[1]
    most = ray.max_replicas or ray.replicas
    with ray_cluster(address, cpus=most * ray.cpus) as cluster:
        nodes = [node["Resources"] for node in cluster.nodes() if node["Alive"]]
        options = _options(ray, config, slots, nodes, config.loading["device"])
        count = f"{ray.replicas} replica{'s' * (ray.replicas != 1)}"
        request = example_completion(config.name, settings.max_new_tokens)
        line = curl_line(url, request, KEYS if settings.api_keys else None)
        welcome = [f"{config.name} is served at {url}", f"  by {count}", "", "Try:", line]
        serve_on(
            config,
            settings.api_keys,
            options,
            host=host,
            port=port,
            is_own=address is None,
            on_start=lambda: print_lines(welcome),
        )


def _options(
    ray: RayOptions,
    config: ServeConfig,
    slots: int,
    nodes: list[dict[str, float]],
    device: str | None,
) -> dict[str, dict[str, Any]]:
    from kvpolicy.serve.on_ray.options import ReplicaOptions

    each = WorkerResources(ray.replicas, ray.cpus, ray.gpus).of_each(nodes, device)
    return ReplicaOptions(
        ray.replicas,
        ray.max_replicas,
        slots,
        config.engine["max_waiting"],
        ray.cpus,
        each["GPU"],
    ).of_deployments()


def _check_installed() -> None:
    missing = [name for name in ("ray", "mmh3") if find_spec(name) is None]
    if missing:
        msg = f"Ray Serve is not installed; run `{install_extra('ray', 'serve')}`."
        raise KVPolicyError(msg)
