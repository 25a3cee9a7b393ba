"""Forwards of tokens of prompts, and what loops make of their attention."""

import attrs
import numpy as np
import slab_reference as reference
import torch
from hypothesis import strategies as st
from strategies import seeds
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.softmax import PLAIN, Softmax
from kvpolicy.attention.visible import Visible

CPU = torch.device("cpu")
HEAD_DIM = 8


@attrs.frozen(eq=False)
class Forward:
    """What attention is given: ``before`` rows and new tokens of each sequence."""

    before: list[int]
    lengths: list[int]
    num_kv_heads: int
    group: int
    reach: int | None
    seed: int
    spread: bool = False  # whether the slots of the sequences are not neighbours
    value_dim: int = HEAD_DIM

    @property
    def visible(self) -> Visible:
        rows = np.array(self.before) + self.lengths
        return Visible(np.array(self.lengths), rows, max(self.lengths), CPU, self.reach)

    def tensors(
        self, dtype: torch.dtype = torch.float32, empty: float | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, as a model makes them, and rows in slabs that hold more.

        Args:
            dtype: Their precision.
            empty: What rows are that a sequence has not; ``None``: any numbers.
        """
        rng = torch.Generator().manual_seed(self.seed)
        num, width = len(self.lengths), max(self.lengths)
        all_rows = [*map(sum, zip(self.before, self.lengths, strict=True))]
        num_rows = max(all_rows)
        heads = self.num_kv_heads * self.group
        queries = torch.randn(num, width, heads, HEAD_DIM, generator=rng).transpose(1, 2)
        slabs = (
            torch.randn(2 * num, self.num_kv_heads, num_rows + 3, size, generator=rng)
            for size in (HEAD_DIM, self.value_dim)
        )
        served = slice(0, 2 * num, 2) if self.spread else slice(num)
        keys, values = (slab.to(dtype)[served, :, :num_rows] for slab in slabs)
        if empty is not None:
            for b, own in enumerate(all_rows):
                keys[b, :, own:], values[b, :, own:] = empty, empty
        return queries.to(dtype), keys, values


@attrs.frozen(eq=False)
class Expected:
    """What loops make of a forward.

    Attributes:
        output: ``[B, H_q, L, V]``, zeros for pads.
        accumulated: What each row receives, by the name of an accumulator, ``[B, H_kv, T]``.
    """

    output: Tensor
    accumulated: dict[str, Tensor]


def expected(
    forward: Forward,
    given: tuple[Tensor, Tensor, Tensor],
    scaling: float = HEAD_DIM**-0.5,
    softmax: Softmax = PLAIN,
) -> Expected:
    """Output of each token, and what each row receives, in double precision."""
    queries, keys, values = (tensor.double().cpu() for tensor in given)
    output = queries.new_zeros(*queries.shape[:3], values.shape[3])
    received = {name: torch.zeros(keys.shape[:3], dtype=torch.float64) for name in ACCUMULATORS}
    heads = range(queries.shape[1])
    sinks = [None] * len(heads) if softmax.sinks is None else softmax.sinks.tolist()
    for b, (before, length) in enumerate(zip(forward.before, forward.lengths, strict=True)):
        rows = keys[b, :, : before + length].tolist(), values[b, :, : before + length].tolist()
        for token in range(length):
            newest = before + token
            seen = [
                row <= newest and (forward.reach is None or row > newest - forward.reach)
                for row in range(before + length)
            ]
            for head in heads:
                kv_head = head // forward.group
                query = queries[b, head, token - length].tolist()
                own = (of[kv_head] for of in rows)
                found, weights, logits = reference.attention(
                    query, *own, seen, scaling, softmax.softcap, sinks[head]
                )
                output[b, head, token - length] = torch.tensor(found, dtype=torch.float64)
                for row in filter(seen.__getitem__, range(len(seen))):
                    for name, track in received.items():
                        at = b, kv_head, row
                        track[at] = reference.accumulated(
                            name, float(track[at]), [weights[row]], [logits[row]]
                        )
    return Expected(output, received)


forwards = st.builds(
    lambda pairs, **of: Forward([one[0] for one in pairs], [one[1] for one in pairs], **of),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    reach=st.none() | st.integers(1, 12),
    seed=seeds,
    spread=st.booleans(),
    value_dim=st.sampled_from([HEAD_DIM, 3, 20]),
)
