"""Caches filled directly with random rows, so that long texts need no minutes of prefill.

A decode step takes the same time over random rows as over those of a text.
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.engine import Run
from kvpolicy.plan.resolved import LayerPlan

_NUM_DISTINCT = 2048  # rows drawn for a sequence; more are repetitions


def filled_dynamic_cache(
    model: PreTrainedModel, *, batch: int, rows: int, seed: int = 0
) -> DynamicCache:
    """A cache of transformers with as many random rows in every layer, equal in all sequences."""
    rng = torch.Generator().manual_seed(seed)
    config = model.config
    heads, head_dim = config.num_key_value_heads, config.head_dim
    cache = DynamicCache(config=config)
    for layer_idx in range(config.num_hidden_layers):
        drawn = [
            _random_rows((heads, rows, head_dim), model.dtype, model.device, rng) for _ in range(2)
        ]
        keys, values = (one.expand(batch, -1, -1, -1).contiguous() for one in drawn)
        cache.update(keys, values, layer_idx)
    return cache


def fill_run(run: Run, held: int, *, seed: int = 0) -> None:
    """Let the texts of a run have ``held`` tokens, as if each had been prefilled and decoded.

    Layers with a budget hold it and a part of their buffer, another part in each slot, as after
    a long time of requests that arrive one by one: compactions are spread evenly. The last slot
    lacks one row, so that the second step from here compacts it: whoever measures steps need not
    take a whole buffer of them before one has compacted. If the rows of prompts stay, they hold
    those of the prompts that have been prefilled, too.

    Args:
        run: A run whose prompts are all in, with texts that may become so long.
        held: Tokens of each text, the newest, which no forward has seen, left out.
        seed: Random seed for tokens and rows.
    """
    run.catch_up()
    rng = np.random.default_rng(seed)
    cache, active = run.cache, run.active
    for seq in active:
        num_prompt = held - len(seq.tokens) + 1
        vocab_size = run.engine.adapter.vocab_size
        seq.prompt = tuple(rng.integers(vocab_size, size=num_prompt).tolist())
        seq.num_observed = seq.num_annotated = held
        cache.seq_len[seq.slot] = held
    for layer_idx, layer in enumerate(run.engine.plan.layers):
        most = int(cache.capacity[layer_idx])
        rows = {
            seq.slot: min(
                _rows_in_steady_state(
                    layer,
                    held,
                    (len(active) - 1 - number) * layer.buffer // len(active),
                    int(cache.prompt_rows[layer_idx, seq.slot]),
                ),
                most,
            )
            for number, seq in enumerate(active)
        }
        num_kept = (layer.budget or 0) + int(cache.prompt_rows[layer_idx].max())
        _fill_layer(cache, layer_idx, rows, held, num_kept, seed)


def _rows_in_steady_state(layer: LayerPlan, held: int, later: int, prompt_rows: int) -> int:
    """Rows of a slot that is full so many steps after the slot that is full first."""
    if layer.budget is None or not layer.bounded:
        return held
    return min(held, prompt_rows + layer.budget + layer.buffer - 1 - later)


def _fill_layer(
    cache: KVCache,
    layer_idx: int,
    num_rows: Mapping[int, int],
    held: int,
    num_kept: int,
    seed: int,
) -> None:
    """Fill slots of one layer with so many rows each, spread evenly over the text.

    ``num_kept`` of them were left by the compaction before.
    """
    layer = cache.layers[layer_idx]
    rng = torch.Generator().manual_seed(seed + layer_idx)
    size = (layer.shape.num_kv_heads, max(num_rows.values()), layer.shape.head_dim)
    drawn = [
        (one.slab, one.encode(_random_rows(size, layer.shape.dtype, layer.shape.device, rng)))
        for one in (layer.store.keys, layer.store.values)
    ]
    for slot, num in num_rows.items():
        # Rows of a sliding window are the newest, without gaps.
        spread = np.arange(held - num, held) if layer.slides else np.arange(num) * held // num
        layer.positions[slot, :, :num] = torch.from_numpy(spread)
        layer.positions[slot, :, num:] = -1
        for slab, rows in drawn:
            slab[slot, :, :num] = rows[:, :num]
        cache.rows[layer_idx, slot] = num
        has_gaps = num < held and not layer.slides
        cache.compacted_at[layer_idx, slot] = held - (num - num_kept) if has_gaps else 0
    rings = [*layer.store.exact.values(), *([] if layer.window is None else [layer.window])]
    for ring in rings:
        of_slots = (len(num_rows), *ring.shape[1:])
        ring[list(num_rows)] = _random_rows(of_slots, ring.dtype, ring.device, rng)


def _random_rows(
    size: tuple[int, ...], dtype: torch.dtype, device: torch.device, rng: torch.Generator
) -> Tensor:
    """Random rows, ``[..., T, D]``."""
    *outer, rows, head_dim = size
    drawn = torch.randn(*outer, min(rows, _NUM_DISTINCT), head_dim, generator=rng)
    index = torch.arange(rows) % _NUM_DISTINCT
    return drawn.to(dtype)[..., index, :].to(device)
