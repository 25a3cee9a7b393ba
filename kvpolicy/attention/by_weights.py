"""Attention of prompts by softmax weights in kernels, on devices that have them: GPUs with Triton.

The operator ``kvpolicy::attend_by_weights`` of torch is one call with declared effects. On the
device ``meta``, which has no numbers, it has the shape of its result, so that what a GPU launches
can be counted there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvpolicy.attention.softmax import Softmax
from kvpolicy.attention.visible import Visible
from kvpolicy.devices import HAS_TRITON, as_current, has_no_numbers

#: Blocks of rows of larger heads, such as those of latent attention, do not fit into the shared
#: memory of a multiprocessor.
LARGEST_HEAD = 256
#: Fewer queries than a tile has are better off in torch: one program would go over all rows.
LEAST_QUERIES = 16
_KINDS = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("kvpolicy", "FRAGMENT")
_LIBRARY.define(
    "attend_by_weights(Tensor queries, Tensor keys, Tensor values, Tensor sizes, "
    "Tensor(a!)[] accumulated, str[] accumulators, int reach, float scaling, float softcap, "
    "Tensor? sinks) -> Tensor"
)

ATTEND_BY_WEIGHTS = torch.ops.kvpolicy.attend_by_weights.default


def on_gpu(device: torch.device) -> bool:
    """Whether a device is a GPU, or stands for one."""
    return device.type == "cuda" or has_no_numbers(device)


def why_not(queries: Tensor, keys: Tensor, values: Tensor, visible: Visible) -> str | None:
    """Why a GPU attends in torch's operations and not in kernels; ``None``: it need not.

    Arguments are those of `kvpolicy.attention.eager.attend`.
    """
    if keys.is_cuda and not HAS_TRITON:
        return "Triton is not installed"
    if visible.also is not None:
        return "which rows a token sees depends on more than their order"
    if visible.ahead is not None:
        return "tokens see later ones"
    if (size := max(keys.shape[3], values.shape[3])) > LARGEST_HEAD:
        return f"heads have {size} channels, more than {LARGEST_HEAD}"
    if len({queries.dtype, keys.dtype, values.dtype}) > 1 or keys.dtype not in _KINDS:
        return "numbers have 64 bits, or are of several kinds"
    return None


def attend_by_weights(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Visible,
    *,
    scaling: float,
    softmax: Softmax,
    accumulated: Mapping[str, Tensor],
) -> Tensor:
    """Attend in kernels, where `why_not` knows nothing against it.

    Arguments and result are those of `kvpolicy.attention.eager.attend`.
    """
    output: Tensor = ATTEND_BY_WEIGHTS(
        queries,
        keys,
        values,
        visible.sizes,
        list(accumulated.values()),
        list(accumulated),
        visible.reach or 0,
        scaling,
        softmax.softcap or 0.0,
        softmax.sinks,
    )
    return output


def in_triton(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sizes: Tensor,
    accumulated: list[Tensor],
    accumulators: list[str],
    reach: int,
    scaling: float,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """What the operator does on a GPU."""
    from kvpolicy.attention.triton_backend.prompts import attend

    with as_current(keys.device):  # that of a layer, which may be another one than the model's
        return attend(
            queries,
            keys,
            values,
            sizes,
            accumulated,
            accumulators,
            reach=reach,
            scaling=scaling,
            softcap=softcap,
            sinks=sinks,
        )


def _shape(queries: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    del keys
    num_sequences, num_heads, width = queries.shape[:3]
    return values.new_empty(num_sequences, width, num_heads, values.shape[3]).transpose(1, 2)


_LIBRARY.impl("attend_by_weights", in_triton, "CUDA")
torch.library.register_fake("kvpolicy::attend_by_weights", _shape, lib=_LIBRARY)
