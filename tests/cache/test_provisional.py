"""A forward is provisional until it is committed: in no layout does it leave a trace before."""

from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor

from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.cache.slot_contents import copy_slot

SHAPE = LayerShape(2, 2, 4, torch.float32, torch.device("cpu"))
WINDOWED = attrs.evolve(SHAPE, sliding_window=8)
SLAB = Slab(12, window_size=3, tracks=("attn_sums", "annotate"))
LAYERS = {
    "even": (SHAPE, SLAB),
    "ragged": (SHAPE, attrs.evolve(SLAB, ragged=True)),
    "prompt kept": (SHAPE, attrs.evolve(SLAB, room=5)),
    "window": (WINDOWED, attrs.evolve(SLAB, capacity=7)),
    "a whole window": (WINDOWED, SLAB),
    "a whole window of a prompt": (WINDOWED, attrs.evolve(SLAB, room=5)),
}
SLOTS = [0, 2]


def forward(cache: KVCache, lengths: list[int]) -> EagerStep:
    """All that a forward does before its commit."""
    step = EagerStep(cache, SLOTS, lengths)
    for layer_idx in range(len(cache.layers)):
        new = torch.randn(2, 2, step.width, 4)
        keys, _ = step.store(layer_idx, new, -new)
        opened = step.layers[layer_idx]
        opened.remember(torch.randn(2, 2, step.width, 4))
        opened.receive("attn_sums", torch.rand(keys.shape[:3]))
        step.annotate(layer_idx, {"annotate": torch.rand(sum(lengths), 2)})
    return step


def tensors(cache: KVCache) -> list[Tensor]:
    counts = [torch.from_numpy(array.copy()) for array in cache.counts.per_slot]
    return [*counts, *(one.clone() for layer in cache.layers for one in layer.tensors)]


def seen_by_hooks(cache: KVCache) -> list[Tensor]:
    """What is held, and nothing behind it."""
    held = [one for slot in range(3) for one in copy_slot(cache, slot).tensors]
    rows = [LayerRows(cache, 0, [slot]) for slot in SLOTS]
    return [*held, *(tensor for one in rows for tensor in (one.keys, one.queries, one.num_new))]


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("lengths", [[1, 1], [3, 2]])
def test_an_uncommitted_forward_has_changed_nothing(kind: str, lengths: list[int]) -> None:
    torch.manual_seed(0)
    shape, slab = LAYERS[kind]
    cache = KVCache([shape] * 2, [slab] * 2, 3)
    cache.prompt_len[:] = 3
    forward(cache, [2, 4]).commit()
    if cache.slides.any():  # one slot is full then
        forward(cache, [1, 5]).commit()
    while 40 > cache.num_free_rows(SLOTS).min() > max(lengths):
        forward(cache, [1, 1]).commit()
    for ended in (lambda step: None, EagerStep.discard):
        _leaves_no_trace(cache, lengths, ended)
    before = cache.seq_len.copy()
    forward(cache, lengths).commit()
    assert (cache.seq_len[SLOTS] - before[SLOTS]).tolist() == lengths


def _leaves_no_trace(
    cache: KVCache, lengths: list[int], ended: Callable[[EagerStep], None]
) -> None:
    before, seen = tensors(cache), seen_by_hooks(cache)
    ended(forward(cache, lengths))
    assert all(map(torch.equal, seen, seen_by_hooks(cache)))
    if ended is EagerStep.discard:
        assert all(map(torch.equal, before, tensors(cache)))
    else:
        # In free rows there is something now; a commit writes over it.
        EagerStep.discard(forward(cache, lengths))


def test_discarded_rows_with_nan_do_not_reach_a_neighbour() -> None:
    cache = KVCache([SHAPE], [Slab(8)], 3)
    step = EagerStep(cache, [0, 2], [3, 6])
    step.store(0, torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4))
    step.commit()
    failed = EagerStep(cache, [0], [2])
    failed.store(0, *(torch.full((1, 2, 2, 4), torch.nan) for _ in range(2)))
    failed.discard()
    keys, _ = EagerStep(cache, [0, 2], [1, 1]).store(0, *torch.randn(2, 2, 2, 1, 4))
    assert keys.isfinite().all()
