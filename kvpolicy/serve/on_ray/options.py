"""How many replicas there are and what each of them takes, and the file that says so."""

from collections.abc import Mapping
from typing import Any

import attrs
import yaml

from kvpolicy.errors import KVPolicyError
from kvpolicy.serve.on_ray.config import ServeConfig

# Names of the application and its deployments in Ray Serve.
APPLICATION, ROUTER, REPLICA = "kvpolicy", "Router", "Replica"
_HEAD = """\
# Written by kvpolicy serve --write-deployment. Deploy it, or an edited copy, on a Ray cluster:
#   serve deploy {name}
"""


@attrs.frozen
class ReplicaOptions:
    """How many replicas there are, and what each of them takes.

    Attributes:
        replicas: Replicas, or the fewest of them.
        max_replicas: The most, as many as their queues ask for; ``None``: always ``replicas``.
        target: Requests of a replica, those that wait in it included, above which there are to be
            more replicas.
        waiting: Requests that may wait in front of full replicas; those on their way to one count.
        cpus: CPUs of each, and the threads it computes with.
        gpus: GPUs of each.

    Raises:
        KVPolicyError: The most are fewer than the fewest.
    """

    replicas: int
    max_replicas: int | None
    target: int
    waiting: int
    cpus: int
    gpus: float

    def __attrs_post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            msg = (
                f"--max-replicas was given {self.max_replicas}, fewer than the {self.replicas} "
                "of --replicas."
            )
            raise KVPolicyError(msg)

    def of_deployments(self) -> dict[str, dict[str, Any]]:
        """Options of each deployment by its name, as a deployment file has them."""
        if self.max_replicas is None:
            number: dict[str, Any] = {"num_replicas": self.replicas}
        else:
            number = {
                "autoscaling_config": {
                    "min_replicas": self.replicas,
                    "max_replicas": self.max_replicas,
                    "target_ongoing_requests": self.target,
                }
            }
        replica = {
            **number,
            "ray_actor_options": {"num_cpus": self.cpus, "num_gpus": self.gpus},
            "max_queued_requests": self.waiting + (self.max_replicas or self.replicas),
            # Where there is one replica only, an update starts the new one first. Otherwise
            # nodes would need room for one more than there are.
            "max_surge_percent": 100 if self.replicas == 1 else 0,
        }
        return {REPLICA: replica}


def deployment_file(
    config: ServeConfig, options: Mapping[str, Mapping[str, Any]], host: str, port: int, name: str
) -> str:
    """A file for ``serve deploy``.

    Args:
        config: What is served.
        options: Options of each deployment by its name.
        host: Interface to listen on.
        port: The port.
        name: Name of the file.

    Raises:
        KVPolicyError: The configuration cannot be written.
    """
    application = {
        "name": APPLICATION,
        "route_prefix": "/",
        "import_path": "kvpolicy.serve.on_ray.deployment:build",
        "args": config.to_dict(),
        "deployments": [{"name": key, **value} for key, value in options.items()],
    }
    data = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": host, "port": port},
        "applications": [application],
    }
    text: str = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    return _HEAD.format(name=name) + text
