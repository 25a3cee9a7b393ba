"""Modes that forbid in a static step what a graph could not hold: waits, copies, large allocations.

On a GPU a value read on the host is a wait. On a CPU nothing waits, but the operation that reads it
is the same, so the rule can be checked without a GPU.
"""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Operations whose result, or the shape of it, the host must know before it can go on.
READS = {
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.repeat_interleave.Tensor,
}
# These count the entries of a mask among their indices.
INDEXES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# Operations that make a tensor from values of the host.
FROM_HOST = {aten.lift_fresh.default, aten._pin_memory.default}


class GraphError(AssertionError):
    """A step did what a graph cannot hold."""


class OnlyWhatAGraphHolds(TorchDispatchMode):
    """Raises where an operation reads a value, leaves the device, or allocates much.

    What an operator of kvpolicy does inside is its own affair.
    """

    def __init__(self, most_bytes: int) -> None:
        """Forbid results of more than so many bytes."""
        super().__init__()
        self.most_bytes = most_bytes
        self.num_calls = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self.num_calls += 1
        if func in READS:
            raise GraphError(f"{func} reads a value on the host")
        # A single number is given to a kernel as an argument.
        if func in FROM_HOST and args[0].dim():
            raise GraphError(f"{func} makes a tensor from values of the host")
        if func in INDEXES and any(one.dtype == torch.bool for one in _tensors(args[1])):
            raise GraphError(f"{func} reads a value on the host: how many entries a mask has")
        given = list(_tensors((args, kwargs)))
        output = func(*args, **kwargs)
        made = list(_tensors(output))
        if given and len({one.device for one in (*given, *made)}) > 1:
            raise GraphError(f"{func} copies from one device to another")
        known = {one.untyped_storage()._cdata for one in given}
        for one in made:
            if one.untyped_storage()._cdata not in known and one.nbytes > self.most_bytes:
                raise GraphError(f"{func} allocates {one.nbytes:,} bytes")
        return output


def _tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
