"""Lookahead Q-Cache against loops, against the authors' selections, and in the engine."""

from typing import Any

import pytest
import reference_laq
import torch
from compare import ATOL, assert_best_rows, assert_rows_shape, assert_threshold
from golden_cases import Case, recorded_related
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, budgets, caches, fill
from tiny import shared_model
from torch import Tensor

from kvpolicy import CacheView, Engine, Plan, hookimpl, load_policy, select_rows
from kvpolicy.errors import BudgetError
from kvpolicy.testing import keep_rows, replay

PROMPT = [5, 9, 40, 2, 2, 7, 11, 30, 1, 8, 1, 17, 4, 4, 59, 21, 33, 6, 6, 50, 12, 3, 44, 10]


@st.composite
def pooled(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "kernel_size": draw(st.sampled_from([1, 3, 5, 7])),
        "pooling": draw(st.sampled_from(["maxpool", "avgpool"])),
        "group_reduce": draw(st.sampled_from(["mean", "max", "sum"])),
        "compat_mask": draw(st.booleans()),
    }


def pseudo(drawn: Drawn, num: int) -> Tensor:
    """Queries of tokens that might follow, ``[B, H_q, P, D]``."""
    batch, num_heads, _, head_dim = drawn.queries.shape
    return fill((batch, num_heads, num, head_dim), "gauss", drawn.seed + 3, scale=1.5)


def groups(drawn: Drawn, queries: Tensor) -> list[tuple[int, int, list]]:
    """The queries of each KV head as lists."""
    grouped = queries.double().unflatten(1, (drawn.keys.shape[1], -1))
    return [
        (b, h, grouped[b, h].tolist())
        for b in range(grouped.shape[0])
        for h in range(grouped.shape[1])
    ]


def oracle(drawn: Drawn, num_local: int, ahead: Tensor, knobs: dict) -> Any:
    """The reference's scores of every head."""
    local = groups(drawn, drawn.queries[:, :, drawn.num_rows - num_local :])
    for (b, h, own), (_, _, others) in zip(local, groups(drawn, ahead), strict=True):
        keys = drawn.keys[b, h].double().tolist()
        yield b, h, reference_laq.laq(keys, own, others, **knobs)


@given(st.data(), pooled(), st.integers(0, 6), st.integers(1, 6))
def test_rows_and_scores_are_those_of_the_reference(
    data: st.DataObject, knobs: dict, num_local: int, num_ahead: int
) -> None:
    drawn = data.draw(caches(min_rows=num_local + 2))
    budget = data.draw(budgets(drawn.num_rows, min_budget=max(num_local, 1)))
    ahead = pseudo(drawn, num_ahead)
    given = {"n_local": num_local, **knobs}
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("laq", *inputs, budget=budget, lookahead_queries=ahead, **given)
    assert_rows_shape(kept, drawn.keys, budget)
    scores = load_policy(
        "laq", **given
    ).score(
        queries=drawn.queries,  # may be more than its own
        lookahead_queries=ahead,
        keys=drawn.keys,
        positions=torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3]),
        seq_len=torch.tensor([drawn.num_rows] * len(drawn.keys)),
    )
    for b, h, expected in oracle(drawn, num_local, ahead, knobs):
        found = scores[b, h].double()
        torch.testing.assert_close(found, torch.tensor(expected).double(), atol=10 * ATOL, rtol=0)
        before = expected[: drawn.num_rows - num_local]
        assert_best_rows(kept[b, h].tolist(), before, window=num_local, budget=budget)


@given(st.data(), pooled(), st.sampled_from([1, 4, 8]))
def test_without_look_ahead_it_is_snapkv_as_published(
    data: st.DataObject, knobs: dict, window: int
) -> None:
    del knobs["compat_mask"]
    drawn = data.draw(caches(min_rows=window + 1))
    budget = data.draw(budgets(drawn.num_rows, min_budget=window))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    own = {"n_lookahead": 0, "n_local": window}
    kept = keep_rows("laq", *inputs, budget=budget, phase="prefill", **own, **knobs)
    known = {"window_size": window, "phase": "prefill"}
    assert (kept == keep_rows("snapkv", *inputs, budget=budget, **known, **knobs)).all()


@given(st.data(), caches(min_rows=6, max_rows=24))
def test_a_stream_without_pseudo_tokens_uses_the_newest_query(
    data: st.DataObject, drawn: Drawn
) -> None:
    # `replay` has no model to look ahead: as if every look-ahead met the end of the text at once.
    budget = data.draw(st.integers(1, 5))
    plain = {"n_local": 0, "kernel_size": 1}
    first, second = replay(
        "laq",
        drawn.keys,
        drawn.values,
        drawn.queries,
        budget=budget,
        prompt=1,
        compact_at=[drawn.num_rows - 1, drawn.num_rows],
        **plain,
    )
    for b, heads in enumerate(first.tolist()):
        for h, left in enumerate(heads):
            keys = drawn.keys[b, h, [*left, drawn.num_rows - 1]].double()
            group = drawn.queries[b].double().unflatten(0, (drawn.keys.shape[1], -1))[h, :, -1]
            weights = (group @ keys.T / keys.shape[1] ** 0.5).softmax(dim=1).mean(dim=0).tolist()
            at = [left.index(p) if p in left else len(left) for p in second[b, h].tolist()]
            assert_threshold(at, weights, atol=10 * ATOL)


@given(st.data(), caches(num_kv_heads=2, min_rows=8, max_rows=20))
def test_columns_that_a_head_has_no_row_for_change_nothing(
    data: st.DataObject, drawn: Drawn
) -> None:
    num_gone = data.draw(st.integers(1, drawn.num_rows - 5))
    knobs = data.draw(pooled())
    policy = load_policy("laq", n_local=2, **knobs)
    positions = torch.arange(drawn.num_rows).repeat(*drawn.keys.shape[:2], 1)
    positions[:, 0, :num_gone] = -1
    rows = {"queries": drawn.queries[:, :, -2:], "lookahead_queries": pseudo(drawn, 3)}
    rows["seq_len"] = torch.tensor([drawn.num_rows] * len(drawn.keys))
    ragged = policy.score(keys=drawn.keys, positions=positions, **rows)
    left = slice(num_gone, None)
    alone = policy.score(keys=drawn.keys[:, :, left], positions=positions[:, :, left], **rows)
    whole = policy.score(keys=drawn.keys, positions=positions.clamp(min=0), **rows)
    torch.testing.assert_close(ragged[:, 0, left], alone[:, 0])
    torch.testing.assert_close(ragged[:, 1], whole[:, 1])


# The authors' code. It repeats keys and values to one copy per query head and selects for each.


def by_query_head(case: Case, arrays: dict) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys and values repeated as the code does, local queries and those of the look-ahead.

    Layers are the batch: ``[L, H_q, T, D]``.
    """
    group = case.args["Hq"] // case.args["Hkv"]
    keys, values = (
        torch.from_numpy(arrays[name])[:, 0].repeat_interleave(group, dim=1) for name in "KV"
    )
    local, ahead = (torch.from_numpy(arrays[f"Q_{name}"])[:, 0] for name in ("local", "lookahead"))
    return keys, values, local, ahead


def assert_same_selection(
    kept: Tensor, scores: Tensor, recorded: Any, num_rows: int, window: int
) -> None:
    """The same rows as recorded, up to those whose scores are equal, and the window."""
    for layer, head in torch.cartesian_prod(*map(torch.arange, kept.shape[:2])).tolist():
        ours, theirs = kept[layer, head].tolist(), recorded[layer, 0, head].tolist()
        assert ours[len(ours) - window :] == list(range(num_rows - window, num_rows))
        own = scores[layer, head].tolist()
        if set(ours) != set(theirs):  # a tie at the threshold
            differ = [own[t] for t in set(ours) ^ set(theirs)]
            assert max(differ) - min(differ) < ATOL
        assert len(ours) == len(theirs)


@recorded_related("laq_")
def test_stage_1_is_snapkv(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, local, _ = by_query_head(case, arrays)
    knobs = {"window_size": args["w1"], "kernel_size": args["kernel"], "pooling": args["pooling"]}
    kept = keep_rows("snapkv", keys, values, local, budget=args["C1"], phase="prefill", **knobs)
    scores = torch.from_numpy(arrays["stage1_scores"])[:, 0]
    assert_same_selection(kept, scores, arrays["stage1_kept"], args["S"], args["w1"])


@recorded_related("laq_")
def test_stage_2_keeps_the_rows_of_the_authors(case: Case) -> None:
    arrays, args = case.arrays(), case.args
    keys, values, local, ahead = by_query_head(case, arrays)
    knobs = {"n_local": args["w2"], "kernel_size": args["kernel"], "pooling": args["pooling"]}
    knobs |= {"n_lookahead": args["n"], "phase": "prefill", "compat_mask": True}
    kept = keep_rows("laq", keys, values, local, budget=args["C"], lookahead_queries=ahead, **knobs)
    recorded = torch.from_numpy(arrays["stage2_scores"])[:, 0]
    positions = torch.arange(args["S"]).expand(keys.shape[:3])
    scores = load_policy("laq", **knobs).score(
        queries=local,
        lookahead_queries=ahead,
        keys=keys,
        positions=positions,
        seq_len=torch.tensor([args["S"]] * len(keys)),
    )
    torch.testing.assert_close(scores[:, :, : recorded.shape[2]], recorded, atol=1e-5, rtol=1e-5)
    assert_same_selection(kept, recorded, arrays["stage2_kept"], args["S"], args["w2"])
    rows = CacheView(
        positions=positions, keys=keys, values=values, queries=local, lookahead_queries=ahead
    )
    assert torch.equal(select_rows(load_policy("laq", **knobs), rows, budget=args["C"]).keep, kept)
    # Where the code hides rows, at the end of the prompt, they are worth more.
    right = load_policy("laq", **{**knobs, "compat_mask": False}).score(
        queries=local,
        lookahead_queries=ahead,
        keys=keys,
        positions=positions,
        seq_len=torch.tensor([args["S"]] * len(keys)),
    )
    hidden = slice(args["S"] - args["w2"] - args["n"], None)
    assert (right[:, :, hidden].sum(dim=2) > scores[:, :, hidden].sum(dim=2)).all()


# In the engine


class Notes:
    """Notes how many pseudo queries each compaction of layer 0 had, and which rows stay."""

    def __init__(self) -> None:
        self.looked_ahead: list[int] = []
        self.kept: list[list[int]] = []

    @hookimpl(wrapper=True)
    def score(self, layer_idx: int, lookahead_queries: Tensor | None) -> Any:
        self.looked_ahead.append(0 if lookahead_queries is None else lookahead_queries.shape[2])
        return (yield)

    @hookimpl(wrapper=True)
    def select(self, positions: Tensor) -> Any:
        keep = yield
        self.kept.append(positions.gather(2, keep).flatten().tolist())
        return keep


def generate(stack: list[object], *, budget: int = 12, num: int = 20) -> Any:
    plan = Plan.uniform(*stack, budget=budget, buffer=4)
    engine = Engine(shared_model(), plan=plan, slots=1)
    return engine.generate([PROMPT], max_new_tokens=num, stop_ids=()).results()[0]


@pytest.mark.parametrize("num_local", [0, 8])
def test_as_published_it_looks_ahead_once_and_the_first_token_is_that_of_the_full_cache(
    num_local: int,
) -> None:
    notes, knobs = Notes(), {"n_local": num_local, "phase": "prefill", "n_lookahead": 5}
    result = generate([load_policy("laq", **knobs), notes])
    assert notes.looked_ahead == [5] * shared_model().config.num_hidden_layers
    assert result.rows_evicted > 0
    assert result.tokens[0] == generate(["full"]).tokens[0]
    assert result.peak_rows == 12 + 20 - 1  # the last token is not stored


def test_while_decoding_it_looks_ahead_whenever_the_buffer_is_full() -> None:
    notes = Notes()
    result = generate([load_policy("laq"), notes])
    assert result.compactions > 3
    assert set(notes.looked_ahead) == {8}
    assert result.peak_rows == 12 + 4


def test_its_pseudo_queries_are_those_of_the_tokens_that_follow() -> None:
    # With a window of the tokens that the full cache generates, SnapKV's sum would be the same.
    class Compares:
        window_size = 6

        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        @hookimpl
        def due(self, seq_len: Tensor, prompt_len: Tensor) -> Tensor:
            return seq_len == prompt_len + 6

        @hookimpl
        def score(self, layer_idx: int, queries: Tensor, positions: Tensor) -> Tensor:
            self.seen.append(queries.clone())
            return positions.double()

    class Asked(Notes):
        def __init__(self) -> None:
            super().__init__()
            self.queries: list[Tensor] = []

        @hookimpl(wrapper=True)
        def score(self, layer_idx: int, lookahead_queries: Tensor | None) -> Any:
            assert lookahead_queries is not None
            self.queries.append(lookahead_queries.clone())
            return (yield)

    later, asked = Compares(), Asked()
    knobs = {"n_local": 0, "n_lookahead": 6, "phase": "prefill"}
    generate([load_policy("laq", **knobs), asked])
    plan = Plan.uniform(later, budget=len(PROMPT) + 2, buffer=8)
    Engine(shared_model(), plan=plan, slots=1).generate(
        [PROMPT], max_new_tokens=8, stop_ids=()
    ).results()
    for mine, true in zip(asked.queries, later.seen, strict=True):
        torch.testing.assert_close(mine, true, atol=1e-4, rtol=1e-4)


def test_a_text_that_ends_at_the_first_pseudo_token_is_compacted() -> None:
    first = generate(["full"]).tokens[0]
    model = shared_model()
    notes, stop = Notes(), model.generation_config.eos_token_id
    model.generation_config.eos_token_id = first
    try:
        policy = load_policy("laq", n_local=0, phase="prefill")
        result = generate([policy, notes])
    finally:
        model.generation_config.eos_token_id = stop
    assert set(notes.looked_ahead) == {0}
    assert result.error is None
    assert result.rows_evicted > 0


# Properties that all policies have


def test_budget_below_the_local_rows_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="laq"):
        keep_rows("laq", keys, keys, keys, budget=7)


def test_plans_are_the_two_methods_of_the_paper() -> None:
    def knobs(name: str) -> dict:
        ((found,),) = (layer["stack"] for layer in Plan.load(name).resolve(1).to_dict()["layers"])
        return found

    plain, plus_plus = knobs("laq"), knobs("laq-plus-plus")
    assert (plain.pop("n_local"), plus_plus.pop("n_local")) == (0, 8)
    assert plain == plus_plus
    assert plain["n_lookahead"] == 8
