"""Where a comparison is run: on this machine, or on the workers of a cluster."""

from typing import Any, Protocol

import attrs

from kvpolicy.lab.card import Describes, ModelCard
from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.local import Local, num_workers
from kvpolicy.lab.onray import RayPool
from kvpolicy.lab.pool import Pool
from kvpolicy.lab.raycluster import RayCluster
from kvpolicy.lab.shelf import Shelf


class Place(Describes, Protocol):
    """Somewhere with models, and with workers that do jobs with them."""

    def num_workers(self, comparison: Comparison) -> int:
        """Workers side by side."""

    def pool(self, comparison: Comparison) -> Pool:
        """Who does the jobs of a comparison."""


@attrs.frozen
class Here:
    """This machine.

    Attributes:
        shelf: Its models.
        workers: Processes side by side, if somebody asked for a number.
        threads: Threads of this process, if it works alone.
    """

    shelf: Shelf
    workers: int | None
    threads: int

    def describe(self, name: str) -> tuple[ModelCard, Any]:
        """Describe a model; see `Shelf.describe`."""
        return self.shelf.describe(name)

    def num_workers(self, comparison: Comparison) -> int:
        """Workers side by side; see `kvpolicy.lab.local.num_workers`."""
        return num_workers(comparison, self.workers)

    def pool(self, comparison: Comparison) -> Pool:
        """This process, or several that it forks."""
        return Local(comparison, self.shelf, self.num_workers(comparison), self.threads)


@attrs.frozen
class OnRay:
    """A Ray cluster.

    Attributes:
        cluster: The cluster.
    """

    cluster: RayCluster

    def describe(self, name: str) -> tuple[ModelCard, Any]:
        """Describe a model; see `RayCluster.describe`."""
        return self.cluster.describe(name)

    def num_workers(self, comparison: Comparison) -> int:
        """Workers side by side, at most."""
        return self.cluster.workers

    def pool(self, comparison: Comparison) -> Pool:
        """The workers of the cluster."""
        return RayPool(self.cluster, comparison)
