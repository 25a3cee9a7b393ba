"""EpiCache's block step against loops, recorded vectors, and a whole prefill."""

from typing import Any

import attrs
import pytest
import reference_epicache as reference
import torch
from compare import ATOL, assert_threshold
from golden_cases import Case, recorded_related
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, costly, fill, seeds
from tiny import shared_model, tiny_tokenizer
from torch import Tensor

from kvpolicy import (
    CacheView,
    Engine,
    KVPolicyError,
    Plan,
    PolicyCache,
    Request,
    SequenceSnapshot,
    load_policy,
    select_rows,
)
from kvpolicy.compat import cache_argument
from kvpolicy.errors import BudgetError
from kvpolicy.hf.policy_cache import CacheReport
from kvpolicy.testing import keep_rows


def patched(drawn: Drawn, num: int) -> Tensor:
    """Queries of a patched prompt, ``[B, H_q, num, D]``."""
    batch, num_heads, _, size = drawn.queries.shape
    return fill((batch, num_heads, num, size), "gauss", drawn.seed + 9, scale=1.5)


def of_heads(keys: Tensor, queries: Tensor) -> list[list[float]]:
    """Scores of every head of one sequence, by the loops."""
    grouped = queries.double().unflatten(0, (len(keys), -1)).tolist()
    pairs = zip(keys.double().tolist(), grouped, strict=True)
    return [reference.scores(*pair) for pair in pairs]


@pytest.mark.slow
@costly
@given(st.data(), caches(max_rows=20), st.integers(1, 6))
def test_scores_equal_the_reference(data: st.DataObject, drawn: Drawn, num: int) -> None:
    queries = patched(drawn, num)
    positions = torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3])
    seq_len = torch.full((len(positions),), drawn.num_rows)
    scores = load_policy("epicache").score(drawn.keys, positions, queries, seq_len)  # type: ignore[attr-defined]
    for b, of_sequence in enumerate(scores):
        expected = torch.tensor(of_heads(drawn.keys[b], queries[b]), dtype=torch.float32)
        torch.testing.assert_close(of_sequence, expected, atol=ATOL, rtol=0)


@given(st.data(), caches(max_rows=20), st.integers(1, 6), st.booleans())
def test_rows_kept_equal_the_reference(
    data: st.DataObject, drawn: Drawn, num: int, of_all: bool
) -> None:
    """Of each head, as level pair-uniform; or of all together, as level pair."""
    queries, budget = patched(drawn, num), data.draw(budgets(drawn.num_rows))
    positions = torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3])
    rows = CacheView(positions=positions, keys=drawn.keys, lookahead_queries=queries)
    heads = "shared" if of_all else "own"
    keep = select_rows("epicache", rows, budget=budget, heads=heads).keep
    if not of_all:
        again = keep_rows(
            "epicache",
            drawn.keys,
            drawn.values,
            drawn.queries,
            budget=budget,
            lookahead_queries=queries,
        )
        assert (keep == again).all()
    for b in range(len(positions)):
        scores = of_heads(drawn.keys[b], queries[b])
        if drawn.num_rows <= budget:
            assert keep[b].all() if of_all else keep[b].shape[-1] == drawn.num_rows
        elif of_all:
            kept = [mask.nonzero().flatten().tolist() for mask in keep[b]]
            expected = reference.keep_pair(scores, budget)
            assert_equal_up_to_rounding(kept, expected, scores)
        else:
            kept = keep[b].tolist()
            expected = [reference.keep_uniform(one, budget) for one in scores]
            assert_equal_up_to_rounding(kept, expected, scores)


def assert_equal_up_to_rounding(
    kept: list[list[int]], expected: list[list[int]], scores: list[list[float]]
) -> None:
    """Rows that differ have scores that do not: rounding and ties may exchange them."""
    assert sum(map(len, kept)) == sum(map(len, expected))
    differing = [
        scores[head][row]
        for head in range(len(kept))
        for row in set(kept[head]) ^ set(expected[head])
    ]
    assert max(differing, default=0.0) - min(differing, default=0.0) <= ATOL


@recorded_related("epi_block")
def test_recorded_blocks_keep_the_recorded_rows(case: Case) -> None:
    """Level ``pair`` is ``heads = "shared"``; a layer's budget that of the layer."""
    arrays, args = case.arrays(), case.args
    heads = {"pair": "shared", "pair-uniform": "own"}[args["level"]]
    keys, queries = (torch.from_numpy(arrays[name]) for name in ("K", "Q_patch"))
    num_layers, num_heads = keys.shape[0], keys.shape[2]
    of_layers = args["layer_budget"] or [args["kv_budget"]] * num_layers
    held = [[[] for _ in range(num_heads)] for _ in range(num_layers)]
    seen = num_compared = 0
    for block, size in enumerate(args["blocks"]):
        new = list(range(seen, seen + size))
        seen += size
        expected_scores = iter(arrays[f"b{block}_scores"].tolist())
        expected_rows = iter(arrays[f"b{block}_positions"].tolist())
        for layer_idx, budget in enumerate(of_layers):
            now = [before + new for before in held[layer_idx]]
            lens = [len(one) for one in now]
            assert lens == arrays[f"b{block}_lens_before"][layer_idx].tolist()
            rows = ragged_rows(keys[layer_idx, 0], now, seen)
            rows = attrs.evolve(rows, lookahead_queries=queries[block, layer_idx])
            scored = load_policy("epicache").score(  # type: ignore[attr-defined]
                rows.keys, rows.positions, rows.lookahead_queries, rows.seq_len
            )
            for head, length in enumerate(lens):
                recorded = torch.tensor([next(expected_scores) for _ in range(length)])
                torch.testing.assert_close(
                    scored[0, head, -length:], recorded, atol=ATOL, rtol=1e-5
                )
            keep = select_rows("epicache", rows, budget=budget, heads=heads).keep
            if keep.dtype != torch.bool:
                keep = torch.zeros_like(rows.positions, dtype=torch.bool).scatter(2, keep, True)
            for head, length in enumerate(arrays[f"b{block}_lens"][layer_idx].tolist()):
                recorded_rows = [next(expected_rows) for _ in range(length)]
                kept = rows.positions[0, head][keep[0, head]].tolist()
                assert kept == recorded_rows
                held[layer_idx][head] = kept
                num_compared += 1
    assert num_compared == len(args["blocks"]) * num_layers * num_heads


def ragged_rows(keys: Tensor, positions: list[list[int]], seq_len: int) -> CacheView:
    """Rows of heads that hold different numbers of them; keys are ``[H_kv, T, D]``."""
    most = max(map(len, positions))
    table = torch.tensor([[-1] * (most - len(one)) + one for one in positions])
    rows = torch.take_along_dim(keys, table.clamp(min=0)[..., None], dim=1)
    rows = rows * (table >= 0)[..., None]
    return CacheView(positions=table[None], keys=rows[None], seq_len=torch.tensor([seq_len]))


# In the engine

MODEL: dict[str, Any] = {"num_layers": 2, "dtype": torch.float64}


def engine(budget: int, buffer: int, heads: Any = "own", *extra: object, **knobs: Any) -> Engine:
    knobs = {"prompt": (3, 7, 5)} | knobs
    plan = Plan.uniform(
        "epicache", *extra, budget=budget, buffer=buffer, heads=heads, knobs={"epicache": knobs}
    )
    return Engine(shared_model(**MODEL), tiny_tokenizer(), plan)


def tokens(length: int, seed: int = 0) -> list[int]:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(61, (length,), generator=rng).tolist()


def held(one: Engine, prompt: list[int]) -> tuple[SequenceSnapshot, CacheReport]:
    """A prompt after its prefill and what that has made due, and what it has cost."""
    cache = PolicyCache(one.adapter.model, one.plan, one.tokenizer)
    with torch.no_grad():
        one.adapter.model(input_ids=torch.tensor([prompt]), **cache_argument(cache))
        assert cache.core is not None
        cache.core.evictor.evict(cache.sequences)
    return cache.snapshot(0), cache.report


@costly
@given(st.integers(1, 60), st.sampled_from(["own", "shared"]), seeds)
def test_budget_that_nothing_exceeds_gives_the_tokens_of_a_full_cache(
    length: int, heads: str, seed: int
) -> None:
    prompt = tokens(length, seed)
    roomy = engine(64, 32, heads)
    full = Engine(shared_model(**MODEL), plan=Plan.full_cache())
    (ours,) = roomy.generate([prompt], max_new_tokens=12, stop_ids=()).results()
    (theirs,) = full.generate([prompt], max_new_tokens=12, stop_ids=()).results()
    assert ours.tokens == theirs.tokens


@costly
@given(
    st.integers(30, 90), st.integers(4, 12), st.integers(4, 12), st.sampled_from(["own", "shared"])
)
def test_prompt_of_any_length_ends_in_the_budget_and_never_holds_more_than_a_block_beside_it(
    length: int, budget: int, buffer: int, heads: str
) -> None:
    snapshot, report = held(engine(budget, buffer, heads), tokens(length))
    layers = snapshot.contents.layers
    counts = [int((layer.positions >= 0).sum()) for layer in layers]
    assert counts == [min(budget, length) * 2] * 2  # of 2 KV heads
    assert report.peak_rows <= budget + buffer
    row_bytes = 2 * 2 * 2 * 8 * 8  # of layers, heads, keys and values: 8 numbers of 8 bytes
    assert report.held_bytes <= (budget + buffer) * row_bytes


def test_each_block_keeps_what_the_patched_prompt_attends_to_in_the_rows_that_are_left() -> None:
    """In the first layer, whose keys depend on the tokens only, by loops over its projections."""
    prompt, patch, budget, buffer = tokens(30), [3, 7, 5], 8, 6
    snapshot, _ = held(engine(budget, buffer), prompt)
    kept: list[list[int]] = [[], []]
    seen = 0
    while seen < len(prompt):
        new = list(range(seen, min(seen + budget + buffer - len(kept[0]), len(prompt))))
        seen += len(new)
        queries = projected(patch, seen, "q_proj")
        for head in range(2):
            rows = kept[head] + new
            keys = projected(prompt, 0, "k_proj")[head, rows]
            scores = reference.scores(keys.tolist(), queries[2 * head : 2 * head + 2].tolist())
            kept[head] = [rows[row] for row in reference.keep_uniform(scores, budget)]
    assert snapshot.contents.layers[0].positions.tolist() == kept


@torch.no_grad()
def projected(ids: list[int], start: int, name: str) -> Tensor:
    """Queries or keys of tokens from a position on in the first layer, ``[H, N, D]``."""
    decoder = shared_model(**MODEL).model
    layer, size = decoder.layers[0], 8
    states = layer.input_layernorm(decoder.embed_tokens(torch.tensor([ids])))
    heads = getattr(layer.self_attn, name)(states)[0].view(len(ids), -1, size).transpose(0, 1)
    cos, sin = decoder.rotary_emb(heads, torch.arange(start, start + len(ids))[None])
    turned = torch.cat([-heads[..., size // 2 :], heads[..., : size // 2]], dim=-1)
    return heads * cos + turned * sin


@given(st.sampled_from(["own", "shared"]), st.integers(1, 40), seeds)
def test_patched_prompt_leaves_the_cache_as_it_is(heads: str, num: int, seed: int) -> None:
    """Rows that stay have the keys and values that a cache without compactions has."""
    prompt = tokens(50, seed)
    patch = tuple(tokens(num, seed + 1))
    with_lookahead, report = held(engine(10, 40, heads, prompt=patch), prompt)
    without, roomy = held(engine(60, 8, heads, prompt=patch), prompt)
    assert report.rows_evicted > roomy.rows_evicted == 0
    for ours, theirs in zip(with_lookahead.contents.layers, without.contents.layers, strict=True):
        for head in range(2):
            is_row = ours.positions[head] >= 0
            at = ours.positions[head][is_row]
            assert torch.equal(ours.keys[head][is_row], theirs.keys[head][at])
            assert torch.equal(ours.values[head][is_row], theirs.values[head][at])


def test_question_stays_beside_the_budget_in_a_resumed_sequence() -> None:
    """Only the first prompt's last block is compacted; a full buffer is, whenever."""
    one = engine(10, 12)
    snapshot = held(one, tokens(50))[0]
    question = Request(tokens(6, 1), 3, stop_ids=(), resume=snapshot, snapshot=True)
    (answer,) = one.generate([question]).results()
    layer = answer.snapshot.contents.layers[0]
    assert answer.compactions == 0
    assert layer.num_rows == 10 + 6 + 2
    assert torch.equal(layer.positions[:, :10], snapshot.contents.layers[0].positions)
    (long,) = one.generate([attrs.evolve(question, max_new_tokens=20)]).results()
    assert long.compactions > 0
    assert long.peak_rows == 22


def test_short_history_is_not_compacted_for_a_question_either() -> None:
    one = engine(10, 12)
    snapshot = held(one, tokens(8))[0]
    question = Request(tokens(6, 1), 3, stop_ids=(), resume=snapshot)
    assert one.generate([question]).results()[0].compactions == 0


def test_newest_tokens_follow_the_prompt() -> None:
    policy = load_policy("epicache", prompt=[3, 7], n_last=3, lookahead_size=4)
    lookahead = policy.lookahead(torch.arange(20), None)  # type: ignore[attr-defined]
    assert lookahead.token_ids == (3, 17, 18, 19), "the end of the prompt is left out"


def test_text_of_the_prompt_is_encoded_without_marks_of_a_beginning() -> None:
    tokenizer = tiny_tokenizer()
    policy = load_policy("epicache", prompt="t7 t8")
    expected = tokenizer("t7 t8", add_special_tokens=False)["input_ids"]
    assert list(policy.lookahead(torch.arange(5), tokenizer).token_ids) == expected  # type: ignore[attr-defined]


def test_text_without_a_tokenizer_is_refused_in_one_sentence() -> None:
    plan = Plan.uniform("epicache", budget=4, buffer=4)
    with pytest.raises(KVPolicyError, match=r"'epicache'.*tokenizer"):
        Engine(shared_model(**MODEL), plan=plan).generate([tokens(20)]).results()


def test_sinks_and_recent_rows_stay_if_asked() -> None:
    drawn_keys, queries = fill((1, 2, 16, 4), "gauss", 1), fill((1, 4, 3, 4), "gauss", 2)
    kept = keep_rows(
        "epicache",
        drawn_keys,
        drawn_keys,
        queries,
        budget=6,
        lookahead_queries=queries,
        n_sink=2,
        n_recent=2,
    )
    assert kept[..., :2].tolist() == [[[0, 1]] * 2]
    assert kept[..., -2:].tolist() == [[[14, 15]] * 2]
    with pytest.raises(BudgetError, match="8 rows"):
        keep_rows("epicache", drawn_keys, drawn_keys, queries, budget=6, n_sink=8)


def test_long_patched_prompts_are_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpolicy_plugins.epicache import policy

    keys, queries = fill((2, 2, 16, 4), "gauss", 1), fill((2, 4, 11, 4), "gauss", 2)
    positions = torch.arange(16).expand(2, 2, 16)
    one = load_policy("epicache")
    whole = one.score(keys, positions, queries, torch.tensor([16, 16]))  # type: ignore[attr-defined]
    monkeypatch.setattr(policy, "_WEIGHTS_AT_ONCE", 16 * 8 * 4)
    in_parts = one.score(keys, positions, queries, torch.tensor([16, 16]))  # type: ignore[attr-defined]
    torch.testing.assert_close(whole, in_parts)


def test_only_rows_of_the_wanted_heads_and_tokens_count() -> None:
    """A row that one token of one head of the group wants outranks one that all like a little."""
    keys = torch.zeros(1, 1, 4, 2)
    keys[0, 0, 1, 0] = 4.0
    queries = torch.zeros(1, 2, 3, 2)
    queries[0, 1, 2, 0] = 4.0
    kept = keep_rows("epicache", keys, keys, queries, budget=1, lookahead_queries=queries)
    assert kept.tolist() == [[[1]]]
    assert_threshold([1], [0.25, 0.99, 0.25, 0.25], atol=ATOL)
