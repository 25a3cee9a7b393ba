"""Filled caches hold what they would after a long time."""

import torch
from bench_parts import HEAD_DIM, HEADS, LAYERS, cell
from hypothesis import given
from hypothesis import strategies as st
from tiny import shared_model, tiny_model

from kvpolicy.engine.engine import Engine
from kvpolicy.lab.bench.contenders.engine import warm_up
from kvpolicy.lab.bench.contenders.fill import fill_run, filled_dynamic_cache


@given(st.integers(5, 90), st.integers(1, 4), st.sampled_from(["full", "h2o", "snapkv", "knorm"]))
def test_a_filled_run_holds_what_it_would_in_a_steady_state(
    held: int, slots: int, stack: str
) -> None:
    budget, buffer = 16, 8
    engine = Engine(shared_model(), None, cell(stack, budget, buffer).resolved, slots=slots)
    run = engine.generate([[1, 2, 3]] * slots, max_new_tokens=held + 40, stop_ids=())
    warm_up(run)
    fill_run(run, held)
    cache = run.cache
    assert cache.seq_len.tolist() == [held] * slots
    for layer_idx, layer in enumerate(cache.layers):
        for slot in range(slots):
            num = int(cache.rows[layer_idx, slot])
            most = budget + buffer - 1 - (slots - 1 - slot) * buffer // slots
            assert num == (held if stack == "full" else min(held, most))
            positions = layer.positions[slot]
            assert (positions[:, :num].diff(dim=-1) > 0).all(), "rising"
            assert 0 <= positions[:, 0].min() <= positions[:, num - 1].max() < held
            assert (positions[:, num:] == -1).all()
            assert layer.keys[slot, :, :num].std() > 0.5
            is_compacted = bool(cache.compacted_at[layer_idx, slot])
            assert is_compacted == (num < held), "a row further is a position further, or not"
    seen = [len(seq.prompt) + len(seq.tokens) - 1 for seq in run.active]
    assert seen == [held] * slots
    num_steps = 2 * buffer + 1  # what the last of 2 * buffer has made due leaves in the next
    for _ in range(num_steps):
        run.step()
    assert cache.seq_len.tolist() == [held + num_steps] * slots
    if stack != "full" and held >= budget + buffer:
        # Once in a buffer for every sequence and layer, spread over the steps.
        assert run.report.compactions == 2 * slots * LAYERS


def test_a_filled_cache_has_rows_in_all_layers() -> None:
    cache = filled_dynamic_cache(tiny_model(), batch=3, rows=5000)
    assert cache.get_seq_length() == 5000
    assert len(cache.layers) == LAYERS
    for layer in cache.layers:
        assert layer.keys is not None
        assert layer.keys.shape == (3, HEADS, 5000, HEAD_DIM)
        assert not torch.equal(layer.keys, layer.values)
