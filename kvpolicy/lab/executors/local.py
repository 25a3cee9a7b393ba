"""The pool of one machine: model after model, each with this process or with several."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby

import attrs
import torch

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.executors.processes import CAN_FORK, Processes
from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.store.session import num_cpus
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.jobs import Job, News, Pool, ThisProcess
from kvpolicy.lab.sweep.serve import Server

_SMALL = 100_000_000  # parameters; a larger model keeps all cores busy by itself


@attrs.frozen
class Local:
    """Does the jobs of all models on this machine.

    With several workers, nothing may have been computed with more than one thread before:
    torch's pool of threads does not survive forking.

    Attributes:
        comparison: What the jobs are parts of.
        shelf: Where the models come from.
        workers: Processes side by side, of one thread each; 1 means this one.
        threads: Threads of this process, if it works alone.
    """

    comparison: Comparison
    shelf: ModelCache
    workers: int
    threads: int

    def serve(self, jobs: Sequence[Job]) -> Iterator[News]:
        """Do jobs; those of one model stand side by side, so that it is loaded once."""
        for name, mine in groupby(jobs, self._model):
            yield from self._serve(name, list(mine))

    def _serve(self, name: str, jobs: Sequence[Job]) -> Iterator[News]:
        """Do the jobs of one model; when this ends nothing but the shelf holds it any more."""
        model, tokenizer = self.shelf.open(name)
        with self._pool(Server(model, tokenizer, self.comparison)) as pool:
            yield from pool.serve(jobs)

    def _model(self, job: Job) -> str:
        return self.comparison.group_of(self.comparison.cell(job.cell)).model.name

    def _pool(self, server: Server) -> AbstractContextManager[Pool]:
        if self.workers > 1:
            return Processes(server.serve, self.workers)
        torch.set_num_threads(self.threads)
        return nullcontext(ThisProcess(server.serve))


def num_workers(comparison: Comparison, wanted: int | None) -> int:
    """Decide how many processes run cells side by side.

    Args:
        comparison: What is run.
        wanted: What the user asks for, if anything.

    Returns:
        The number; 1 means this process.

    Raises:
        KVPolicyError: More than one is wanted where this is not possible.
    """
    models = [group.model for group in comparison.groups]
    can = CAN_FORK and all(model.device == "cpu" for model in models)
    if wanted is not None:
        if wanted > 1 and not can:
            msg = f"{wanted} workers need Linux and a model on the CPU; leave --workers out."
            raise KVPolicyError(msg)
        return wanted
    is_small = all(model.num_parameters < _SMALL for model in models)
    return min(num_cpus(), len(comparison.cells)) if can and is_small else 1
