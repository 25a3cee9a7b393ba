"""Attention by flash-attn in place of the Triton kernel, in layers where outputs are all it takes.

flash-attn 2 reads how many rows a sequence holds on the device, so a CUDA graph can hold it, and
its forward is deterministic. It answers outputs only, counts rows for all KV heads of a sequence
together, and knows no sinks.

Source: ``flash_attn_with_kvcache`` of Dao-AILab/flash-attention, 2.6 or newer.
"""

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from kvpolicy.kernels.decode import Counts, DecodeSlabs

# What attends on a GPU: the Triton kernel in all layers, or flash-attn in those that it can run.
GpuAttention = Literal["triton", "flash-attn"]

PRECISIONS = (torch.float16, torch.bfloat16)
_MOST_DIMS = 256
_OLDEST_GPU = (8, 0)  # Ampere


def flash_problem(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why flash-attn cannot attend on a device and in a precision; ``None`` if it can."""
    if device.type != "cuda":
        return f"it runs on GPUs only, and the model is on {device}"
    if dtype not in PRECISIONS:
        return f"it takes float16 and bfloat16 only, and the model is in {str(dtype)[6:]}"
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return f"{torch.cuda.get_device_name(device)} is older than Ampere"
    if find_spec("triton") is None:
        return "rows are stored by Triton, which kvpolicy[kernels] brings"
    try:
        from flash_attn import flash_attn_with_kvcache  # noqa: F401
    except (ImportError, OSError) as error:  # missing, or built for another torch
        return f"the package flash-attn cannot be imported ({error})"
    return None


def can_attend(slabs: DecodeSlabs, sinks: Tensor | None, sliding_window: int) -> bool:
    """Whether flash-attn can attend to a layer. It sees no positions, so it knows no window.

    The KV heads of a slot must hold equally many rows, which only the device knows.
    """
    dim = slabs.keys.shape[3]
    return (
        not slabs.accumulators
        and slabs.bounds is None
        and sinks is None
        and not sliding_window
        and slabs.keys.dtype in PRECISIONS
        and dim % 8 == 0  # others are padded, which copies the slabs
        and dim <= _MOST_DIMS
    )


def attend_with_flash(
    query: Tensor, slabs: DecodeSlabs, counts: Counts, *, scaling: float, softcap: float
) -> Tensor:
    """Attention of one query per slot over the rows it holds and the one just stored.

    Args:
        query: After RoPE, ``[W, H_q, D]``.
        slabs: A layer that flash-attn `can_attend` to.
        counts: State of the slots before the new rows; the KV heads of a slot hold equally many.
        scaling: Factor on the logits.
        softcap: See `kvpolicy.kernels.decode.attend_with_torch`.

    Returns:
        ``[W, H_q, D]`` in the precision of ``query``.
    """
    from flash_attn import flash_attn_with_kvcache

    keys, values = slabs.keys, slabs.values
    # At least one row, also of slots that take no part: the weights of none would be NaN.
    held = (counts.rows[:, 0] + 1).clamp(max=keys.shape[2])
    output: Tensor = flash_attn_with_kvcache(
        query[:, None].to(keys.dtype),  # [W, 1, H_q, D]
        keys.transpose(1, 2),  # [W, R, H_kv, D]
        values.transpose(1, 2),
        cache_seqlens=held.to(torch.int32),
        softmax_scale=scaling,
        softcap=softcap,
    )
    return output[:, 0].to(query.dtype)
