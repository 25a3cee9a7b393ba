"""Reported bytes equal the bytes that torch's allocator allocates."""

import attrs
import pytest
import torch
from allocations import peak_allocated
from tiny import tiny_model

from kvpolicy import Engine, Plan
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab

SHAPE = LayerShape(8, 4, 32, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("window_size", [0, 8])
@pytest.mark.parametrize("tracks", [(), ("attn_sums",)])
def test_cache_num_bytes_equals_allocated_bytes(window_size, tracks):
    slab = Slab(320, window_size, tracks)
    caches = []
    peak = peak_allocated(lambda: caches.append(KVCache([SHAPE] * 6, [slab] * 6, 8)))
    assert peak == pytest.approx(caches[0].num_bytes, rel=0.02)


@pytest.mark.parametrize("slots", [[0], [0, 1, 2], [0, 2, 3]])
def test_compaction_reports_its_temporary_copy(slots):
    cache = KVCache([SHAPE], [Slab(320)], 4)
    cache.rows[:] = 320
    keep = torch.arange(64, 320).expand(len(slots), SHAPE.num_kv_heads, -1).contiguous()
    peak = peak_allocated(lambda: LayerRows(cache, 0, slots).keep(keep))
    # The indices are allocated as well: one or two bytes for each byte of a head.
    assert cache.transient_bytes <= peak <= 1.5 * cache.transient_bytes
    one_layer = cache.layers[0].keys.nbytes + cache.layers[0].values.nbytes
    assert cache.transient_bytes <= one_layer


@pytest.mark.parametrize("length", [1, 64])
@pytest.mark.parametrize("num_tracks", [0, 100])
def test_sliding_window_reports_its_temporary_copy(length, num_tracks):
    shape = attrs.evolve(SHAPE, sliding_window=320)
    cache = KVCache([shape], [Slab(320, tracks=tuple(map(str, range(num_tracks))))], 4)
    cache.rows[:] = cache.seq_len[:] = 320

    def forward() -> None:
        new = torch.zeros(2, 4, SHAPE.num_kv_heads, length, SHAPE.head_dim)
        step = EagerStep(cache, range(4), [length] * 4)
        step.store(0, *new)
        step.commit()

    peak = peak_allocated(forward)
    assert cache.transient_bytes <= peak <= 1.5 * cache.transient_bytes


def test_a_cache_that_grows_frees_one_stack_before_it_allocates_the_next():
    shapes = [SHAPE, attrs.evolve(SHAPE, head_dim=64)]
    sizes = []

    def grown() -> KVCache:
        cache = KVCache(shapes, [Slab(320)] * 2, 4)
        before = [arena.num_bytes for arena in cache.arenas]
        cache.grow([Slab(400)] * 2)
        sizes.extend((max(before), cache.num_bytes, cache.transient_bytes))
        return cache

    peak = peak_allocated(grown)
    largest, num_bytes, transient = sizes
    assert transient == largest
    assert peak <= num_bytes + transient + 1000


@pytest.mark.slow
def test_peak_kv_bytes_includes_all_cache_tensors_and_temporary_copies():
    model = tiny_model("llama", seed=0)
    engine = Engine(model, None, Plan.uniform("rkv", budget=24, buffer=8), slots=3)
    run = engine.generate([[1, 2, 3]] * 5, max_new_tokens=60)
    results = run.results()
    tensors = [tensor for layer in run.cache.layers for tensor in layer.tensors]
    storages = [tensor.untyped_storage() for tensor in tensors]  # layers share them
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    assert run.report.peak_kv_bytes == held + run.cache.transient_bytes
    assert max(result.peak_bytes for result in results) * 3 <= held
