"""OBCache against loops, against what happens to outputs, and against recorded rows."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import reference
import reference_obcache as oracle
import torch
from compare import assert_best_rows, assert_threshold, heads
from golden_cases import Case, recorded_related
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, fill, rounds
from torch import Tensor
from torch.autograd.functional import jvp

from kvpolicy import load_policy, observed_weights
from kvpolicy.errors import BudgetError
from kvpolicy.hooks.stack import Stack
from kvpolicy.testing import keep_rows, replay

SALIENCIES = ["v", "k", "vk", "vk_no_cross", "v_p1", "attention"]
REDUCTIONS = ["sum", "mean", "max"]
EXACT = {"rtol": 2e-4, "atol": 2e-4}  # fp32 against double precision; saliencies reach hundreds


def scores_of(
    drawn: Drawn, *, num_new: int | None = None, track: Tensor | None = None, **knobs: Any
) -> Tensor:
    """Scores, ``[B, H_kv, T]``, of rows that all queries have seen."""
    num_rows = drawn.num_rows
    positions = torch.arange(num_rows).expand(drawn.keys.shape[:3])
    seq_len = torch.full((len(drawn.keys),), num_rows)
    tracks = {"obcache_saliency": torch.zeros(drawn.keys.shape[:3]) if track is None else track}
    plain = {"n_recent": 0, "kernel_size": 1}
    scores: Tensor = load_policy("obcache", **plain | knobs).score(
        queries=drawn.queries,
        keys=drawn.keys,
        values=drawn.values,
        attn_weights=observed_weights(drawn.queries, drawn.keys, positions, seq_len),
        num_new=seq_len if num_new is None else torch.full_like(seq_len, num_new),
        tracks=tracks,
    )
    return scores


def rows_of(drawn: Drawn) -> list[tuple[int, int, list, list, list]]:
    """Every ``(b, h, keys, values, queries)`` of a batch as lists."""
    return [
        (b, h, keys, drawn.values[b, h].double().tolist(), queries)
        for b, h, keys, queries in heads(drawn.keys, drawn.queries)
    ]


# Rows that stay


@given(st.data(), caches(min_rows=2), st.sampled_from(SALIENCIES), st.sampled_from(REDUCTIONS))
def test_window_host_keeps_the_rows_of_the_reference(
    data: st.DataObject, drawn: Drawn, saliency: str, group_reduce: str
) -> None:
    window = data.draw(st.integers(1, 6))
    n_recent = data.draw(st.integers(0, 4))
    kernel_size, pooling = data.draw(
        st.sampled_from([(1, "maxpool"), (5, "maxpool"), (3, "avgpool")])
    )
    budget = data.draw(budgets(drawn.num_rows, min_budget=max(n_recent, 1)))
    kept = keep_rows(
        "obcache",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=budget,
        saliency=saliency,
        window_size=window,
        n_recent=n_recent,
        kernel_size=kernel_size,
        pooling=pooling,
        group_reduce=group_reduce,
    )
    for b, h, keys, values, queries in rows_of(drawn):
        scores = oracle.window(
            saliency, keys, values, queries, window_size=window, group_reduce=group_reduce
        )
        recent = min(n_recent, drawn.num_rows)
        candidates = reference.pool(scores[: drawn.num_rows - recent], kernel_size, pooling)
        assert_rows(kept[b, h].tolist(), candidates, window=recent, budget=budget)


def assert_rows(kept: list[int], scores: list[float], *, window: int, budget: int) -> None:
    """The best rows, up to the rounding of saliencies of this size."""
    atol = 2e-5 * max([1.0, *scores])
    assert_best_rows(kept, scores, window=window, budget=budget, atol=atol)


@given(st.data(), caches(min_rows=2, max_rows=20), st.sampled_from(SALIENCIES))
def test_sums_grow_with_every_query_of_a_stream_and_move_with_rows(
    data: st.DataObject, drawn: Drawn, saliency: str
) -> None:
    window, n_recent = data.draw(st.integers(1, 24)), data.draw(st.integers(0, 3))
    kernel_size = data.draw(st.sampled_from([1, 3]))
    budget = data.draw(st.integers(max(n_recent, 1), max(n_recent, drawn.num_rows - 1)))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay(
        "obcache",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=budget,
        saliency=saliency,
        host="accumulate",
        window_size=window,
        n_recent=n_recent,
        kernel_size=kernel_size,
        **plan,
    )
    for b, h, keys, values, queries in rows_of(drawn):
        sums, compacted_at, fed = oracle.Accumulated(saliency), 0, 0
        for kept, count in zip(answer, plan["compact_at"], strict=True):
            is_due = len(sums.resident) + count - fed > budget
            # Queries count when they are asked for: those since the last compaction, if there
            # is one now.
            until = range(max(compacted_at, count - window), count)
            pending = list(range(fed, count))
            if is_due:
                replay_from(sums, keys, values, queries, pending, until)
            else:
                sums.resident += pending
                sums.sums |= dict.fromkeys(pending, 0.0)
            fed = count
            if not is_due:
                assert kept[b, h].tolist() == sums.resident
                continue
            compacted_at = count
            scores = sums.candidates(n_recent, kernel_size, "maxpool")
            places = [sums.resident.index(t) for t in kept[b, h].tolist()]
            assert_rows(places, scores, window=n_recent, budget=budget)
            sums.keep(kept[b, h].tolist())


def replay_from(
    sums: oracle.Accumulated,
    keys: list,
    values: list,
    queries: list,
    pending: list[int],
    counted: range,
) -> None:
    """Feed tokens; those that entered before without counting may count now."""
    for token in counted:
        if token in sums.resident:
            seen = [t for t in sums.resident if t <= token]
            for head in queries:
                gains = oracle.of_query(
                    sums.kind, head[token], [keys[t] for t in seen], [values[t] for t in seen]
                )
                for t, gain in zip(seen, gains, strict=True):
                    sums.sums[t] += gain
    sums.feed(keys, values, queries, pending, counted)


def method_knobs(args: dict[str, Any]) -> dict[str, Any]:
    """Knobs for a method of the recorded code."""
    method, n_recent = args["method"], args["num_recent"]
    saliencies = {
        "obcV": "v",
        "obcK": "k",
        "obcVK": "vk",
        "obcVK_no_cross": "vk_no_cross",
        "obcV_p1": "v_p1",
    }
    saliency = saliencies.get(method.split("+")[0].removesuffix("_fullhist"), "attention")
    knobs = {
        "saliency": saliency,
        "host": "accumulate",
        "window_size": n_recent,
        "n_recent": n_recent,
    }
    knobs |= {"kernel_size": 1, "n_sink": args.get("num_sink", 0)}
    if "tova" in method:
        return knobs | {"host": "window", "window_size": 1, "n_recent": 0}
    if "fullhist" in method:
        return knobs | {"window_size": 1024}
    if "pool" in method or method == "snapkv":
        kind = "avgpool" if "avgpool" in method else "maxpool"
        return knobs | {"kernel_size": 7, "pooling": kind}
    return knobs


@recorded_related("obc_")
def test_rows_equal_those_of_the_recorded_code(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    group = args["Hq"] // args["Hkv"]
    # The code stores a copy of keys and values for each query head.
    queries = case.tensor(arrays["Q"])
    keys, values = (case.tensor(arrays[name]).repeat_interleave(group, 1) for name in "KV")
    inputs = (keys, values, queries)
    knobs, budget = method_knobs(args), args["num_recent"] + args["num_heavy"]
    if "T0" not in args:
        kept = keep_rows("obcache", *inputs, budget=budget, **knobs)
        assert kept.tolist() == arrays["kept"].tolist()
        return
    prompt = args["T0"]
    compact_at = range(prompt, prompt + args["steps"] + 1)
    answer = replay(
        "obcache", *inputs, budget=budget, prompt=prompt, compact_at=compact_at, **knobs
    )
    num_same = 0
    for b in range(args["B"]):
        for h in range(args["Hq"]):
            rounds_kept = [kept[b, h].tolist() for kept in answer]
            theirs = [arrays[f"r{i}_kept"][b, h].tolist() for i in range(len(answer))]
            selected = [arrays[f"r{i}_select"][b, h] for i in range(len(answer))]
            num_same += follow_recorded(rounds_kept, theirs, selected, args["num_heavy"])
    assert num_same >= args["B"] * args["Hq"] / 2, "ties leave too little to compare"


def follow_recorded(
    ours: list[list[int]], theirs: list[list[int]], selected: list, num_heavy: int
) -> bool:
    """Whether all rounds of a head are equal; they may part at a tie of the recorded scores."""
    for mine, expected, scores in zip(ours, theirs, selected, strict=True):
        if mine == expected:
            continue
        best = sorted(scores.tolist(), reverse=True)
        assert best[num_heavy - 1] == best[num_heavy], (mine, expected)
        return False
    return True


# What saliencies mean


@given(caches(min_rows=2, max_rows=10))
def test_v_is_the_change_of_outputs_without_a_value(drawn: Drawn) -> None:
    scores = scores_of(drawn, saliency="v", window_size=1)
    for b, h, keys, values, queries in rows_of(drawn):
        expected = [
            math.fsum(oracle.without_value(head[-1], keys, values, row) for head in queries)
            for row in range(len(keys))
        ]
        close(scores[b, h], expected)


def close(scores: Tensor, expected: Sequence[float] | Tensor, **tolerance: float) -> None:
    wanted = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(scores.double(), wanted, **EXACT | tolerance)


@pytest.mark.parametrize("saliency", ["k", "vk"])
def test_k_and_vk_are_the_limits_of_shrinking_keys_and_values(saliency: str) -> None:
    drawn = of_seed(7)
    scores = scores_of(drawn, saliency=saliency, window_size=1)
    errors = []
    for by in (1e-2, 1e-3, 1e-4):
        for b, h, keys, values, queries in rows_of(drawn):
            expected = [
                math.fsum(
                    oracle.less(head[-1], keys, values, row, by, of=saliency) for head in queries
                )
                for row in range(len(keys))
            ]
            found = torch.tensor(expected) - scores[b, h].double()
            errors.append((found.abs().max() / scores.max()).item())
    assert errors[0] > 4 * errors[1] > 16 * errors[2], errors
    assert errors[2] < 2e-3


def of_seed(seed: int, *, group: int = 2, num_rows: int = 8) -> Drawn:
    """One KV head of one sequence."""
    rows = (1, 1, num_rows, 4)
    keys, values = fill(rows, "gauss", seed), fill(rows, "gauss", seed + 1)
    return Drawn(keys, values, fill((1, group, num_rows, 4), "gauss", seed + 2, 1.5), "gauss", seed)


@given(caches(batch=1, num_kv_heads=1, min_rows=2, max_rows=8), st.sampled_from(["k", "vk"]))
def test_k_and_vk_are_diagonal_blocks_of_the_hessian(drawn: Drawn, saliency: str) -> None:
    """The squared norm of a change is the quadratic form of the Gauss-Newton Hessian."""
    keys, values = drawn.keys[0, 0].double(), drawn.values[0, 0].double()
    queries = drawn.queries[0, :, -1].double()

    def outputs(keys: Tensor, values: Tensor) -> Tensor:
        return (queries @ keys.T * keys.shape[1] ** -0.5).softmax(dim=-1) @ values

    expected = []
    for row in range(len(keys)):
        only = torch.zeros(len(keys), 1, dtype=torch.float64)
        only[row] = 1
        changes = (keys * only, values * only * (saliency == "vk"))
        expected.append(jvp(outputs, (keys, values), changes)[1].square().sum().item())
    close(scores_of(drawn, saliency=saliency, window_size=1)[0, 0], expected)


@given(caches(), st.sampled_from(SALIENCIES), st.integers(1, 8), st.sampled_from(REDUCTIONS))
def test_scores_equal_the_reference(
    drawn: Drawn, saliency: str, window: int, group_reduce: str
) -> None:
    found = scores_of(drawn, saliency=saliency, window_size=window, group_reduce=group_reduce)
    for b, h, keys, values, queries in rows_of(drawn):
        close(
            found[b, h],
            oracle.window(
                saliency, keys, values, queries, window_size=window, group_reduce=group_reduce
            ),
        )


@given(caches(num_kv_heads=2), st.sampled_from(SALIENCIES))
def test_sum_over_a_group_is_the_sum_of_its_heads(drawn: Drawn, saliency: str) -> None:
    group = drawn.queries.shape[1] // 2
    together = scores_of(drawn, saliency=saliency, window_size=5)
    keys, values = (one.repeat_interleave(group, 1) for one in (drawn.keys, drawn.values))
    alone = Drawn(keys, values, drawn.queries, drawn.kind, drawn.seed)
    by_head = scores_of(alone, saliency=saliency, window_size=5)
    close(together, by_head.unflatten(1, (2, group)).sum(dim=2))


@given(st.data(), caches(min_rows=3), st.sampled_from(SALIENCIES))
def test_queries_that_come_in_parts_add_up_to_all_of_them(
    data: st.DataObject, drawn: Drawn, saliency: str
) -> None:
    first = data.draw(st.integers(1, drawn.num_rows - 1))
    knobs = {"saliency": saliency, "host": "accumulate", "window_size": 64}
    before = Drawn(
        drawn.keys[:, :, :first],
        drawn.values[:, :, :first],
        drawn.queries[:, :, :first],
        drawn.kind,
        drawn.seed,
    )
    track = torch.zeros(drawn.keys.shape[:3])
    track[:, :, :first] = scores_of(before, **knobs)
    in_parts = scores_of(drawn, num_new=drawn.num_rows - first, track=track, **knobs)
    close(in_parts, scores_of(drawn, **knobs).double())


# Attention in the place of saliencies


@given(st.data(), caches(min_rows=5, num_kv_heads=1))
def test_attention_of_one_query_is_tova(data: st.DataObject, drawn: Drawn) -> None:
    inputs, budget = (drawn.keys, drawn.values, drawn.queries), data.draw(st.integers(1, 4))
    kept = keep_rows(
        "obcache",
        *inputs,
        budget=budget,
        saliency="attention",
        window_size=1,
        n_recent=0,
        kernel_size=1,
    )
    weights = scores_of(drawn, saliency="attention", window_size=1)
    for b, theirs in enumerate(keep_rows("tova", *inputs, budget=budget)):
        assert_threshold(theirs[0].tolist(), weights[b, 0].tolist(), atol=1e-6)
        assert_threshold(kept[b, 0].tolist(), weights[b, 0].tolist(), atol=1e-6)


@given(st.data(), caches(min_rows=5), st.sampled_from(REDUCTIONS))
def test_pooled_attention_of_a_window_is_snapkv(
    data: st.DataObject, drawn: Drawn, group_reduce: str
) -> None:
    knobs = {"window_size": 4, "kernel_size": 3, "group_reduce": group_reduce}
    inputs, budget = (drawn.keys, drawn.values, drawn.queries), data.draw(budgets(32, min_budget=4))
    kept = keep_rows("obcache", *inputs, budget=budget, saliency="attention", **knobs)
    assert torch.equal(kept, keep_rows("snapkv", *inputs, budget=budget, phase="prefill", **knobs))


@given(st.data(), caches(min_rows=3, max_rows=24, num_kv_heads=2))
def test_accumulated_attention_is_h2o(data: st.DataObject, drawn: Drawn) -> None:
    plan, budget = data.draw(rounds(drawn.num_rows)), data.draw(st.integers(2, 8))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    knobs: dict[str, Any] = {"budget": budget, "n_recent": 2, **plan}
    theirs = replay("h2o", *inputs, **knobs)
    ours = replay(
        "obcache",
        *inputs,
        saliency="attention",
        host="accumulate",
        window_size=64,
        kernel_size=1,
        **knobs,
    )
    for mine, expected in zip(ours, theirs, strict=True):
        assert torch.equal(mine, expected)


# Edges


@given(caches(min_rows=9), st.sampled_from(["window", "accumulate"]))
def test_sinks_and_recent_rows_stay(drawn: Drawn, host: str) -> None:
    kept = keep_rows(
        "obcache",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=8,
        host=host,
        n_recent=3,
        n_sink=4,
    )
    ends = [0, 1, 2, 3, *range(drawn.num_rows - 3, drawn.num_rows)]
    assert all(set(ends) <= set(rows) for rows in kept.flatten(0, 1).tolist())


def test_recent_rows_are_those_of_the_window_unless_said_otherwise() -> None:
    assert load_policy("obcache", window_size=5).protects == (0, 5)
    assert load_policy("obcache", window_size=5, n_recent=0).protects == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("saliency", SALIENCIES)
def test_large_numbers_in_half_precision_give_finite_scores(
    saliency: str, dtype: torch.dtype
) -> None:
    # Logits of some 1e5: most weights are 0, and every one of a masked row is.
    keys, values = (fill((1, 2, 24, 8), "gauss", seed, 200).to(dtype) for seed in (1, 2))
    queries = fill((1, 4, 24, 8), "gauss", 3, 200).to(dtype)
    scores = scores_of(Drawn(keys, values, queries, "gauss", 0), saliency=saliency)
    assert scores.dtype == torch.float32
    assert scores.isfinite().all()
    assert (scores >= 0).all()


def test_prompts_only_leaves_generations_alone() -> None:
    kept = replay(
        "obcache",
        *(fill((1, 1, 20, 4), "gauss", seed) for seed in (1, 2, 3)),
        budget=6,
        prompt=12,
        compact_at=[12, 16, 20],
        phase="prefill",
        window_size=2,
    )
    assert [rows.shape[2] for rows in kept] == [6, 10, 14]


def test_every_says_how_many_rows_may_exceed_the_budget() -> None:
    policy = load_policy("obcache", every=3)
    counts = {"seq_len": torch.tensor([9, 9, 9]), "prompt_len": torch.tensor([9, 4, 4])}
    due = policy.due(num_rows=torch.tensor([8, 9, 10]), budget=6, **counts)
    assert due.tolist() == [False, True, True]
    assert not Stack([("it", load_policy("obcache"))]).implements("due")


def test_budget_below_the_window_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="obcache"):
        keep_rows("obcache", keys, keys, keys, budget=15)
