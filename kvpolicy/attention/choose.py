"""Decode attention on a CPU: in Numba where it is installed and can be used, else in torch."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kvpolicy.attention.torch_backend.decode import Counts, DecodeSlabs, HeldRows, attend_with_torch

# Stores the new rows of a layer and attends: the arguments of `attend_with_torch` that change from
# one step to the next, with a function in place of `held`.
Attend = Callable[..., Tensor]

# Reads the rows of a layer; called only where they are needed.
ReadRows = Callable[[], HeldRows | None]


def attend_on_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slabs: DecodeSlabs,
    counts: Counts,
    *,
    sliding_window: int = 0,
    **options: Any,
) -> Tensor:
    """Store one new row in every slot, and attend to the rows that it holds.

    Arguments and result are those of `torch_backend.decode.attend_with_torch`.
    """
    return attention_of(slabs, counts, sliding_window)(query, key, value, **options)


def attention_of(slabs: DecodeSlabs, counts: Counts, sliding_window: int = 0) -> Attend:
    """The attention of a layer whose tensors stay where they are.

    Args:
        slabs: The layer.
        counts: State of the slots.
        sliding_window: As for `attend_with_torch`.
    """

    def with_torch(
        query: Tensor, key: Tensor, value: Tensor, read_rows: ReadRows | None = None, **options: Any
    ) -> Tensor:
        return attend_with_torch(
            query,
            key,
            value,
            slabs,
            counts,
            sliding_window=sliding_window,
            held=None if read_rows is None else read_rows(),
            **options,
        )

    if slabs.keys.dtype != torch.float32 or not has_numba():
        return with_torch
    from kvpolicy.attention.numba_backend import NumbaLayer, is_forked

    layer = NumbaLayer(slabs, counts, sliding_window)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, read_rows: ReadRows | None = None, **options: Any
    ) -> Tensor:
        if is_forked():
            return with_torch(query, key, value, read_rows, **options)
        return layer(query, key, value, **options)

    return attend


@cache
def has_numba() -> bool:
    """Whether attention in fp32 runs in Numba, with the threads of OpenMP.

    Its other threading layers would add threads beside those of torch, and the default one ends
    the process where two threads call it; a process that has started one keeps it.
    """
    if find_spec("numba") is None:
        return False
    import numba

    try:
        return bool(numba.threading_layer() == "omp")
    except ValueError:  # it has not started any
        numba.config.THREADING_LAYER = "omp"
        return find_spec("numba.np.ufunc.omppool") is not None
