"""Attention by computed weights, in blocks of queries, against loops over queries and rows."""

import itertools
import math

import numpy as np
import pytest
import slab_reference as reference
import torch
from allocations import peak_allocated
from hypothesis import given
from hypothesis import strategies as st
from strategies import costly, seeds
from torch import Tensor

from kvpolicy.attention import blocks
from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.softmax import PLAIN, Softmax
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.model import attention

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 8
GROUP = NUM_HEADS // NUM_KV_HEADS
CAPACITY = 24
#: fp32 against double precision, of sums over up to 12 queries and a group of two.
ATOL = 1e-5
#: Squares of logits up to 10 come on top.
LOGIT_ATOL = 1e-3

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
softmaxes = st.sampled_from([PLAIN, Softmax(softcap=3.0), Softmax(sinks=SINKS)])


def attended(
    before: list[int], lengths: list[int], seed: int, softmax: Softmax
) -> tuple[Tensor, Tensor, KVCache, dict[str, Tensor]]:
    """Queries and output, ``[B, H_q, L, D]``, the cache, and its accumulators before."""
    shape = LayerShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))
    slab = Slab(CAPACITY, tracks=ACCUMULATORS)
    cache = KVCache([shape], [slab], len(before))
    rng = torch.Generator().manual_seed(seed)
    layer = cache.layers[0]
    for tensor in (layer.keys, layer.values, *layer.tracks.values()):
        tensor.normal_(generator=rng)
    tracks = {name: track.clone().double() for name, track in layer.tracks.items()}
    cache.rows[:] = cache.seq_len[:] = np.array(before)
    step = EagerStep(cache, list(range(len(before))), lengths)
    queries, keys, values = (
        torch.randn(len(before), heads, max(lengths), HEAD_DIM, generator=rng)
        for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    output = attention.attend(step, 0, queries, *step.store(0, keys, values), 0.4, softmax)
    step.commit()
    return queries, output, cache, tracks


@costly
@given(
    st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=3),
    seeds,
    softmaxes,
    st.sampled_from([1, 700, blocks.BLOCK_BYTES]),
)
def test_blocks_of_queries_equal_loops_over_queries_and_rows(
    lengths: list[tuple[int, int]], seed: int, softmax: Softmax, block_bytes: int
) -> None:
    before, new = ([pair[i] for pair in lengths] for i in (0, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK_BYTES", block_bytes)
        queries, output, cache, tracks = attended(before, new, seed, softmax)
    layer = cache.layers[0]
    for b, (num_before, num_new) in enumerate(lengths):
        for token in range(num_new):
            column = token - num_new  # pads are on the left
            num_seen = num_before + token + 1
            of_heads = []
            for head in range(NUM_HEADS):
                weights, logits = weights_of(
                    queries[b, head, column].tolist(),
                    layer.keys[b, head // GROUP, :num_seen].tolist(),
                    softmax,
                    head,
                )
                expected = [
                    math.fsum(w * x for w, x in zip(weights, values, strict=True))
                    for values in layer.values[b, head // GROUP, :num_seen].T.tolist()
                ]
                torch.testing.assert_close(
                    output[b, head, column], torch.tensor(expected), atol=ATOL, rtol=0
                )
                of_heads.append(list(zip(weights, logits, strict=True)))
            for name, track in tracks.items():
                for head, row in itertools.product(range(NUM_KV_HEADS), range(num_seen)):
                    group = [one[row] for one in of_heads[head * GROUP : (head + 1) * GROUP]]
                    track[b, head, row] = reference.accumulated(
                        name,
                        float(track[b, head, row]),
                        *zip(*group, strict=True),
                    )
    for name, track in tracks.items():
        atol = LOGIT_ATOL if "logit" in name else ATOL
        torch.testing.assert_close(layer.tracks[name].double(), track, atol=atol, rtol=0)


def weights_of(
    query: list[float], keys: list[list[float]], softmax: Softmax, head: int
) -> tuple[list[float], list[float]]:
    """Weights of one query over the rows it sees, and what the softmax reads."""
    logits = [0.4 * math.fsum(q * k for q, k in zip(query, key, strict=True)) for key in keys]
    if softmax.softcap is not None:
        logits = [softmax.softcap * math.tanh(logit / softmax.softcap) for logit in logits]
    powers = [math.exp(logit) for logit in logits]
    sink = 0.0 if softmax.sinks is None else math.exp(softmax.sinks[head])
    return [power / (math.fsum(powers) + sink) for power in powers], logits


@pytest.mark.parametrize("softmax", [PLAIN, Softmax(softcap=3.0), Softmax(sinks=torch.zeros(4))])
def test_memory_does_not_grow_with_the_queries(
    softmax: Softmax, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1 << 18)
    shape = LayerShape(NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.float32, torch.device("cpu"))

    def beyond_the_output(length: int) -> int:
        cache = KVCache([shape], [Slab(1024, tracks=("attn_sums",))], 2)
        cache.rows[:] = cache.seq_len[:] = 1024 - length
        step = EagerStep(cache, [0, 1], [length] * 2)
        new = torch.zeros(2, NUM_KV_HEADS, length, HEAD_DIM)
        queries = torch.zeros(2, NUM_HEADS, length, HEAD_DIM)
        rows = step.store(0, new, new)
        peak = peak_allocated(lambda: attention.attend(step, 0, queries, *rows, 0.4, softmax))
        return peak - queries.nbytes

    # Weights and logits of a block, and a little for sums and the block's output.
    assert 1 << 18 <= beyond_the_output(512) <= 2.5 * (1 << 18)
    assert beyond_the_output(512) <= 1.1 * beyond_the_output(64)
