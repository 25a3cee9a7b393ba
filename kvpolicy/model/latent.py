"""Latent attention (MLA, DeepSeek-V2, 2405.04434): one row of a token serves all heads.

A model stores a latent of size ``r`` and a rotated key of size ``p`` for a token, and expands them
to keys and values of every head when it attends: ``k_h = [U_h c, k_rot]`` and ``v_h = W_h c``.
Expanding all rows in every step would cost more than attending. So the projections are absorbed,
as section 2.1.2 of the paper says: a query takes the place of its key's expansion,

    q_h . k_h = [U_h^T q_h, q_rot] . [c, k_rot],        sum_t a_t v_ht = W_h sum_t a_t c_t,

and the attention is that of all heads to one KV head, whose keys are ``[c, k_rot]``, of size
``r + p``, and whose values are ``c``. These are the rows that are stored, evicted, and shown to
policies; queries are the absorbed ones. Output and weights are those of the model.
"""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpolicy.compat import cache_argument, cache_in
from kvpolicy.errors import ModelError
from kvpolicy.model.attention import attention_function
from kvpolicy.model.decoder import decoder_layers
from kvpolicy.model.twin import Copies

#: Name of `latent_attention` in transformers' ``AttentionInterface``.
LATENT_ATTENTION = "kvpolicy_latent"


def latent_modules(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The modules of a model that store latents, by layer.

    Raises:
        ModelError: If their attention is not that of this file.
    """
    modules = [one for one in decoder_layers(model).modules() if hasattr(one, "expand_kv")]
    reason = None
    if any(hasattr(module, "indexer") for module in modules):
        reason = "its attention is sparse: an indexer chooses the rows that each query reads"
    elif any(getattr(module.kv_b_proj, "bias", None) is not None for module in modules):
        reason = "its latents are expanded with a bias"
    elif modules and (getattr(model, "tp_size", None) or 1) > 1:
        reason = "its latents serve all heads, and several processes share these; load it in one"
    if reason is not None:
        msg = f"model {type(model).__name__} cannot be run: {reason}"
        raise ModelError(msg)
    return {int(module.layer_idx): module for module in modules}  # type: ignore[arg-type]


def store_latents(copies: Copies, module: nn.Module) -> None:
    """Have the copy of a module store latents and attend to them, and expand nothing."""
    copied = copies.hookable(module)
    copied.register_forward_pre_hook(_with_rows_of_latents, with_kwargs=True)
    config = copy(copied.config)
    config._attn_implementation = LATENT_ATTENTION  # type: ignore[union-attr]
    vars(copied).update(config=config, expand_kv=_as_stored)


def latent_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend from the heads of a layer to its latents; see `attention_function`.

    Args:
        module: The attention module.
        query: Queries by head, without and with rotation, ``[B, H_q, L, n + p]``.
        key: Latents and rotated keys, ``[B, 1, T, r + p]``.
        value: Latents, ``[B, 1, T, r]``.
        args: As of `attention_function`.
        kwargs: Likewise.

    Returns:
        ``[B, L, H_q, V]`` and no weights.
    """
    kwargs.setdefault("scaling", query.shape[-1] ** -0.5)
    plain_size = query.shape[-1] + value.shape[-1] - key.shape[-1]  # n
    plain, rotated = query.split([plain_size, query.shape[-1] - plain_size], dim=-1)
    weight = _expansion(module, value).unflatten(0, (query.shape[1], -1))  # [H_q, n + V, r]
    of_keys, of_values = weight[:, :plain_size], weight[:, plain_size:]
    absorbed = torch.cat([plain @ of_keys, rotated], dim=-1)
    means, _ = attention_function(module, absorbed, key, value, *args, **kwargs)  # [B, L, H_q, r]
    output = means.transpose(1, 2) @ of_values.transpose(1, 2)
    return output.transpose(1, 2).contiguous(), None


def _expansion(module: Any, like: Tensor) -> Tensor:
    """The weight that expands latents to keys and values of all heads, ``[H_q * (n + V), r]``."""
    projection: nn.Module = module.kv_b_proj
    if type(projection) is nn.Linear and type(projection.weight) is nn.Parameter:
        return projection.weight
    # Packed, quantised, adapted: whatever it is, it is linear.
    identity = torch.eye(like.shape[-1], dtype=like.dtype, device=like.device)
    expanded: Tensor = projection(identity)
    return expanded.T


class _RowsOfLatents:
    """The cache that an attention module is given: latents become rows of one head."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update(
        self, latent: Tensor, rotated: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store latents ``[B, 1, L, r]`` with their rotated keys ``[B, 1, L, p]``."""
        keys = torch.cat([latent, rotated], dim=-1)
        rows: tuple[Tensor, Tensor] = self._cache.update(keys, latent, layer_idx)
        return rows


def _with_rows_of_latents(
    _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    names = cache_argument(None)
    return args, {**kwargs, **dict.fromkeys(names, _RowsOfLatents(cache_in(kwargs)))}


def _as_stored(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What the module would expand, as `latent_attention` takes it."""
    return keys, values
