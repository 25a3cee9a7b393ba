"""Peers: the processes that hold one model together, each some of the heads of every layer.

Rows are stored where their heads are computed. Policies know nothing of it: what they are shown
are the parts of all processes side by side, and of what they answer each process takes its own
part. All are shown the same and so answer alike; only the first one's tokens count.
"""

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor
from torch import distributed as dist


@attrs.frozen(eq=False)
class TensorParallelGroup:
    """This process and those it shares a model with, if there are any.

    Whoever calls one of the methods calls it in all processes, in the same order, with tensors
    of the same shape.

    Attributes:
        rank: Which of them this is, from 0.
        size: How many they are.
        group: How they reach each other; ``None`` where there is but one.
        device: Where they exchange tokens.
    """

    rank: int = 0
    size: int = 1
    group: "dist.ProcessGroup | None" = None
    device: torch.device | None = None

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all, ``[B, H, ...]`` each, side by side: ``[B, size * H, ...]``."""
        if self.size == 1:
            return part
        whole = part.new_empty(self.size, *part.shape)
        dist.all_gather(list(whole), part.contiguous(), self.group)
        return whole.movedim(0, 1).flatten(1, 2)  # of one sequence it is a view

    def part(self, whole: Tensor) -> Tensor:
        """What `all_gather` has put in this process's place, a view."""
        if self.size == 1:
            return whole
        num_heads = whole.shape[1] // self.size
        return whole.narrow(1, self.rank * num_heads, num_heads)

    def broadcast(self, tokens: Sequence[int]) -> list[int]:
        """What the first process says, whatever the others would have said.

        Logits are the same everywhere, and so should be what is drawn from them. If they ever
        were not, in a last bit, processes would wait for each other forever.
        """
        if self.size == 1:
            return list(tokens)
        said = torch.tensor(tokens, device=self.device)
        dist.broadcast(said, group=self.group, group_src=0)
        return said.tolist()


SINGLE = TensorParallelGroup()
