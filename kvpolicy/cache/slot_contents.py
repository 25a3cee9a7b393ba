"""Copies of what one slot holds, and slots that are filled with such a copy."""

from collections.abc import Sequence

import attrs

from kvpolicy.cache.contents import LayerContents, SlotContents
from kvpolicy.cache.kv_cache import KVCache

__all__ = ["LayerContents", "SlotContents", "copy_slot", "fill_slot"]


def copy_slot(
    cache: KVCache,
    slot: int,
    newest: Sequence[int | None] | None = None,
    seen: int | None = None,
) -> SlotContents:
    """A copy of what a slot holds; the slot stays as it is.

    Args:
        cache: The KV cache.
        slot: The slot.
        newest: How many of its newest rows to copy in each layer; ``None``: all. Where heads share
            the rows of a layer, these must have come since its last compaction. Accumulators are
            copied for all rows in any case, because those of older rows have changed, too.
        seen: Leave out the tokens from this one on. They must have brought a row into each layer,
            none may have left it since, and the layers must have neither accumulators nor queries
            nor states.
    """
    nums = [None] * len(cache.layers) if newest is None else newest
    seq_len = int(cache.seq_len[slot]) if seen is None else seen
    without = int(cache.seq_len[slot]) - seq_len
    assert not (without and cache.states), "no token can be taken out of a state"
    layers = [
        cache.layout_of[layer_idx].copy(layer, slot, num, without)
        for layer_idx, (layer, num) in enumerate(zip(cache.layers, nums, strict=True))
    ]
    for layer_idx, held in cache.states.items():
        layers[layer_idx] = attrs.evolve(layers[layer_idx], states=held.copy(slot))
    counts = int(cache.prompt_len[slot]), int(cache.rope_offset[slot])
    return SlotContents(tuple(layers), seq_len, *counts)


def fill_slot(cache: KVCache, slot: int, contents: SlotContents) -> None:
    """Have a slot hold a copy of some contents, and nothing else; what is to come is as before.

    Args:
        cache: The KV cache; its layers have the shapes, tracks and windows of the contents, and at
            least as many rows for each slot.
        slot: The slot.
        contents: The contents.
    """
    num_prompt = int(cache.num_prompt[slot])
    cache.clear(slot)
    cache.num_prompt[slot] = num_prompt
    cache.seq_len[slot] = contents.seq_len
    cache.prompt_len[slot] = contents.prompt_len
    cache.rope_offset[slot] = contents.rope_offset
    for layer_idx, (layer, held) in enumerate(zip(cache.layers, contents.layers, strict=True)):
        cache.layout_of[layer_idx].fill(layer, slot, held)
    for layer_idx, states in cache.states.items():
        states.fill(slot, contents.layers[layer_idx].states)
