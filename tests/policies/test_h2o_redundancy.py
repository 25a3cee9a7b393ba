"""The plan of H2O's sums with R-KV's redundancy against loops over both papers' formulas."""

from itertools import pairwise

import reference
from compare import ATOL, assert_best_rows, heads
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, caches, rounds

from kvpolicy import Plan
from kvpolicy.testing import replay

(KNOBS,) = Plan.load("h2o-redundancy").resolve(1).to_dict()["layers"][0]["stack"]
WEIGHT, WINDOW = 0.1, 8  # R-KV's lambda and window


@given(st.data(), caches(min_rows=WINDOW + 2, max_rows=28))
def test_rows_are_scored_by_sums_over_all_queries_minus_redundancy(
    data: st.DataObject, drawn: Drawn
) -> None:
    budget = data.draw(st.integers(WINDOW, drawn.num_rows - 1))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    knobs = {name: knob for name, knob in KNOBS.items() if name != "policy"}
    answer = replay(KNOBS["policy"], *inputs, budget=budget, **plan, **knobs)
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        ours = [kept[b, h].tolist() for kept in answer]
        follow_stream(keys, queries, ours, budget, **plan)


def follow_stream(
    keys: list,
    queries: list,
    answer: list[list[int]],
    budget: int,
    *,
    prompt: int,
    compact_at: list[int],
) -> None:
    """Check every round given the previous rounds.

    R-KV compares the rows in the order of its last scores, here those of redundancy alone.
    """
    resident: list[int] = []
    by_rank: list[int] = []
    hitters = reference.HeavyHitters(len(queries))
    for kept, (begin, end) in zip(answer, pairwise([0, *compact_at]), strict=True):
        for first, last in fed(begin, end, prompt):
            resident += range(first, last)
            by_rank += range(first, last)
            hitters.forward([keys[t] for t in resident], [one[first:last] for one in queries])
        if len(resident) <= budget:
            assert kept == resident
            continue
        found = reference.redundancy([keys[t] for t in by_rank])
        similar = dict(zip(by_rank, found, strict=True))
        candidates = resident[:-WINDOW]
        scores = reference.sums_and_redundancy(
            hitters.scores()[:-WINDOW], [similar[t] for t in candidates], WEIGHT
        )
        places = [resident.index(position) for position in kept]
        assert_best_rows(places, scores, window=WINDOW, budget=budget, atol=1e-5)
        ordered = sorted((t for t in kept if t in candidates), key=similar.__getitem__)
        if any(similar[b] - similar[a] < ATOL for a, b in pairwise(ordered)):
            return  # rounding may have swapped these two
        by_rank = ordered + resident[-WINDOW:]
        resident = kept
        hitters.keep(places)


def fed(begin: int, end: int, prompt: int) -> list[tuple[int, int]]:
    """Spans of tokens that enter together: the prompt at once, then one by one."""
    first = [(0, prompt)] if begin == 0 else []
    return first + [(t, t + 1) for t in range(max(begin, prompt), end)]
