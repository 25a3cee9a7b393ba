"""A stand-in for flash-attn: its function for caches in loops, with its limits as assertions."""

from types import ModuleType

import slab_reference as reference
import torch
from torch import Tensor


class FlashStandIn(ModuleType):
    """A module ``flash_attn``.

    Attributes:
        num_calls: Calls so far.
        dtypes: Precisions that it takes.
    """

    def __init__(self) -> None:
        super().__init__("flash_attn")
        self.num_calls = 0
        self.dtypes = (torch.float16, torch.bfloat16)

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cache_seqlens: Tensor,
        softmax_scale: float,
        softcap: float,
    ) -> Tensor:
        """Attend from queries ``[B, 1, H_q, D]`` to the first rows of ``[B, R, H_kv, D]``."""
        self.num_calls += 1
        num_slots, num_queries, num_heads, dim = q.shape
        assert k_cache.shape == v_cache.shape == (num_slots, k_cache.shape[1], *k_cache.shape[2:])
        assert num_queries == 1
        assert dim % 8 == 0
        assert dim <= 256
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert q.dtype in self.dtypes
        assert all(tensor.stride(-1) == 1 for tensor in (q, k_cache, v_cache))
        assert cache_seqlens.dtype == torch.int32
        assert cache_seqlens.shape == (num_slots,)
        assert cache_seqlens.is_contiguous()
        output = torch.zeros(q.shape, dtype=torch.float64)
        group = num_heads // k_cache.shape[2]
        for slot, length in enumerate(cache_seqlens.tolist()):
            assert 0 < length <= k_cache.shape[1]
            for head in range(num_heads):
                rows = [
                    slab[slot, :length, head // group].double().tolist()
                    for slab in (k_cache, v_cache)
                ]
                query = q[slot, 0, head].double().tolist()
                seen = [True] * length
                result, *_ = reference.attention(query, *rows, seen, softmax_scale, softcap, None)
                output[slot, 0, head] = torch.tensor(result, dtype=torch.float64)
        return output.to(q)
