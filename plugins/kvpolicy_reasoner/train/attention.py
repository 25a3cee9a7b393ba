"""Causal attention for training on a CPU, registered with transformers under its own name.

On CPUs, scaled dot product attention in bfloat16 takes several times as long as plain matrix
products and a softmax. Taking the queries in chunks leaves out most of the masked half.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

NAME = "kvpolicy_chunked_causal"

_CHUNK = 128


def register_training_attention() -> str:
    """Make the attention known to transformers.

    Returns:
        The name to give as ``attn_implementation``.
    """
    AttentionInterface.register(NAME, chunked_causal_attention)
    return NAME


def chunked_causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend causally over right-padded rows, where no padding is ever looked at.

    Args:
        module: The attention layer that asks.
        query: Queries after RoPE, ``[B, H_q, T, D]``.
        key: Keys after RoPE, ``[B, H_kv, T, D]``.
        value: Values, ``[B, H_kv, T, D]``.
        attention_mask: Has to be none.
        scaling: Factor on the logits.

    Returns:
        The output, ``[B, T, H_q, D]``, and no weights.
    """
    assert attention_mask is None, "training rows are padded on the right and need no mask"
    batch, num_heads, length, head_dim = query.shape
    num_kv_heads = key.shape[1]
    query = (query * scaling).unflatten(1, (num_kv_heads, -1))  # [B, H_kv, G, T, D]
    key = key.transpose(-1, -2)  # [B, H_kv, D, T]
    future = torch.full((_CHUNK, _CHUNK), -torch.inf, dtype=query.dtype).triu(1)

    outputs = []
    for start in range(0, length, _CHUNK):
        stop = min(start + _CHUNK, length)
        chunk = query[:, :, :, start:stop].flatten(2, 3)  # [B, H_kv, G * C, D]
        logits = chunk @ key[..., :stop]  # [B, H_kv, G * C, stop]
        by_query = logits.unflatten(2, (-1, stop - start))
        by_query[..., start:] += future[: stop - start, : stop - start]
        output = logits.softmax(dim=-1) @ value[:, :, :stop]
        outputs.append(output.unflatten(2, (-1, stop - start)))
    joined = torch.cat(outputs, dim=3)  # [B, H_kv, G, T, D]
    return joined.reshape(batch, num_heads, length, head_dim).transpose(1, 2), None
