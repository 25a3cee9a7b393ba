"""Where a comparison is run: on this machine, or on the workers of a cluster."""

from collections.abc import Sequence
from typing import Any, Protocol

import attrs
import torch

from kvpolicy.lab.executors.local import Local, num_workers
from kvpolicy.lab.executors.ray import RayPool
from kvpolicy.lab.executors.raycluster import RayCluster
from kvpolicy.lab.models import ModelCache, ModelInfo, ModelProvider
from kvpolicy.lab.store.session import describe_machine
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.jobs import Job, Pool
from kvpolicy.lab.sweep.probe import Probe, probe


class Place(ModelProvider, Protocol):
    """Somewhere with models, and with workers that do jobs with them."""

    def probe(self, comparison: Comparison, cell: Cell, limit_s: float) -> Probe:
        """Try a cell for some seconds; see `kvpolicy.lab.sweep.probe.probe`."""

    def num_workers(self, comparison: Comparison) -> int:
        """Workers side by side."""

    def machine(self, comparison: Comparison) -> dict[str, Any]:
        """What a worker computes with; see `kvpolicy.lab.store.session.describe_machine`."""

    def pieces(self, comparison: Comparison, jobs: Sequence[Job]) -> list[Job]:
        """Jobs in the parts in which workers are given them, whole or cut."""

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

    shelf: ModelCache
    workers: int | None
    threads: int

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model; see `ModelCache.describe`."""
        return self.shelf.describe(name)

    def probe(self, comparison: Comparison, cell: Cell, limit_s: float) -> Probe:
        """Try a cell in this process, with as many threads as a worker has."""
        torch.set_num_threads(self._num_threads(comparison))
        return probe(comparison, cell, self.shelf, limit_s)

    def num_workers(self, comparison: Comparison) -> int:
        """Workers side by side; see `kvpolicy.lab.executors.local.num_workers`."""
        return num_workers(comparison, self.workers)

    def machine(self, comparison: Comparison) -> dict[str, Any]:
        """This machine, with the threads of one worker."""
        return describe_machine(threads=self._num_threads(comparison))

    def pieces(self, comparison: Comparison, jobs: Sequence[Job]) -> list[Job]:
        """The jobs as they are: no cell is divided among processes."""
        return list(jobs)

    def pool(self, comparison: Comparison) -> Pool:
        """This process, or several that it forks."""
        return Local(comparison, self.shelf, self.num_workers(comparison), self.threads)

    def _num_threads(self, comparison: Comparison) -> int:
        return self.threads if self.num_workers(comparison) == 1 else 1


@attrs.frozen
class RayExecutor:
    """A Ray cluster.

    Attributes:
        cluster: The cluster.
    """

    cluster: RayCluster

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        """Describe a model; see `RayCluster.describe`."""
        return self.cluster.describe(name)

    def probe(self, comparison: Comparison, cell: Cell, limit_s: float) -> Probe:
        """Try a cell on a worker."""
        return self.cluster.probe(comparison, cell, limit_s)

    def num_workers(self, comparison: Comparison) -> int:
        """Workers side by side, at most."""
        return self.cluster.workers

    def machine(self, comparison: Comparison) -> dict[str, Any]:
        """The machine of a worker; see `RayCluster.machine`."""
        return self.cluster.machine()

    def pieces(self, comparison: Comparison, jobs: Sequence[Job]) -> list[Job]:
        """Shards, where there are fewer jobs than keep all workers busy."""
        return RayPool(self.cluster, comparison).pieces(jobs)

    def pool(self, comparison: Comparison) -> Pool:
        """The workers of the cluster."""
        return RayPool(self.cluster, comparison)
