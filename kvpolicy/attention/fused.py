"""Attention with a plain softmax, of which outputs are all that is wanted: torch's fused kernels.

Without a mask where queries see all rows up to their own. The KV heads are the batch of the
kernels, and the heads of a group their heads, which have the same keys by a stride of 0: neither
keys nor values are copied, and each kernel takes them, those too that know no groups.
"""

from functools import lru_cache
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import pad
from torch.utils._python_dispatch import _disable_current_modes

from kvpolicy.attention.blocks import blocks
from kvpolicy.attention.visible import Visible

_CUDNN = Lock()


def attend_fused(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Visible, scaling: float
) -> Tensor:
    """Attend from new tokens to rows; arguments are those of `kvpolicy.attention.eager.attend`.

    Returns:
        ``[B, H_q, L, V]``.
    """
    if queries.device.type == "cpu":
        return _attended(queries, keys, values, visible, scaling)
    # What torch prefers on some GPUs builds a plan for each shape, in about a second, and prompts
    # are of any length. It is told so for the whole process: engines in other threads wait.
    with _CUDNN:
        was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            return _attended(queries, keys, values, visible, scaling)
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def _attended(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Visible, scaling: float
) -> Tensor:
    num_kv_heads, length = keys.shape[1], queries.shape[2]
    group = queries.shape[1] // num_kv_heads
    if length == 1:
        # The heads of a group take the place of the length: the kernel then reads a key once
        # for all of them, and takes the mask as it is.
        grouped = queries.reshape(-1, num_kv_heads, group, keys.shape[3])
        mask = visible.mask(slice(0, 1), slice(0, keys.shape[2]))
        output = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=mask, scale=scaling
        )
        return output.reshape(*queries.shape[:3], -1)
    if (missing := keys.shape[3] - (size := values.shape[3])) != 0:
        # The kernels that make no tensor of all weights take heads of one size.
        queries, keys = (pad(one, (0, max(-missing, 0))) for one in (queries, keys))
        values = pad(values, (0, max(missing, 0)))
        return _attended(queries, keys, values, visible, scaling)[..., :size]
    grouped = queries.unflatten(1, (num_kv_heads, group)).flatten(0, 1)
    keys, values = (
        rows.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for rows in (keys, values)
    )
    if visible.is_lower_right:
        output = _lower_right(grouped, keys, values, scaling)
    else:
        output = _masked(grouped, keys, values, visible, scaling)
    by_token = output.unflatten(0, (-1, num_kv_heads)).permute(0, 3, 1, 2, 4)  # as models go on
    return by_token.flatten(2, 3).transpose(1, 2)


def output_for(queries: Tensor, values: Tensor) -> Tensor:
    """What attention from queries ``[..., D]`` to values ``[..., V]`` gives, uninitialised."""
    if queries.shape[-1] == values.shape[-1]:  # in their order of memory, as models go on
        return torch.empty_like(queries, dtype=values.dtype)
    return values.new_empty(*queries.shape[:-1], values.shape[-1])


def _lower_right(queries: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """Attention of queries ``[N, G, L, D]`` to rows of which theirs are the last."""
    length, num_rows = queries.shape[2], keys.shape[2]
    if length == num_rows:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling)
    if queries.device.type == "cpu":  # where torch makes the bias below a dense mask
        return _to_two_parts(queries.to(keys.dtype), keys, values, num_rows - length, scaling)
    bias = _bias(length, num_rows)
    return F.scaled_dot_product_attention(queries, keys, values, attn_mask=bias, scale=scaling)


@lru_cache(maxsize=4)  # all layers of a forward have the same
def _bias(length: int, num_rows: int) -> Tensor:
    """What stands for the mask of queries whose rows are the last of so many; holds no numbers."""
    with _disable_current_modes():  # such as those that count operations: torch's class fails there
        bias: Tensor = causal_lower_right(length, num_rows)
        return bias


def _to_two_parts(
    queries: Tensor, keys: Tensor, values: Tensor, num_before: int, scaling: float
) -> Tensor:
    """Attend to the rows before the queries, to their own, and join the two.

    The sums of the softmax of each, ``exp(a)`` and ``exp(b)``, say what its share is.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    queries = queries if queries.stride(3) == 1 else queries.contiguous()
    parts = [
        kernel(queries, keys[:, :, rows], values[:, :, rows], 0.0, is_causal, scale=scaling)
        for rows, is_causal in ((slice(num_before), False), (slice(num_before, None), True))
    ]
    (before, a), (own, b) = parts
    share = (b - a).sigmoid_()[..., None]
    if before.dtype.itemsize >= share.dtype.itemsize:
        return before.lerp_(own, share.to(before.dtype))
    return before.to(share.dtype).lerp_(own.to(share.dtype), share).to(own.dtype)


def _masked(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Visible, scaling: float
) -> Tensor:
    """Attention of queries ``[N, G, L, D]`` under masks, each of some of them."""
    num_kv_heads = len(queries) // len(visible.num_rows)
    output = output_for(queries, values)
    # The kernels make numbers of a mask, as many as a KV head has weights.
    for now in blocks(queries.shape[2], keys.shape[2] * len(queries), queries.device):
        rows = visible.rows(now)
        mask = visible.mask(now, rows)
        if mask is not None and mask.shape[:2] != (1, 1):
            mask = mask.expand(-1, num_kv_heads, -1, -1).flatten(0, 1)[:, None]
        output[:, :, now] = F.scaled_dot_product_attention(
            queries[:, :, now],
            keys[:, :, rows],
            values[:, :, rows],
            attn_mask=mask,
            scale=scaling,
        )
    return output
