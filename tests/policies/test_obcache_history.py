"""OBCache over all past queries against loops over each of them."""

import math

import pytest
import reference_obcache as oracle
import torch
from compare import assert_best_rows, heads
from golden_cases import Case, recorded_related
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr
from strategies import Drawn, caches, fill, rounds
from torch import Tensor

from kvpolicy import load_policy, observed_weights
from kvpolicy.hooks.stack import Stack
from kvpolicy.testing import keep_rows, replay

SALIENCIES = ["v", "k", "vk", "vk_no_cross"]


@given(st.data(), caches(min_rows=2, max_rows=20))
def test_v_sums_what_every_query_adds(data: st.DataObject, drawn: Drawn) -> None:
    n_recent = data.draw(st.integers(0, 3))
    budget = data.draw(st.integers(max(n_recent, 1), max(n_recent, drawn.num_rows - 1)))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    answer = replay("obcache_history", *inputs, budget=budget, n_recent=n_recent, **plan)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        values = drawn.values[b, h].double().tolist()
        sums, fed = oracle.Accumulated("v"), 0
        for kept, count in zip(answer, plan["compact_at"], strict=True):
            new = range(fed, count)
            sums.feed(keys, values, queries, new, counted=new)
            fed = count
            scores = sums.candidates(min(n_recent, len(sums.resident)), 1, "maxpool")
            window = len(sums.resident) - len(scores)
            places = [sums.resident.index(t) for t in kept[b, h].tolist()]
            atol = 2e-5 * max([1.0, *scores])
            assert_best_rows(places, scores, window=window, budget=budget, atol=atol)
            sums.keep(kept[b, h].tolist())


@recorded_related("obc_08")
def test_v_keeps_the_rows_of_the_recorded_code_with_full_history(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    assert args["method"] == "obcV_fullhist"
    keys, values = (torch.from_numpy(arrays[name]).repeat_interleave(2, 1) for name in "KV")
    prompt, n_recent = args["T0"], args["num_recent"]
    answer = replay(
        "obcache_history",
        keys,
        values,
        torch.from_numpy(arrays["Q"]),
        budget=n_recent + args["num_heavy"],
        prompt=prompt,
        compact_at=range(prompt, prompt + args["steps"] + 1),
        n_recent=n_recent,
        n_sink=args["num_sink"],
    )
    for i, kept in enumerate(answer):
        assert kept.tolist() == arrays[f"r{i}_kept"].tolist()


def scores_of(
    keys: Tensor, values: Tensor, queries: Tensor, saliency: str, window_size: int
) -> Tensor:
    """Scores, ``[1, H_kv, T]``, of rows after all of these queries."""
    num_rows = keys.shape[2]
    positions, seq_len = torch.arange(num_rows).expand(keys.shape[:3]), torch.tensor([num_rows])
    weights = observed_weights(queries, keys, positions, seq_len)
    logits = (queries.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, None].mT) / math.sqrt(
        keys.shape[3]
    )
    by_head = weights.unflatten(1, (keys.shape[1], -1)).square()
    scores: Tensor = load_policy(
        "obcache_history", saliency=saliency, window_size=window_size
    ).score(
        values=values,
        attn_weights=weights,
        attn_squares=by_head.sum(dim=(2, 3)),
        attn_squares_logit=(by_head * logits).sum(dim=(2, 3)),
        attn_squares_logit2=(by_head * logits.square()).sum(dim=(2, 3)),
    )
    return scores


@given(caches(batch=1, group=1, num_queries=1), st.sampled_from(SALIENCIES))
def test_one_query_has_the_mean_output_so_that_all_are_exact(drawn: Drawn, saliency: str) -> None:
    inputs = (drawn.keys, drawn.values, drawn.queries)
    scores = scores_of(*inputs, saliency, window_size=1)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        values = drawn.values[b, h].double().tolist()
        expected = torch.tensor(oracle.of_query(saliency, queries[0][0], keys, values))
        torch.testing.assert_close(scores[b, h], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("saliency", ["k", "vk", "vk_no_cross"])
def test_one_output_for_all_queries_ranks_rows_almost_as_their_own_do(saliency: str) -> None:
    keys, values, queries = (fill((1, 4, 64, 16), "gauss", seed) for seed in (1, 2, 3))
    found = scores_of(keys, values, queries, saliency, window_size=16)
    for b, h, of_keys, of_queries in heads(keys, queries):
        of_values = values[b, h].double().tolist()
        expected = oracle.window(
            saliency, of_keys, of_values, of_queries, window_size=64, group_reduce="sum"
        )
        assert spearmanr(found[b, h], expected).statistic > 0.97


@given(caches(min_rows=9))
def test_sinks_and_recent_rows_stay(drawn: Drawn) -> None:
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("obcache_history", *inputs, budget=8, n_recent=3, n_sink=4)
    ends = {0, 1, 2, 3, *range(drawn.num_rows - 3, drawn.num_rows)}
    assert all(ends <= set(rows) for rows in kept.flatten(0, 1).tolist())


def test_every_says_how_many_rows_may_exceed_the_budget() -> None:
    due = load_policy("obcache_history", every=2).due(num_rows=torch.tensor([7, 8]), budget=6)
    assert due.tolist() == [False, True]
    assert not Stack([("it", load_policy("obcache_history"))]).implements("due")
