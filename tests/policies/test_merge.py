"""Merge averages evicted rows into the nearest kept row and changes nothing else."""

from typing import Any

import pytest
import reference
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kvpolicy_plugins.merge import leaving_rows
from policy_checks import (
    assert_batch_equals_single_rows,
    assert_nothing_leaves,
)
from recorder import Recorder
from strategies import Drawn, caches, prompts
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, load_policy
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.state import Memory, SequenceMemory
from kvpolicy.testing import Trial

KNOBS: tuple[dict[str, Any], ...] = (
    {},
    {"beta": 0.3},
    {"weights": "mean"},
    {"merge_keys": False},
    {"beta": 1, "weights": "mean", "merge_keys": False},
)
knobs = st.sampled_from(KNOBS)

#: Tolerance for averages of rows of norm about 1 to 10, fp32 against double precision.
ATOL = 1e-5

#: A row is merged into the nearest row if its similarity exceeds a threshold. Cases with smaller
#: margins than this are skipped: similarities are compared in steps of 2^-14.
MIN_MARGIN = 1e-4


class Bench:
    """Rows of some sequences in one layer, for repeated evictions."""

    def __init__(self, drawn: Drawn, *, extra: int = 0, **knobs: Any) -> None:
        self.policy = load_policy("merge", **knobs)
        batch, heads, num_rows, size = drawn.keys.shape
        shape = LayerShape(heads, heads, size, drawn.keys.dtype, drawn.keys.device)
        self.cache = KVCache([shape], [Slab(num_rows + extra, tracks=("mark",))], batch)
        self.memories = [SequenceMemory() for _ in range(batch)]
        self.append(drawn.keys, drawn.values)

    def append(self, keys: Tensor, values: Tensor) -> None:
        layer, first = self.cache.layers[0], int(self.cache.rows[0, 0])
        new = slice(first, first + keys.shape[2])
        layer.keys[:, :, new], layer.values[:, :, new] = keys, values
        layer.positions[:, :, new] = torch.arange(keys.shape[2]) + int(self.cache.seq_len[0])
        layer.tracks["mark"][:, :, new] = layer.positions[:, :, new].float()
        self.cache.rows[0] += keys.shape[2]
        self.cache.seq_len += keys.shape[2]

    @property
    def rows(self) -> LayerRows:
        return LayerRows(self.cache, 0, range(self.cache.num_slots))

    def evict(self, keep: Tensor) -> bool | None:
        return self.policy.evict(0, self.rows, keep, Memory(self.memories))


@st.composite
def kept_rows(draw: st.DrawFn, drawn: Drawn, num_rows: int | None = None) -> Tensor:
    """Kept rows: the same number in every head, but different rows."""
    batch, heads = drawn.keys.shape[:2]
    total = drawn.num_rows if num_rows is None else num_rows
    num = draw(st.integers(1, total - 1))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    order = torch.rand(batch, heads, total, generator=rng).argsort(dim=2)
    return order[:, :, :num].sort(dim=2).values


def some_rows(**more: Any) -> st.SearchStrategy[Drawn]:
    return caches(min_rows=2, max_rows=16, num_queries=1, **more)


# Against the oracle


@given(st.data(), some_rows(), knobs)
def test_merged_rows_equal_the_oracle(
    data: st.DataObject, drawn: Drawn, knobs: dict[str, Any]
) -> None:
    """Two compactions with new rows in between; the threshold carries over."""
    new_rows = data.draw(
        some_rows(
            batch=drawn.keys.shape[0],
            num_kv_heads=drawn.keys.shape[1],
            head_dim=drawn.keys.shape[3],
        )
    )
    bench = Bench(drawn, extra=new_rows.num_rows, **knobs)
    pairs = [(b, h) for b in range(drawn.keys.shape[0]) for h in range(drawn.keys.shape[1])]
    rule = {name: knob for name, knob in knobs.items() if name != "merge_keys"}
    oracles = {pair: reference.Merger(**rule) for pair in pairs}
    for step in range(2):
        before = [bench.rows.keys.clone(), bench.rows.values.clone()]
        keep = data.draw(kept_rows(drawn, bench.rows.num_rows))
        assert bench.evict(keep) is True
        for b, h in pairs:
            keys, values = (one[b, h].double().tolist() for one in before)
            kept = keep[b, h].tolist()
            new_keys, new_values, margin, lead = oracles[b, h].merge(keys, values, kept)
            # A single evicted row defines the threshold, so its margin is exactly 0.
            is_clear = margin > MIN_MARGIN or (step == 0 and len(keys) - len(kept) == 1)
            # Of equally near rows, both take the first.
            assume(is_clear and (lead == 0 or lead > MIN_MARGIN))
            if knobs.get("merge_keys") is False:
                new_keys = [keys[t] for t in kept]
            assert_rows_equal(bench.rows.keys[b, h], new_keys)
            assert_rows_equal(bench.rows.values[b, h], new_values)
        if step == 0:
            bench.append(new_rows.keys, new_rows.values)


def assert_rows_equal(rows: Tensor, expected: list[list[float]]) -> None:
    assert torch.allclose(rows.double(), torch.tensor(expected).double(), atol=ATOL)


def test_worked_example() -> None:
    """Two rows are evicted: one has the direction of a kept row, the other of none."""
    keys = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [-1.0, -1.0]])[None, None]
    values = torch.tensor([[10.0], [20.0], [30.0], [40.0]]).expand(4, 2)[None, None]
    bench = Bench(Drawn(keys, values, keys, "by hand", 0))
    bench.evict(torch.tensor([[[0, 1]]]))
    # Row 2 is parallel to row 0 (u = 1): equal weights. Row 3 (u = -0.7) is below the mean, 0.15.
    assert torch.allclose(bench.rows.keys, torch.tensor([[[[2.0, 0.0], [0.0, 2.0]]]]))
    assert torch.allclose(bench.rows.values[0, 0, :, 0], torch.tensor([20.0, 20.0]))


# Invariants


@given(some_rows())
def test_keeping_all_rows_changes_nothing(drawn: Drawn) -> None:
    bench = Bench(drawn)
    everything = torch.arange(drawn.num_rows).expand(*drawn.keys.shape[:2], -1)
    before = bench.rows.keys.clone(), bench.rows.values.clone()
    assert bench.evict(everything) is None
    assert torch.equal(bench.rows.keys, before[0])
    assert torch.equal(bench.rows.values, before[1])
    assert_nothing_leaves("merge", drawn, drawn.num_rows)


@given(st.data(), some_rows(), knobs)
def test_positions_and_tracks_follow_the_kept_rows(
    data: st.DataObject, drawn: Drawn, knobs: dict[str, Any]
) -> None:
    bench = Bench(drawn, **knobs)
    keep = data.draw(kept_rows(drawn))
    bench.evict(keep)
    assert torch.equal(bench.rows.positions, keep)
    assert torch.equal(bench.rows.track("mark"), keep.float())


@given(st.data(), some_rows())
def test_merged_rows_are_averages_of_existing_rows(data: st.DataObject, drawn: Drawn) -> None:
    """With the paper's weights, no merged value exceeds the range of its inputs."""
    bench = Bench(drawn)
    bench.evict(data.draw(kept_rows(drawn)))
    for new, old in ((bench.rows.keys, drawn.keys), (bench.rows.values, drawn.values)):
        assert (new <= old.amax(dim=2, keepdim=True) + ATOL).all()
        assert (new >= old.amin(dim=2, keepdim=True) - ATOL).all()
        longest = old.norm(dim=3).amax(dim=2, keepdim=True)
        assert (new.norm(dim=3) <= longest + ATOL).all()


@given(st.data(), some_rows(), knobs)
def test_rows_without_merges_are_bit_identical(
    data: st.DataObject, drawn: Drawn, knobs: dict[str, Any]
) -> None:
    bench = Bench(drawn, **knobs)
    keep = data.draw(kept_rows(drawn))
    wide = keep[..., None].expand(-1, -1, -1, drawn.keys.shape[3])
    bench.evict(keep)
    changed = (bench.rows.values != drawn.values.gather(2, wide)).any(dim=3)
    num_leaving = drawn.num_rows - keep.shape[2]
    assert (changed.sum(dim=2) <= num_leaving).all(), "an evicted row is merged into one row only"
    keys_changed = (bench.rows.keys != drawn.keys.gather(2, wide)).any(dim=3)
    assert not (keys_changed & ~changed).any()
    if knobs.get("merge_keys") is False:
        assert not keys_changed.any()


@given(st.data(), some_rows(batch=3), knobs)
def test_merging_does_not_depend_on_other_sequences(
    data: st.DataObject, drawn: Drawn, knobs: dict[str, Any]
) -> None:
    keep = data.draw(kept_rows(drawn))
    batched = Bench(drawn, **knobs)
    batched.evict(keep)
    for b in range(3):
        alone = Bench(drawn.row(b), **knobs)
        alone.evict(keep[b : b + 1])
        assert torch.allclose(batched.rows.keys[b], alone.rows.keys[0], atol=ATOL)
        assert torch.allclose(batched.rows.values[b], alone.rows.values[0], atol=ATOL)
    assert_batch_equals_single_rows("merge", drawn, 4)


def test_ties_between_rows_are_broken_equally_in_any_batch() -> None:
    """Zero and repeated keys: every decision is a tie, up to rounding."""
    sizes = {"budget": 7, "chunk": 1, "kv_heads": 3, "group": 3, "head_dim": 8, "seed": 128}
    trial = Trial("merge", {"beta": 0.3}, numbers="zeros", where="last", **sizes)
    for prompt in (1, 1, 1, 1, 10):
        trial.arrive(prompt=prompt, new=1)
    trial.finish()


@given(st.data(), some_rows())
def test_evict_writes_only_the_kept_rows(data: st.DataObject, drawn: Drawn) -> None:
    keep = data.draw(kept_rows(drawn))
    bench = Bench(drawn)
    bench.evict(keep)
    num = keep.shape[2]
    assert bench.rows.num_rows == num
    assert (bench.cache.layers[0].positions[:, :, num:] == -1).all()


@given(st.data(), some_rows(batch=2))
def test_leaving_rows_are_the_complement_of_keep(data: st.DataObject, drawn: Drawn) -> None:
    keep = data.draw(kept_rows(drawn))
    both = torch.cat([keep, leaving_rows(keep, drawn.num_rows)], dim=2).sort(dim=2).values
    assert (both == torch.arange(drawn.num_rows)).all()


def test_merged_rows_keep_their_dtype() -> None:
    drawn = Drawn(*(torch.randn(1, 2, 9, 4).bfloat16() for _ in range(3)), "gauss", 0)
    bench = Bench(drawn)
    bench.evict(torch.arange(5).expand(1, 2, 5))
    assert bench.rows.keys.dtype == torch.bfloat16


# In the engine


@pytest.mark.nightly
@given(prompts(count=3, max_len=40), st.sampled_from(["h2o", "snapkv", "rkv"]))
def test_first_compaction_keeps_the_same_tokens_with_and_without_merge(
    prompts: list[list[int]], name: str
) -> None:
    """The first compaction selects rows before any merge; later ones may differ."""
    kept = []
    for stack in ([name], [name, "merge"]):
        recorder = Recorder(follows=False)
        plan = Plan.uniform(*stack, recorder, budget=14, buffer=6)
        Engine(shared_model(), plan=plan, slots=3).generate(prompts, max_new_tokens=24).results()
        kept.append([record.of_layer(0)[0].kept for record in recorder.records])
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@given(st.data(), some_rows(batch=2))
def test_threshold_is_per_sequence_layer_and_head(data: st.DataObject, drawn: Drawn) -> None:
    keep = data.draw(kept_rows(drawn))
    first, second = Bench(drawn), Bench(drawn)
    first.evict(keep)
    # Another layer of the same sequences starts without a threshold, as the first did.
    memory = Memory(first.memories)
    first.policy.evict(1, second.rows, keep, memory)
    for notes in memory.of(first.policy):
        assert list(notes) == ["layer 0", "layer 1"]
        assert torch.equal(notes["layer 0"], notes["layer 1"])
        assert notes["layer 0"].shape == drawn.keys.shape[1:2]
    assert torch.equal(first.rows.keys, second.rows.keys)


def test_rows_outside_the_sliding_window_are_not_merged() -> None:
    """Otherwise their content would be visible again in a row inside the window."""
    shape = LayerShape(1, 1, 4, torch.float32, torch.device("cpu"), sliding_window=10)
    cache, keys = KVCache([shape], [Slab(4)], 1), torch.ones(1, 1, 4, 4)
    values = torch.eye(4)[None, None]
    layer = cache.layers[0]
    layer.keys[:], layer.values[:] = keys, values
    layer.positions[:] = torch.tensor([2, 15, 17, 19])
    cache.rows[:], cache.seq_len[:] = 4, 20  # the next query sees positions above 10
    rows, keep = LayerRows(cache, 0, [0]), torch.tensor([[[2, 3]]])
    policy, memory = load_policy("merge"), Memory([SequenceMemory()])
    assert policy.evict(layer_idx=0, rows=rows, keep=keep, memory=memory)
    stored = layer.values[0, 0, :2]
    assert not stored[:, 0].any()
    assert stored[:, 1].any()
