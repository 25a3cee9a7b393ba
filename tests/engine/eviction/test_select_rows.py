"""`select_rows` keeps what a compaction of the engine keeps, and fits a paged cache."""

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Scores
from scripts import load_script
from strategies import Drawn, caches, costly, seeds
from tiny import shared_model
from torch import Tensor

from kvpolicy import (
    CacheView,
    Engine,
    Memory,
    Plan,
    SequenceMemory,
    hookimpl,
    load_policy,
    select_rows,
    top_rows,
)
from kvpolicy.errors import BudgetError, HookResultError, KVPolicyError
from kvpolicy.hooks.stack import Stack
from kvpolicy.testing import replay

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "other-engines.md"
POLICIES = ("h2o", "snapkv", "rkv", "streaming", "tova", "knorm", "mix", "random")


# As in the engine


@attrs.define(eq=False)
class Asks:
    """Asks `select_rows` at each compaction, and compares it with what is selected; a wrapper."""

    name: str
    budget: int = 12
    calls: int = 0

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        queries: Tensor,
        attn_sums: Tensor,
        seq_len: Tensor,
        prompt_len: Tensor,
        num_new: Tensor,
        memory: Memory,
    ) -> Any:
        stack = Stack([(self.name, load_policy(self.name))])
        names = [name for name in stack.tracks if name != "attn_sums"]
        own = memory.of(self)
        stored = own[0].get(layer_idx, {})
        rows = CacheView(
            keys=keys,
            values=values,
            positions=positions,
            queries=queries,
            tracks={"attn_sums": attn_sums}
            | {name: _at(stored.get(name), positions) for name in names},
            seq_len=seq_len,
            prompt_len=prompt_len,
            num_new=num_new,
            layer_idx=layer_idx,
        )
        selection = select_rows(stack, rows, budget=self.budget)
        own[0][layer_idx] = {
            name: (positions.clone(), selection.tracks[0][name].clone()) for name in names
        }
        own[0]["keep"] = selection.keep
        return (yield)

    @hookimpl(wrapper=True)
    def select(self, memory: Memory) -> Any:
        keep = yield
        assert torch.equal(keep, memory.of(self)[0]["keep"])
        self.calls += 1
        return keep


def _at(stored: tuple[Tensor, Tensor] | None, positions: Tensor) -> Tensor:
    """Numbers that a row had after the last decision; 0 for rows that are new."""
    found = torch.zeros(positions.shape)
    if stored is None:
        return found
    for place in torch.cartesian_prod(*map(torch.arange, positions.shape[:2])).tolist():
        known = dict(zip(stored[0][*place].tolist(), stored[1][*place].tolist(), strict=True))
        found[*place] = torch.tensor([known.get(t, 0.0) for t in positions[*place].tolist()])
    return found


@costly
@given(st.sampled_from(POLICIES), seeds)
def test_decisions_equal_the_compactions_of_the_engine(name: str, seed: int) -> None:
    asks = Asks(name)
    plan = Plan.uniform(name, asks, budget=12, buffer=3)
    engine = Engine(shared_model(num_layers=2), plan=plan, slots=1, chunk=5)
    prompt = [3 + (seed * t) % 50 for t in range(17)]
    engine.generate([prompt], max_new_tokens=12).results()
    assert asks.calls > 4


@given(caches(min_rows=12), st.sampled_from(POLICIES))
def test_decisions_are_pure(drawn: Drawn, name: str) -> None:
    """Nothing given is changed, and the same is decided again."""
    positions = torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3])
    given_rows = CacheView(
        keys=drawn.keys,
        values=drawn.values,
        positions=positions,
        queries=drawn.queries,
        tracks={"attn_sums": drawn.keys.norm(dim=-1)},
    )
    tensors = [drawn.keys, drawn.values, drawn.queries, given_rows.tracks["attn_sums"]]
    before = [tensor.clone() for tensor in tensors]
    first, second = (select_rows(name, given_rows, budget=11) for _ in range(2))
    assert torch.equal(first.keep, second.keep)
    assert all(map(torch.equal, tensors, before))
    assert list(given_rows.tracks) == ["attn_sums"]


@given(caches(batch=2, min_rows=12, max_rows=20), st.data())
def test_replay_of_decisions_equals_replay_of_the_engine(drawn: Drawn, data: st.DataObject) -> None:
    """Rounds of decisions, whose tracks are carried over by hand, keep the rows of `replay`."""
    name = data.draw(st.sampled_from(["rkv", "snapkv"]))
    first = data.draw(st.integers(10, drawn.num_rows - 1))
    queries = _all_queries(drawn)
    compact_at = [first, drawn.num_rows]
    inputs = (drawn.keys, drawn.values, queries)
    kept = replay(name, *inputs, budget=9, prompt=first, compact_at=compact_at)
    stack = Stack([(name, load_policy(name))])
    positions = torch.arange(first).expand(*drawn.keys.shape[:2], -1)
    tracks: dict[str, Tensor] = {}
    for end, expected in zip((first, drawn.num_rows), kept, strict=True):
        if end != first:
            more = torch.arange(first, end).expand(*drawn.keys.shape[:2], -1)
            positions = torch.cat([positions, more], dim=2)
            zeros = torch.zeros(more.shape)
            tracks = {one: torch.cat([track, zeros], dim=2) for one, track in tracks.items()}
        index = positions[..., None].expand(-1, -1, -1, drawn.keys.shape[3])
        rows = CacheView(
            keys=drawn.keys.gather(2, index),
            values=drawn.values.gather(2, index),
            positions=positions,
            queries=queries[:, :, max(end - 8, 0) : end],
            tracks=tracks,
            seq_len=torch.tensor([end] * 2),
        )
        selection = select_rows(stack, rows, budget=9)
        positions = positions.gather(2, selection.keep)
        tracks = {
            one: track.gather(2, selection.keep) for one, track in selection.tracks[0].items()
        }
        assert torch.equal(positions, expected)


def _all_queries(drawn: Drawn) -> Tensor:
    rng = torch.Generator().manual_seed(drawn.num_rows)
    size = (drawn.keys.shape[0], drawn.queries.shape[1], drawn.num_rows, drawn.keys.shape[3])
    return torch.randn(size, generator=rng)


# The same rows


@given(caches(min_rows=6), st.integers(2, 5))
def test_heads_that_keep_the_same_rows_use_their_mean_score(drawn: Drawn, budget: int) -> None:
    shape = drawn.keys.shape[:3]
    positions = torch.arange(drawn.num_rows).expand(shape)
    long_keys = Scores(lambda _: drawn.keys.norm(dim=-1))
    selection = select_rows(
        long_keys, CacheView(positions=positions), budget=budget, same_heads=True
    )
    mean = drawn.keys.norm(dim=-1).mean(dim=1, keepdim=True)
    assert torch.equal(selection.keep, top_rows(mean, budget)[:, 0])


@given(caches(min_rows=6), st.integers(3, 5))
def test_layers_that_keep_the_same_rows_are_like_more_heads(drawn: Drawn, budget: int) -> None:
    """Two layers decide as one layer with the heads of both; `protects` holds."""
    shape = drawn.keys.shape[:3]
    positions = torch.arange(drawn.num_rows).expand(shape)
    layers = [
        CacheView(positions=positions, keys=keys, layer_idx=i)
        for i, keys in enumerate((drawn.keys, drawn.keys.flip(2)))
    ]
    stack = [load_policy("knorm", n_recent=1), load_policy("protect", n_sink=1, n_recent=1)]
    both = CacheView(
        positions=torch.cat([positions] * 2, dim=1),
        keys=torch.cat([one.keys for one in layers], dim=1),
    )
    together = select_rows(stack, layers, budget=budget)
    assert torch.equal(together.keep, select_rows(stack, both, budget=budget, same_heads=True).keep)
    assert len(together.tracks) == 2
    assert (together.keep[:, 0] == 0).all()
    assert (together.keep[:, -1] == drawn.num_rows - 1).all()


def test_a_row_protected_in_one_head_stays_in_all() -> None:
    @attrs.define(eq=False)
    class OneHead:
        @hookimpl
        def protect(self, positions: Tensor) -> Tensor:
            mask = torch.zeros(positions.shape, dtype=torch.bool)
            mask[:, 1, 0] = True
            return mask

    rows = CacheView(positions=torch.arange(6).expand(1, 3, 6))
    assert select_rows(OneHead(), rows, budget=2, same_heads=True).keep.tolist() == [[0, 5]]


@pytest.mark.parametrize("same_heads", [False, True])
def test_rows_that_a_policy_scores_inf_come_behind_protected_ones(same_heads: bool) -> None:
    @attrs.define(eq=False)
    class AllStay:
        @hookimpl
        def score(self, positions: Tensor) -> Tensor:
            return torch.full(positions.shape, torch.inf)

    protect = load_policy("protect", n_sink=2, n_recent=0)
    rows = CacheView(positions=torch.arange(8).expand(1, 2, 8))
    kept = select_rows([AllStay(), protect], rows, budget=4, same_heads=same_heads).keep
    assert kept.reshape(-1, 4)[0].tolist() == [0, 1, 6, 7]


def test_all_rows_stay_within_the_budget() -> None:
    rows = CacheView(positions=torch.arange(4).expand(2, 3, 4))
    assert select_rows("streaming", rows, budget=5).keep.tolist() == [[[0, 1, 2, 3]] * 3] * 2
    shared = select_rows("streaming", [rows, rows], budget=5)
    assert shared.keep.tolist() == [[0, 1, 2, 3]] * 2


def test_memory_is_passed_on_by_the_caller() -> None:
    @attrs.define(eq=False)
    class Counts:
        @hookimpl
        def score(self, positions: Tensor, memory: Memory) -> Tensor:
            (own,) = memory.of(self)
            own["calls"] = own.get("calls", 0) + 1
            return positions * (-1.0) ** own["calls"]

    rows, memory, counts = (
        CacheView(positions=torch.arange(4)[None, None]),
        SequenceMemory(),
        Counts(),
    )
    kept = [select_rows(counts, rows, budget=1, memory=[memory]).keep.item() for _ in range(3)]
    assert kept == [0, 3, 0]


# Errors


POSITIONS = torch.arange(20).expand(1, 2, 20)
ONES = torch.ones(1, 2, 20, 4)


@pytest.mark.parametrize(
    ("policy", "given_rows", "budget", "error", "message"),
    [
        ("snapkv", {}, 12, KVPolicyError, "'snapkv' .*keys"),
        ("snapkv", {"keys": ONES}, 12, KVPolicyError, "queries"),
        ("h2o", {}, 12, KVPolicyError, "attn_sums"),
        ("snapkv", {}, 7, BudgetError, "8 .*budget of 7"),
        ("knorm", {"keys": ONES[:, :, 1:]}, 12, KVPolicyError, r"keys .*\[1, 2, 19, 4\]"),
        ("knorm", {"keys": ONES[0]}, 12, KVPolicyError, r"keys .*\[1, 2, 20, any\]"),
        ("knorm", {"positions": POSITIONS[0]}, 12, KVPolicyError, r"\[B, H_kv, T\]"),
        (Scores(lambda p: p), {}, 12, HookResultError, "'scores' .*int64"),
    ],
)
def test_wrong_calls_raise_one_sentence(
    policy: Any, given_rows: dict, budget: int, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        select_rows(policy, CacheView(**{"positions": POSITIONS} | given_rows), budget=budget)


def test_rows_at_different_positions_cannot_be_the_same() -> None:
    positions = torch.stack([torch.arange(20), torch.arange(1, 21)])[None]
    with pytest.raises(KVPolicyError, match="positions"):
        select_rows("streaming", CacheView(positions=positions), budget=9, same_heads=True)
    with pytest.raises(KVPolicyError, match="positions"):
        select_rows(
            "streaming", [CacheView(positions=one[None, None]) for one in positions[0]], budget=9
        )
    with pytest.raises(KVPolicyError, match="layers"):
        select_rows("streaming", [], budget=9)


# A paged cache


EX: Any = load_script("examples/paged_cache.py")
MODEL = EX.Decoder()


def cache_of(policy: str, budget: int | None, buffer: int = 4, block_size: int = 4) -> Any:
    plan = Plan.uniform(policy, budget=budget, buffer=buffer)
    return EX.PagedCache(plan, 64, block_size, MODEL.layers, MODEL.kv_heads, MODEL.dim)


prompts = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=3)
paged_policies = st.sampled_from(["h2o", "rkv", "snapkv", "streaming"])


@given(prompts, paged_policies, st.integers(1, 5))
def test_a_paged_cache_within_its_budget_is_a_full_one(
    given_prompts: list[list[int]], policy: str, block_size: int
) -> None:
    full = EX.generate(MODEL, cache_of("full", None), given_prompts, 10)
    budget = max(map(len, given_prompts)) + 10
    assert EX.generate(MODEL, cache_of(policy, budget, 4, block_size), given_prompts, 10) == full


@costly
@given(prompts, paged_policies, st.integers(10, 14), st.integers(1, 5))
def test_sequences_of_a_paged_cache_are_independent_and_free_their_blocks(
    given_prompts: list[list[int]], policy: str, budget: int, block_size: int
) -> None:
    cache = cache_of(policy, budget, 3, block_size)
    together = EX.generate(MODEL, cache, given_prompts, 14)
    alone = [
        EX.generate(MODEL, cache_of(policy, budget, 3, 2), [prompt], 14)[0]
        for prompt in given_prompts
    ]
    assert together == alone
    assert sorted(cache.free) == list(range(64))
    assert cache.most_used <= len(given_prompts) * -(-(budget + 3) // block_size)


@pytest.mark.slow
def test_the_page_states_what_the_example_prints(capsys: pytest.CaptureFixture[str]) -> None:
    EX.main()
    printed = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    page = PAGE.read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.endswith("of 120 |")]
    assert [line.replace("`", "").replace("|", " ").split() for line in rows] == printed


@given(paged_policies, st.integers(1, 5))
def test_positions_go_on_after_evictions(policy: str, block_size: int) -> None:
    cache = cache_of(policy, 10, 3, block_size)
    empty = torch.zeros(MODEL.layers, MODEL.heads, 0, MODEL.dim)
    sequence = EX.PagedSequence(5, empty)
    for token in range(30):
        MODEL.step(cache, sequence, token)
        positions = cache.read(sequence, "positions")
        assert positions[0, 0, -1] == token == sequence.logical_len - 1
        assert (positions == positions[:1, :1]).all()
        assert (positions.diff(dim=2) > 0).all()
        cache.compact(sequence)
        assert sequence.physical_len in (len(positions[0, 0]), 10)
    assert sequence.physical_len < 13
