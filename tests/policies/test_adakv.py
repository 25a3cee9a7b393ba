"""Ada-KV against a loop over heads, the masks of kvpress, and over other policies."""

from typing import Any, ClassVar

import attrs
import pytest
import reference
import torch
from compare import ATOL
from golden_cases import Case, recorded_press
from hypothesis import given
from hypothesis import strategies as st
from reference_adakv import adakv
from strategies import caches, seeds
from tiny import tiny_model
from torch import Tensor

from kvpolicy import CacheView, Engine, Plan, Request, Tracks, hookimpl, select_rows


@attrs.define(eq=False)
class Given:
    """Scores rows as the test says."""

    ragged: ClassVar[bool] = True
    tracks: ClassVar[tuple[str, ...]] = ("rating",)
    protects: ClassVar[tuple[int, int]] = (0, 1)

    @hookimpl
    def score(self, tracks: Tracks) -> Tensor:
        """The rating."""
        return tracks["rating"]


@st.composite
def rated_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Positions, right-aligned with gaps, and ratings with many ties, ``[B, H_kv, T]``."""
    batch, num_heads, num_rows = (draw(st.integers(1, most)) for most in (2, 4, 14))
    rng = torch.Generator().manual_seed(draw(seeds))
    positions = torch.full((batch, num_heads, num_rows), -1)
    for one in positions.flatten(0, 1):
        num = int(torch.randint(1, num_rows + 1, (), generator=rng))
        held = torch.randperm(20, generator=rng)[:num].sort().values
        one[num_rows - num :] = held
    positions[:, :, -1] = 20  # all heads hold the newest token
    ratings = torch.randint(0, draw(st.sampled_from([2, 5, 1000])), positions.shape, generator=rng)
    return positions, ratings.float().masked_fill(positions < 0, 0)


def held(values: Tensor, positions: Tensor) -> dict[int, float]:
    """The values of one head by position."""
    pairs = zip(positions.tolist(), values.tolist(), strict=True)
    return {position: value for position, value in pairs if position >= 0}


@given(rated_rows(), st.integers(1, 10), st.sampled_from([0, 0.2, 0.5, 0.75, 1]))
def test_keeps_the_rows_of_the_loop(rows: tuple[Tensor, Tensor], budget: int, alpha: float) -> None:
    positions, ratings = rows
    given_rows = CacheView(positions=positions, tracks={"rating": ratings})
    stack = [Given(), {"policy": "adakv", "alpha_safeguard": alpha}]
    mask = select_rows(stack, given_rows, budget=budget, heads="shared").keep
    ratings[:, :, -1] = torch.inf  # protected
    for b, of_sequence in enumerate(positions):
        rated = [held(ratings[b, h], of_head) for h, of_head in enumerate(of_sequence)]
        ours = [of_head[mask[b, h]].tolist() for h, of_head in enumerate(of_sequence)]
        if positions.shape[2] <= budget:
            assert ours == [sorted(of_head) for of_head in rated]
        else:
            assert ours == adakv(rated, budget, alpha)


@given(rated_rows(), st.integers(1, 10))
def test_a_whole_safeguard_is_a_budget_for_each_head(
    rows: tuple[Tensor, Tensor], budget: int
) -> None:
    positions = torch.arange(rows[0].shape[2]).expand(rows[0].shape)
    given_rows = CacheView(positions=positions, tracks={"rating": rows[1]})
    stack = [Given(), {"policy": "adakv", "alpha_safeguard": 1}]
    mask = select_rows(stack, given_rows, budget=budget, heads="shared").keep
    own = select_rows(stack, given_rows, budget=budget).keep
    assert torch.equal(own, select_rows(Given(), given_rows, budget=budget).keep)
    assert torch.equal(mask, torch.zeros_like(mask).scatter(2, own, True))


@recorded_press("AdaKV(SnapKV)")
def test_masks_equal_those_of_kvpress_over_snapkv(case: Case) -> None:
    assert_masks_equal(case, kvpress_snapkv(case))


@recorded_press("AdaKV(KeyDiff)")
def test_masks_equal_those_of_kvpress_over_keydiff(case: Case) -> None:
    assert_masks_equal(case, {"policy": "keydiff"})


def kvpress_snapkv(case: Case) -> dict[str, Any]:
    """SnapKV as kvpress has it, for a recorded case."""
    args = case.args["press_args"]
    knobs = {name: args[name] for name in ("window_size", "kernel_size")}
    return {"policy": "snapkv", "phase": "prefill", "pooling": "avgpool", **knobs}


def assert_masks_equal(case: Case, scores: dict[str, Any]) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in case.arrays().items()}
    adakv = {"policy": "adakv", "alpha_safeguard": case.args["press_args"]["alpha_safeguard"]}
    rows = CacheView(
        keys=arrays["K"],
        values=arrays["V"],
        queries=arrays["Q"][:, :, -case.args["press_args"].get("window_size", 1) :],
        positions=torch.arange(case.args["T"]).expand(arrays["K"].shape[:3]),
    )
    for ratio in case.args["ratios"]:
        budget = max(1, int(case.args["T"] * (1 - ratio)))
        mask = select_rows([scores, adakv], rows, budget=budget, heads="shared").keep
        assert torch.equal(mask, arrays[f"r{ratio * 100:.0f}_keep_mask"])


@given(
    caches(batch=1, min_rows=24, max_rows=40, num_kv_heads=3, head_dim=4),
    st.sampled_from([(1, "maxpool"), (5, "maxpool"), (3, "avgpool")]),
    st.integers(1, 4),
)
def test_snapkv_below_it_scores_uneven_heads_in_every_round(drawn, pooling, window) -> None:
    kernel_size, kind = pooling
    knobs: dict[str, Any] = {"window_size": window, "kernel_size": kernel_size, "pooling": kind}
    stack = [{"policy": "snapkv", **knobs}, "adakv"]
    budget, num_heads = window + 4, 3
    grouped = drawn.queries.double().unflatten(1, (num_heads, -1))[0]
    caches_in_order: list[list[int]] = [[] for _ in range(num_heads)]  # as the authors hold them
    ranks = [dict[int, float]() for _ in range(num_heads)]
    seen = 0
    for count in (drawn.num_rows - 10, drawn.num_rows - 5, drawn.num_rows):
        for cache in caches_in_order:
            cache += range(seen, count)
        seen = count
        rows = uneven_rows(drawn, caches_in_order, ranks, count, window)
        selection = select_rows(stack, rows, budget=budget, heads="shared")
        kept = [
            of_head[mask].tolist()
            for of_head, mask in zip(rows.positions[0], selection.keep[0], strict=True)
        ]
        scores = []
        for head, cache in enumerate(caches_in_order):
            keys = drawn.keys[0, head].double()[cache].tolist()
            queries = grouped[head][:, :count].tolist()
            before = reference.snapkv(keys, queries, **knobs)
            scores.append(
                {**dict.fromkeys(cache, torch.inf), **dict(zip(cache, before, strict=False))}
            )
        expected = adakv(scores, budget, 0.2)
        if kept != expected:  # only almost equal scores may be swapped, and then the order is lost
            swapped = [
                scores[head][row]
                for head in range(num_heads)
                for row in {*kept[head]} ^ {*expected[head]}
            ]
            assert max(swapped) - min(swapped) < ATOL
            return
        new_ranks = selection.tracks[0]["snapkv_rank"][0]
        for head, cache in enumerate(caches_in_order):
            of_head = scores[head]
            newest = cache[len(cache) - window :]
            stay = [row for row in cache[: len(cache) - window] if row in kept[head]]
            stay.sort(key=lambda row: -of_head[row])
            caches_in_order[head] = stay + newest
            ranks[head] = held(new_ranks[head], rows.positions[0, head])


def uneven_rows(drawn, caches_in_order, ranks, count, window) -> CacheView:
    """Rows of heads that hold different positions, aligned on the right."""
    most = max(map(len, caches_in_order))
    positions = torch.full((1, len(caches_in_order), most), -1)
    keys = drawn.keys.new_zeros(1, len(caches_in_order), most, drawn.keys.shape[3])
    rank = torch.zeros(positions.shape)
    for head, cache in enumerate(caches_in_order):
        rows = sorted(cache)
        positions[0, head, most - len(rows) :] = torch.tensor(rows)
        keys[0, head, most - len(rows) :] = drawn.keys[0, head, rows]
        given_ranks = [ranks[head].get(row, 0.0) for row in rows]
        rank[0, head, most - len(rows) :] = torch.tensor(given_ranks)
    queries = drawn.queries[:, :, count - window : count]
    return CacheView(keys=keys, positions=positions, queries=queries, tracks={"snapkv_rank": rank})


@pytest.mark.parametrize("stack", [["snapkv"], ["h2o"], ["knorm", "protect"]], ids=str)
def test_heads_of_an_engine_hold_different_numbers_of_rows(stack: list[str]) -> None:
    plan = Plan.uniform(*stack, "adakv", budget=16, buffer=4, heads="shared")
    rng = torch.Generator().manual_seed(2)
    prompt = tuple(torch.randint(3, 60, (40,), generator=rng).tolist())
    run = Engine(tiny_model(num_kv_heads=4, num_heads=8), plan=plan, slots=1).generate(
        [Request(prompt, 30, stop_ids=())]
    )
    for _ in range(20):
        run.step()
    layer = run.cache.layers[0]
    counts = [len(of_head) for of_head in layer.held(0, layer.arena.positions)]
    assert len(set(counts)) > 1
    assert sum(counts) <= (16 + 4) * len(counts)
