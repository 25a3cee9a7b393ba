"""KeyDiff against loops over the keys, and against rows recorded from kvpress."""

import torch
from compare import ATOL, assert_best_rows, assert_rows_shape, heads
from golden_cases import Case, recorded_press
from hypothesis import given
from hypothesis import strategies as st
from reference_keydiff import keydiff
from strategies import Drawn, budgets, caches, rounds

from kvpolicy import load_policy
from kvpolicy.testing import keep_rows, replay


@given(st.data(), caches(num_queries=1), st.integers(0, 4))
def test_keeps_the_rows_of_the_reference(data: st.DataObject, drawn: Drawn, n_recent: int) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=max(n_recent, 1)))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("keydiff", *inputs, budget=budget, n_recent=n_recent)
    assert_rows_shape(kept, drawn.keys, budget)
    window = min(n_recent, drawn.num_rows)
    for b, h, keys, _ in heads(drawn.keys, drawn.queries):
        scores = keydiff(keys)[: drawn.num_rows - window]
        assert_best_rows(kept[b, h].tolist(), scores, window=window, budget=budget)


@given(st.data(), caches(min_rows=6, max_rows=28))
def test_the_mean_is_that_of_the_rows_held_now(data: st.DataObject, drawn: Drawn) -> None:
    # Two rows are equally far from their mean: with a budget of 1 rounding would choose.
    budget = data.draw(st.integers(2, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    answer = replay("keydiff", drawn.keys, drawn.values, drawn.queries, budget=budget, **plan)
    for b, h, keys, _ in heads(drawn.keys, drawn.queries):
        held: list[int] = []
        seen = 0
        for kept, count in zip(answer, plan["compact_at"], strict=True):
            held += range(seen, count)
            seen = count
            ours = kept[b, h].tolist()
            scores = keydiff([keys[t] for t in held])
            assert_best_rows([held.index(position) for position in ours], scores, budget=budget)
            held = ours


@given(caches(num_queries=1, min_rows=4), st.integers(1, 3))
def test_heads_with_fewer_rows_score_theirs_as_if_alone(drawn: Drawn, num_absent: int) -> None:
    positions = torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3]).clone()
    keys = drawn.keys.clone()
    positions[:, 0, :num_absent], keys[:, 0, :num_absent] = -1, 0
    scores = load_policy("keydiff").score(keys=keys, positions=positions)
    for b, h, of_head, _ in heads(keys, drawn.queries):
        rows = of_head[num_absent:] if h == 0 else of_head
        expected = torch.tensor(keydiff(rows), dtype=torch.float64)
        ours = scores[b, h, len(of_head) - len(rows) :].double()
        torch.testing.assert_close(ours, expected, atol=ATOL, rtol=0)


@recorded_press("KeyDiff")
def test_rows_and_scores_equal_those_of_kvpress(case: Case) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in case.arrays().items()}
    keys, values, queries = (arrays[name] for name in "KVQ")
    positions = torch.arange(case.args["T"]).expand(keys.shape[:3])
    scores = load_policy("keydiff").score(keys=keys, positions=positions)
    torch.testing.assert_close(scores, arrays["score"], atol=ATOL, rtol=0)
    for ratio in case.args["ratios"]:
        expected = arrays[f"r{ratio * 100:.0f}_kept"]
        kept = keep_rows("keydiff", keys, values, queries, budget=expected.shape[2])
        assert torch.equal(kept, expected)


def test_keys_of_another_length_score_the_same() -> None:
    keys = torch.randn(1, 2, 12, 4, generator=torch.Generator().manual_seed(0))
    lengths = torch.rand(1, 2, 12, 1, generator=torch.Generator().manual_seed(1)) + 0.5
    positions = torch.arange(12).expand(1, 2, 12)
    score = load_policy("keydiff").score
    plain, scaled = (score(keys=one, positions=positions) for one in (keys, keys * lengths))
    torch.testing.assert_close(plain, scaled)
