"""What must hold wherever slabs are, `--device cuda` included: rows beside a plain gather."""

import pytest
import torch

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab

HEADS, ROWS, SLOTS = 2, 40, 3


@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kept", [1, 17, ROWS - 1])
def test_rows_that_stay_are_those_of_a_gather(
    device: torch.device, dtype: torch.dtype, num_kept: int, bits: int
) -> None:
    """As they are stored; heads of 20 channels have 30 bytes in 4 bits, no whole words."""
    rng = torch.Generator().manual_seed(num_kept)
    shape = LayerShape(HEADS, HEADS, 20, dtype, device)
    cache = KVCache([shape], [Slab(ROWS, key_bits=bits, value_bits=bits)], SLOTS)
    layer = cache.layers[0]
    drawn = []
    for stored in (layer.store.keys, layer.store.values):
        rows = torch.randn(SLOTS, HEADS, ROWS, 20, generator=rng).to(device)
        drawn.append(stored.encode(rows))
        stored.slab.copy_(drawn[-1])
    layer.positions.copy_(torch.arange(ROWS, device=device).expand_as(layer.positions))
    cache.rows[:], cache.seq_len[:] = ROWS, ROWS
    order = torch.rand(2, HEADS, ROWS, generator=rng).argsort(dim=-1)
    kept = order[..., :num_kept].sort(dim=-1).values.to(device)
    LayerRows(cache, 0, [0, 2]).keep(kept)
    index = kept[..., None].expand(-1, -1, -1, drawn[0].shape[3])
    for slab, before in zip(layer.store.slabs, drawn, strict=True):
        assert torch.equal(slab[[0, 2], :, :num_kept], before[[0, 2]].gather(2, index))
        assert torch.equal(slab[1], before[1])
    assert torch.equal(layer.positions[[0, 2], :, :num_kept], kept)
    assert cache.rows[0].tolist() == [num_kept, ROWS, num_kept]
