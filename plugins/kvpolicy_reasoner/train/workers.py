"""Run the same function in several processes that add up their gradients."""

import multiprocessing
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import torch
import torch.distributed as dist
from torch import Tensor


@attrs.frozen
class Team:
    """What a process knows about the others.

    Attributes:
        rank: Which process this is, from 0; 0 is the one that was called.
        size: How many processes there are.
    """

    rank: int
    size: int

    def add_up(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over all processes.

        Args:
            tensor: A tensor of the same shape in every process.
        """
        if self.size > 1:
            dist.all_reduce(tensor)

    def wait(self) -> None:
        """Wait until every process has come here."""
        if self.size > 1:
            dist.barrier()


def run_together(size: int, work: Callable[[Team], None], *, lead: Callable[[Team], None]) -> None:
    """Run work in several processes of one thread each; this process is the first of them.

    Args:
        size: How many processes.
        work: What the others do; handed to fresh interpreters, so it holds plain values only.
        lead: What this process does.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, _one_thread():
        meeting_point = f"file://{Path(folder) / 'meeting-point'}"
        others = [
            context.Process(target=_join, args=(meeting_point, Team(rank, size), work), daemon=True)
            for rank in range(1, size)
        ]
        for process in others:
            process.start()
        try:
            _join(meeting_point, Team(0, size), lead)
        except BaseException:
            for process in others:
                process.terminate()
            raise
        for process in others:
            process.join()


def _join(meeting_point: str, team: Team, work: Callable[[Team], None]) -> None:
    torch.set_num_threads(1)
    if team.size == 1:
        work(team)
        return
    dist.init_process_group("gloo", init_method=meeting_point, rank=team.rank, world_size=team.size)
    try:
        work(team)
    finally:
        dist.destroy_process_group()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)
