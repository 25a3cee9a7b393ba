"""Policies against outputs recorded from their authors' code.

Exact sets where the method has no ties (StreamingLLM, R-KV in fp32, H2O, TOVA, Knorm, the
"H2O" of R-KV's code). Elsewhere maximum pooling gives adjacent rows equal scores and the
authors' top-k breaks the ties arbitrarily, so the recorded *scores* are compared: no rejected
row may have a score above that of a kept row by more than rounding.
"""

import json
from collections.abc import Sequence

import numpy as np
import pytest
import reference
import torch
from compare import ATOL, assert_best_rows, assert_threshold, heads
from golden_cases import FOLDER, Case, recorded
from kvpolicy_baselines.pyramidkv import published_budgets
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.testing import keep_rows, replay


def sets(kept: Tensor | np.ndarray) -> list[set[int]]:
    """One set of rows per sequence and head."""
    array = np.asarray(kept)
    return [set(map(int, rows)) for rows in array.reshape(-1, array.shape[-1])]


def assert_rows_match_scores(
    kept: Tensor, scores: np.ndarray, *, window: int, budget: int, atol: float
) -> None:
    """Apply the threshold rule to the recorded scores ``[B, H_kv, T - window]``."""
    num_rows = scores.shape[-1] + window
    forced = set(range(num_rows - window, num_rows))
    for rows, row_scores in zip(sets(kept), scores.reshape(-1, scores.shape[-1]), strict=True):
        assert len(rows) == min(budget, num_rows)
        assert forced <= rows
        assert_threshold(sorted(rows), row_scores.tolist(), atol=atol)


def bfloat16_noise(scores: np.ndarray, budget: int) -> float:
    """Four units in the last place of a bfloat16 score at the threshold."""
    threshold = np.abs(np.sort(scores, axis=-1)[..., -min(budget, scores.shape[-1])]).max()
    return float(4 * 2.0**-8 * threshold)


def test_manifest_lists_every_file() -> None:
    listed = json.loads((FOLDER / "manifest.json").read_text())["cases"]
    assert {case["file"] for case in listed} == {path.name for path in FOLDER.glob("*.npz")}


@recorded("rkv.StreamingLLM")
def test_streaming_keeps_the_recorded_rows(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values = case.tensor(arrays["k"]), case.tensor(arrays["v"])
    queries = torch.zeros(args["B"], args["Hq"], 1, args["D"])
    kept = keep_rows(
        "streaming", keys, values, queries, budget=args["budget"], n_sink=args["first_tokens"]
    )
    assert sets(kept) == sets(arrays["kept"])


@recorded("rkv.R1KV")
def test_rkv_keeps_the_recorded_rows(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    kept = keep_rows("rkv", keys, values, queries, budget=args["budget"], **rkv_knobs(args))
    if "score_per_row" not in arrays:
        assert args["T"] < args["budget"], "only calls with nothing to evict lack scores"
        assert sets(kept) == sets(arrays["kept"])
        return
    scores, window = arrays["score_per_row"], args["W"]
    expected = sets(arrays["kept_per_row"])  # `kept` mixes sequences where B > 1
    if case.is_bfloat16:
        atol = bfloat16_noise(scores, args["budget"] - window)
        assert_rows_match_scores(kept, scores, window=window, budget=args["budget"], atol=atol)
        for ours, theirs in zip(sets(kept), expected, strict=True):
            assert len(ours & theirs) >= 0.95 * len(theirs)
    elif args["lam"] < 1:
        assert sets(kept) == expected
    else:  # no redundancy term: maximum pooling alone has many ties
        assert_rows_match_scores(kept, scores, window=window, budget=args["budget"], atol=ATOL)


def rkv_knobs(args: dict) -> dict:
    return {
        "mix_lambda": args["lam"],
        "window_size": args["W"],
        "kernel_size": args["kernel"],
        "retain_direction": args.get("dirn", "last"),
    }


@recorded("rkv.SnapKV")
def test_snapkv_in_decode_keeps_rows_by_the_recorded_scores(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    knobs = {"window_size": args["W"], "kernel_size": args["kernel"], "phase": "decode"}
    kept = keep_rows("snapkv", keys, values, queries, budget=args["budget"], **knobs)
    if "importance" not in arrays:
        assert sets(kept) == sets(arrays["kept"])
        return
    scores = arrays["importance"]
    atol = bfloat16_noise(scores, args["budget"] - args["W"]) if case.is_bfloat16 else ATOL
    assert_rows_match_scores(kept, scores, window=args["W"], budget=args["budget"], atol=atol)


@recorded("rkv.multiround")
def test_streams_keep_the_recorded_positions(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[f"{name}_all"]) for name in "kvq")
    is_rkv = "lam" in args
    knobs = {"window_size": args["W"], "kernel_size": args["kernel"]}
    knobs |= rkv_knobs(args) if is_rkv else {}
    rounds = replay(
        "rkv" if is_rkv else "snapkv",
        keys,
        values,
        queries,
        budget=args["budget"],
        prompt=args["prompt"],
        compact_at=args["compress_after_tokens"],
        **knobs,
    )
    assert len(rounds) == len(arrays["kept_orig"])
    for kept, expected in zip(rounds, arrays["kept_orig"], strict=True):
        if sets(kept) != sets(expected):
            assert not is_rkv, "R-KV has no ties"
            return  # a tie was broken differently, so later rounds differ


@recorded("SnapKV.SnapKVCluster")
def test_published_snapkv_keeps_the_recorded_rows_of_every_query_head(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    group = args["Hq"] // args["Hkv"]
    keys, values = (case.tensor(arrays[name].repeat(group, axis=1)) for name in "kv")
    kept = keep_rows(
        "snapkv",
        keys,
        values,
        case.tensor(arrays["q"]),
        budget=args["max_capacity_prompt"],
        **published(args["W"], args["kernel"], args["pooling"]),
    )
    if args["pooling"] == "avgpool":
        assert sets(kept) == sets(arrays["kept"])
    assert_published(kept, arrays["kept"], keys, case.tensor(arrays["q"]), args)


def published(window_size: int, kernel_size: int, pooling: str) -> dict:
    return {
        "phase": "prefill",
        "window_size": window_size,
        "kernel_size": kernel_size,
        "pooling": pooling,
    }


def assert_published(
    kept: Tensor,
    expected: np.ndarray,
    keys: Tensor,
    queries: Tensor,
    args: dict,
    group_reduce: str = "mean",
) -> None:
    """Both our rows and the recorded rows match the scores of the slow oracle."""
    knobs = {
        "window_size": args["W"],
        "kernel_size": args.get("kernel", args.get("snapkv_kernel")),
        "pooling": args.get("pooling", args.get("snapkv_pooling")),
    }
    for b, h, head_keys, head_queries in heads(keys, queries):
        scores = reference.snapkv_published(
            head_keys, head_queries, group_reduce=group_reduce, **knobs
        )
        budget = args["max_capacity_prompt"]
        assert_best_rows(kept[b, h].tolist(), scores, window=args["W"], budget=budget)
        assert_threshold(expected[b, h].tolist(), scores, atol=ATOL)


@recorded("KVCacheFactory.misc")
@pytest.mark.parametrize("group_reduce", ["mean", "max", "sum"])
def test_snapkv_reduces_query_groups_as_recorded(case: Case, group_reduce: str) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    knobs = published(args["W"], args["snapkv_kernel"], args["snapkv_pooling"])
    kept = keep_rows(
        "snapkv",
        keys,
        values,
        queries,
        budget=args["max_capacity_prompt"],
        group_reduce=group_reduce,
        **knobs,
    )
    expected = arrays[f"kept_snapkv_kv_head_{group_reduce}"]
    assert_published(kept, expected, keys, queries, args, group_reduce)


@recorded("KVCacheFactory.misc")
def test_snapkv_keeps_the_recorded_rows_of_a_prompt_for_every_query_head(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    group = args["Hq"] // args["Hkv"]
    keys, values = (case.tensor(arrays[name].repeat(group, axis=1)) for name in "kv")
    queries = case.tensor(arrays["q"])
    knobs = published(args["W"], args["snapkv_kernel"], args["snapkv_pooling"])
    kept = keep_rows("snapkv", keys, values, queries, budget=args["max_capacity_prompt"], **knobs)
    assert_published(kept, arrays["kept_snapkv_query_head"], keys, queries, args)


@recorded("KVCacheFactory.PyramidKV")
@pytest.mark.parametrize("heads_of", ["query_head", "kv_head_mean", "kv_head_max"])
def test_pyramidkv_keeps_the_recorded_rows_of_every_layer(case: Case, heads_of: str) -> None:
    arrays, args = case.arrays(), case.args
    group = args["Hq"] // args["Hkv"] if heads_of == "query_head" else 1
    keys, values = (case.tensor(arrays[name].repeat(group, axis=1)) for name in "kv")
    queries = case.tensor(arrays["q"])
    num_layers = args["num_hidden_layers"]
    budgets = published_budgets(
        args["max_capacity_prompt"], args["W"], args["T"], num_layers, args["beta"]
    )
    assert budgets == args["kept_counts"][heads_of]
    group_reduce = "max" if heads_of == "kv_head_max" else "mean"
    knobs = published(args["W"], args["kernel"], args["pooling"])
    for layer, budget in enumerate(budgets):
        kept = keep_rows(
            "pyramidkv", keys, values, queries, budget=budget, group_reduce=group_reduce, **knobs
        )
        expected = arrays[f"kept_{heads_of}_L{layer}"]
        layer_args = args | {"max_capacity_prompt": budget}
        assert_published(kept, expected, keys, queries, layer_args, group_reduce)


def budget_tables() -> list[dict]:
    return json.loads((FOLDER / "manifest.json").read_text())["pyramid_budgets"]


@pytest.mark.parametrize(
    "table", budget_tables(), ids=lambda t: f"{t['max_capacity_prompt']}-{t['q_len']}"
)
def test_pyramidkv_computes_the_recorded_budgets(table: dict) -> None:
    found = published_budgets(
        table["max_capacity_prompt"],
        table["window"],
        table["q_len"],
        table["layers"],
        table["beta"],
    )
    assert found == table["kvcache_factory_kept_incl_window"]


@recorded("KVCacheFactory.misc")
@pytest.mark.parametrize("group_reduce", ["mean", "sum"])
def test_h2o_keeps_the_recorded_rows_of_a_prompt(case: Case, group_reduce: str) -> None:
    # A mean ranks rows as a sum does, so both records have the same rows.
    arrays = case.arrays()
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    kept = h2o_on_prompt(case, keys, values, queries)
    assert sets(kept) == sets(arrays[f"kept_h2o_kv_head_{group_reduce}"])


@recorded("KVCacheFactory.misc")
def test_h2o_keeps_the_recorded_rows_of_every_query_head(case: Case) -> None:
    arrays = case.arrays()
    group = case.args["Hq"] // case.args["Hkv"]
    keys, values = (case.tensor(arrays[name].repeat(group, axis=1)) for name in "kv")
    kept = h2o_on_prompt(case, keys, values, case.tensor(arrays["q"]))
    assert sets(kept) == sets(arrays["kept_h2o_query_head"])


def h2o_on_prompt(case: Case, keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    args = case.args
    (kept,) = replay(
        "h2o",
        keys,
        values,
        queries,
        budget=args["max_capacity_prompt"],
        prompt=args["T"],
        compact_at=[args["T"]],
        n_recent=args["W"],
    )
    return kept


@recorded("KVCacheFactory.misc")
def test_streaming_keeps_the_recorded_rows_of_a_prompt(case: Case) -> None:
    arrays, sinks = case.arrays(), case.args["streaming"]["sinks"]
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    budget = case.args["streaming"]["window_size"] + sinks
    kept = keep_rows("streaming", keys, values, queries, budget=budget, n_sink=sinks)
    assert sets(kept) == sets(arrays["kept_streaming"])


@recorded("kvpress")
def test_streaming_keeps_the_rows_of_kvpress(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    kept = keep_rows(
        "streaming", keys, values, queries, budget=args["n_kept"], n_sink=args["n_sink"]
    )
    assert sets(kept) == sets(arrays["kept_streaming"])


@recorded("kvpress")
def test_snapkv_keeps_the_rows_of_kvpress(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    knobs = published(args["snapkv_window"], args["snapkv_kernel"], "avgpool")
    kept = keep_rows("snapkv", keys, values, queries, budget=args["n_kept"], **knobs)
    window = args["snapkv_window"]
    scores = arrays["score_snapkv"][..., : args["T"] - window]  # kvpress pins the window at the end
    assert_rows_match_scores(kept, scores, window=window, budget=args["n_kept"], atol=ATOL)
    assert sets(kept) == sets(arrays["kept_snapkv"])


@recorded("KVCacheFactory.misc")
def test_knorm_keeps_the_recorded_rows_of_a_prompt(case: Case) -> None:
    arrays = case.arrays()
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    budget = case.args["max_capacity_prompt"]
    kept = keep_rows("knorm", keys, values, queries, budget=budget, n_recent=0)
    assert sets(kept) == sets(arrays["kept_l2norm"])


@recorded("kvpress")
@pytest.mark.parametrize(("name", "n_recent"), [("knorm", 0), ("tova", 1)])
def test_knorm_and_tova_keep_the_rows_of_kvpress(case: Case, name: str, n_recent: int) -> None:
    arrays = case.arrays()
    keys, values, queries = (case.tensor(arrays[letter]) for letter in "kvq")
    kept = keep_rows(name, keys, values, queries, budget=case.args["n_kept"], n_recent=n_recent)
    assert sets(kept) == sets(arrays[f"kept_{name}"])


@recorded("TOVA.TOVACache.reduce")
def test_tova_keeps_the_recorded_positions_after_every_token(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[f"{name}_all"]) for name in "kvq")
    rounds = replay(
        "tova",
        keys,
        values,
        queries,
        budget=args["cache_size"],
        prompt=args["prompt"],
        compact_at=range(args["prompt"], args["total"] + 1),
    )
    assert len(rounds) == len(arrays["kept_orig"])
    for kept, expected in zip(rounds, arrays["kept_orig"], strict=True):
        for b, positions in enumerate(expected):
            assert kept[b].tolist() == [positions.tolist()] * args["Hkv"]


@recorded("rkv.H2O(intended)")
def test_h2o_last_keeps_the_rows_intended_by_rkv_code(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[name]) for name in "kvq")
    kept = keep_rows("h2o_last", keys, values, queries, budget=args["budget"])
    assert sets(kept) == sets(arrays["kept"])
    assert sets(kept) != sets(keep_rows("h2o", keys, values, queries, budget=args["budget"]))


@recorded("H2O.H2OKVCache_LayerWise")
def test_h2o_keeps_the_recorded_positions_after_every_token(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[f"{name}_all"]) for name in "kvq")
    rounds = replay(
        "h2o",
        keys,
        values,
        queries,
        budget=args["hh_size"] + args["recent_size"],
        prompt=args["prompt"],
        compact_at=range(args["prompt"], args["total"] + 1),
        n_recent=args["recent_size"],
    )
    assert len(rounds) == len(arrays["kept_orig"])
    for kept, expected in zip(rounds, arrays["kept_orig"], strict=True):
        assert kept[0].tolist() == expected.tolist()


class Sums:
    """Keeps the recorded positions and records the attention sums of those rows."""

    def __init__(self, rounds: Sequence[np.ndarray]) -> None:
        self.rounds = iter(rounds)
        self.sums: Tensor | None = None

    @hookimpl
    def score(self, positions: Tensor, attn_sums: Tensor) -> Tensor:
        recorded_positions = torch.from_numpy(next(self.rounds).astype(np.int64))[None]
        is_kept = (positions[..., None] == recorded_positions[:, :, None]).any(-1)
        self.sums = attn_sums[is_kept].view(recorded_positions.shape)
        return is_kept.float()


@recorded("H2O.H2OKVCache_LayerWise")
def test_attn_sums_equal_the_recorded_accumulated_scores(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, queries = (case.tensor(arrays[f"{name}_all"]) for name in "kvq")
    policy = Sums(arrays["kept_orig"])
    replay(
        policy,
        keys,
        values,
        queries,
        budget=args["hh_size"] + args["recent_size"],
        prompt=args["prompt"],
        compact_at=range(args["prompt"], args["total"] + 1),
    )
    assert policy.sums is not None
    recorded_sums = torch.from_numpy(arrays["final_hh_score"])
    torch.testing.assert_close(policy.sums[0], recorded_sums, atol=1e-5, rtol=1e-5)
