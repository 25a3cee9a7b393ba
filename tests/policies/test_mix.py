"""A mix keeps the rows that the weighted sum of its parts' scores, on one scale, puts first."""

import json
import math
from collections.abc import Generator
from typing import Any

import pytest
import reference
import torch
from compare import assert_best_rows
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.mix import Mix
from policy_checks import (
    assert_batch_equals_single_rows,
    assert_half_precision_works,
    assert_knobs_refused,
    assert_nothing_leaves,
)
from recorder import Scores
from strategies import Drawn, budgets, caches, rounds, seeds
from tiny import shared_model

from kvpolicy import Engine, Plan, hookimpl, load_policy
from kvpolicy.errors import BudgetError, KnobError, KVPolicyError, PolicyLoadError
from kvpolicy.hooks.stack import Stack
from kvpolicy.state import Parts
from kvpolicy.testing import keep_rows, replay

SCALES = ("rank", "minmax", "zscore", "sum")
scales = st.sampled_from(SCALES)

#: Parts with tracks, with windows of different sizes, with neither.
PARTS: tuple[dict[str, Any], ...] = (
    {"policy": "h2o", "n_recent": 3},
    {"policy": "rkv", "window_size": 4},
    {"policy": "snapkv", "window_size": 2, "kernel_size": 3},
    {"policy": "rkv", "window_size": 3, "mix_lambda": 0.6},
    {"policy": "streaming", "n_sink": 2},
)
MOST_PROTECTED = 6  # 2 first, 4 newest

parts = st.sampled_from(PARTS)
mixtures = st.lists(parts, min_size=1, max_size=3)


def knobs_of(part: dict[str, Any]) -> dict[str, Any]:
    return {name: knob for name, knob in part.items() if name != "policy"}


def drawn_cache() -> st.SearchStrategy[Drawn]:
    return caches(min_rows=2, max_rows=28)


# The sum itself, against an oracle


class Says:
    """A part in a test of the sum alone: scores as given, ``[P][T]`` for one head."""

    def __init__(self, ratings: list[list[float]]) -> None:
        self.ratings = ratings

    def of(self, _: object) -> list[torch.Tensor]:
        return [torch.tensor(part)[None, None] for part in self.ratings]


# Halves and tens: many ties, some constant parts; infinities both ways.
finite = st.sampled_from([0.0, -0.5, 1.0, 2.5, 10.0, 1000.0]) | st.floats(-1e3, 1e3, width=32)
ratings_of = st.sampled_from([math.inf, -math.inf]) | finite | finite | finite


@st.composite
def ratings(draw: st.DrawFn) -> list[list[float]]:
    num_rows = draw(st.integers(1, 9))
    row = st.lists(ratings_of, min_size=num_rows, max_size=num_rows)
    constant = finite.map(lambda x: [x] * num_rows)
    return draw(st.lists(row | constant, min_size=1, max_size=3))


@given(ratings(), st.data(), scales)
def test_the_sum_equals_the_oracle(
    said: list[list[float]], data: st.DataObject, normalise: str
) -> None:
    weights = [data.draw(st.sampled_from([0.25, 1.0, 3.0])) for _ in said]
    of = [{"policy": "streaming", "weight": weight} for weight in weights]
    answer = Mix(of=of, normalise=normalise).score(Says(said))
    expected = reference.mix(said, weights, normalise)
    assert answer.dtype == torch.float32
    assert torch.allclose(answer[0, 0].double(), torch.tensor(expected).double(), atol=1e-5)


@given(ratings(), scales)
def test_a_part_that_says_the_same_of_all_rows_says_nothing(
    said: list[list[float]], normalise: str
) -> None:
    of = ["streaming"] * len(said)
    without = Mix(of=of, normalise=normalise).score(Says(said))
    said = [*said, [7.0] * len(said[0])]
    with_it = Mix(of=[*of, "streaming"], normalise=normalise).score(Says(said))
    # Half of the others' say, or two thirds, and for all rows the same on top of it.
    share = (len(said) - 1) / len(said)
    difference = (with_it - share * without)[0, 0]
    assert torch.allclose(difference[difference.isfinite()].diff(), torch.zeros(1), atol=1e-5)


@given(ratings(), scales)
def test_pinned_rows_stay_pinned_and_offered_ones_offered(
    said: list[list[float]], normalise: str
) -> None:
    answer = Mix(of=["streaming"] * len(said), normalise=normalise).score(Says(said))[0, 0]
    for t in range(len(said[0])):
        if any(part[t] == math.inf for part in said):
            assert answer[t] == math.inf
        elif any(part[t] == -math.inf for part in said):
            assert answer[t] == -math.inf
        else:
            assert answer[t].isfinite()


# A mix of real policies


@given(st.data(), drawn_cache(), parts, scales)
def test_a_mix_of_one_keeps_what_the_one_keeps(
    data: st.DataObject, drawn: Drawn, part: dict[str, Any], normalise: str
) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=MOST_PROTECTED))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    alone = replay(part["policy"], *inputs, budget=budget, **plan, **knobs_of(part))
    mixed = replay("mix", *inputs, budget=budget, **plan, of=[part], normalise=normalise)
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))


@given(st.data(), drawn_cache(), parts, mixtures)
def test_a_part_of_weight_0_has_no_say(
    data: st.DataObject, drawn: Drawn, part: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=MOST_PROTECTED))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    of = [part, *(other | {"weight": 0} for other in others)]
    alone = replay(part["policy"], *inputs, budget=budget, **plan, **knobs_of(part))
    mixed = replay("mix", *inputs, budget=budget, **plan, of=of)
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))


@given(st.data(), drawn_cache(), mixtures, scales, st.sampled_from([0.01, 0.5, 3.0, 700.0]))
def test_weights_count_relative_to_each_other(
    data: st.DataObject,
    drawn: Drawn,
    mixture: list[dict[str, Any]],
    normalise: str,
    factor: float,
) -> None:
    weights = [data.draw(st.sampled_from([0.2, 1.0, 2.0])) for _ in mixture]
    kept = [
        keep_rows(
            "mix",
            drawn.keys,
            drawn.values,
            drawn.queries,
            budget=MOST_PROTECTED,
            of=[part | {"weight": w * by} for part, w in zip(mixture, weights, strict=True)],
            normalise=normalise,
        )
        for by in (1.0, factor)
    ]
    assert torch.equal(*kept)


@given(st.data(), caches(batch=2, min_rows=MOST_PROTECTED + 1), mixtures, scales)
def test_its_rows_are_those_of_the_oracles_sum(
    data: st.DataObject, drawn: Drawn, mixture: list[dict[str, Any]], normalise: str
) -> None:
    """The parts' scores are read off the policies themselves, which have oracles of their own."""
    budget = data.draw(st.integers(MOST_PROTECTED, drawn.num_rows))
    weights = [data.draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in mixture]
    of = [part | {"weight": w} for part, w in zip(mixture, weights, strict=True)]
    inputs = (drawn.keys, drawn.values, drawn.queries)
    noted: list[torch.Tensor] = []
    for part in mixture:
        keep_rows(
            [load_policy(part["policy"], **knobs_of(part)), Notes(noted)], *inputs, budget=budget
        )
    kept = keep_rows("mix", *inputs, budget=budget, of=of, normalise=normalise)
    if drawn.num_rows == budget:
        assert not noted
        return
    for b in range(2):
        for head in range(drawn.keys.shape[1]):
            said = [scores[b, head].tolist() for scores in noted]
            mixed = reference.mix(said, weights, normalise)
            assert_best_rows(kept[b, head].tolist(), mixed, budget=budget, atol=1e-5)


class Notes:
    """A wrapper that notes the scores underneath."""

    def __init__(self, noted: list[torch.Tensor]) -> None:
        self.noted = noted

    @hookimpl(wrapper=True)
    def score(self) -> Generator[None, torch.Tensor, torch.Tensor]:
        scores = yield
        self.noted.append(scores.clone())
        return scores


@given(drawn_cache(), mixtures, scales)
def test_a_sequence_is_mixed_as_if_it_were_alone(
    drawn: Drawn, mixture: list[dict[str, Any]], normalise: str
) -> None:
    assert_batch_equals_single_rows("mix", drawn, MOST_PROTECTED, of=mixture, normalise=normalise)


@given(drawn_cache(), mixtures)
def test_nothing_leaves_below_the_budget(drawn: Drawn, mixture: list[dict[str, Any]]) -> None:
    assert_nothing_leaves("mix", drawn, drawn.num_rows + MOST_PROTECTED, of=mixture)


@pytest.mark.parametrize("normalise", SCALES)
def test_half_precision(normalise: str) -> None:
    assert_half_precision_works("mix", 12, normalise=normalise)


@given(drawn_cache(), seeds)
def test_a_mix_of_a_mix_is_a_mix(drawn: Drawn, seed: int) -> None:
    inner = {"policy": "mix", "of": [PARTS[seed % 5]], "normalise": "rank"}
    outer = PARTS[(seed // 5) % 5]
    kept = [
        keep_rows("mix", drawn.keys, drawn.values, drawn.queries, budget=8, of=of)
        for of in ([inner, outer], [PARTS[seed % 5], outer])
    ]
    assert torch.equal(*kept)


# What it costs


def stack_of(*of: Any) -> Stack:
    return Stack([("mix", load_policy("mix", of=list(of)))])


def test_the_engine_computes_what_the_parts_name_and_nothing_else() -> None:
    cheap = stack_of("streaming", {"policy": "streaming", "n_sink": 2})
    assert cheap.reads == {"parts", "positions"}
    assert (cheap.window_size, cheap.tracks) == (0, ())
    costly = stack_of({"policy": "rkv", "window_size": 5}, "h2o", "snapkv")
    assert costly.reads >= {"keys", "queries", "attn_sums"}
    assert "attn_weights" not in costly.reads
    assert costly.window_size == 8
    assert costly.tracks == ("attn_sums", "mix.0.rkv_rank", "mix.2.snapkv_rank")


def test_what_a_part_of_weight_0_names_is_not_computed() -> None:
    stack = stack_of("streaming", {"policy": "h2o", "weight": 0})
    assert "attn_sums" not in stack.reads
    assert stack.tracks == ()


def test_what_parts_protect_the_plan_protects() -> None:
    stack = stack_of("streaming", {"policy": "rkv", "window_size": 5})
    assert (stack.n_first, stack.n_last) == (4, 5)
    plan = Plan.uniform("mix", budget=8, knobs={"mix": {"of": ["streaming", "rkv"]}})
    with pytest.raises(BudgetError, match=r"\(mix\) protect 12 rows: 4 first and 8 newest"):
        plan.resolve(2)


def test_one_unbounded_part_makes_slabs_grow() -> None:
    assert stack_of("streaming", "rkv").bounded
    assert not stack_of("streaming", {"policy": "snapkv", "phase": "prefill"}).bounded


def test_a_part_says_when_to_compact() -> None:
    plan = Plan.uniform(
        "mix",
        budget=12,
        buffer=8,
        knobs={"mix": {"of": [{"policy": "h2o", "n_recent": 4, "every": 1}, "streaming"]}},
    )
    (result,) = Engine(shared_model(), plan=plan).generate([[1, 2, 3]], max_new_tokens=20).results()
    assert result.peak_rows == 13


# Plans


TOML = """
budget = 24
stack = [
  { policy = "mix", of = [{ policy = "h2o", weight = 0.5 }, { policy = "rkv", mix_lambda = 0.2 }] },
]
"""


def test_a_resolved_plan_spells_out_the_knobs_of_parts(tmp_path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(TOML)
    (spec,) = Plan.load(file).resolve(2).layers[0].stack
    assert spec.knobs["normalise"] == "rank"
    first, second = spec.knobs["of"]
    assert (first["policy"], first["weight"]) == ("h2o", 0.5)
    assert (second["weight"], second["mix_lambda"], second["window_size"]) == (1.0, 0.2, 8)


def test_a_resolved_plan_goes_to_toml_and_back_to_the_same_digest() -> None:
    plan = Plan.uniform("mix", budget=24, knobs={"mix": {"of": ["h2o", "snapkv", "mix"]}})
    resolved = plan.resolve(2)
    spec = resolved.layers[0].stack[0]
    # What TOML can say, JSON can, and both hold lists where Python holds tuples.
    of = json.loads(json.dumps(spec.knobs["of"]))
    assert None not in [knob for part in of for knob in part.values()]
    again = Plan.from_dict({"budget": 24, "stack": [{"policy": "mix", "of": of}]})
    assert again.resolve(2).digest() == resolved.digest()
    other = Plan.uniform("mix", budget=24, knobs={"mix": {"of": ["h2o", "snapkv"]}})
    assert other.resolve(2).digest() != resolved.digest()


# Mistakes


@pytest.mark.parametrize(
    "knobs",
    [
        {"of": []},
        {"of": "h2o"},
        {"of": [3]},
        {"of": [{"weight": 1.0}]},
        {"of": [{"policy": "h2o", "weight": -1}]},
        {"of": [{"policy": "h2o", "weight": math.inf}]},
        {"of": [{"policy": "h2o", "weight": math.nan}]},
        {"of": [{"policy": "h2o", "weight": True}]},
        {"of": [{"policy": "h2o", "weight": "much"}]},
        {"of": [{"policy": "h2o", "weight": 0}]},
        {"normalise": "borda"},
    ],
    ids=str,
)
def test_bad_knobs_are_refused(knobs: dict) -> None:
    assert_knobs_refused("mix", knobs, KnobError)


@pytest.mark.parametrize("knobs", [{"mixlambda": 0.2}, {"mix_lambda": 2}], ids=str)
def test_a_part_refuses_its_knobs_in_its_own_words(knobs: dict) -> None:
    with pytest.raises(KnobError, match="policy 'mix' has a wrong part 0: policy 'rkv'") as caught:
        load_policy("mix", of=[{"policy": "rkv", **knobs}])
    assert "'mix_lambda' must be <= 1" in str(caught.value) or "mean mix_lambda" in str(
        caught.value
    )


def test_an_unknown_part_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        KVPolicyError, match="wrong part 1: no policy is named 'h20'; did you mean h2o"
    ):
        load_policy("mix", of=["streaming", "h20"])


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("merge", r"policy 'merge' in 'mix' implements evict\(\), which is not called for parts"),
        ("full", r"policy 'full' in 'mix' implements no score\(\)"),
        ("skipkv_batches", r"policy 'skipkv_batches' in 'mix' implements schedule\(\)"),
    ],
)
def test_what_cannot_be_mixed_is_refused(part: str, said: str) -> None:
    plan = Plan.uniform("mix", budget=24, knobs={"mix": {"of": ["streaming", part]}})
    with pytest.raises(PolicyLoadError, match=said):
        plan.resolve(2)


def test_only_who_declares_parts_may_ask_them() -> None:
    with pytest.raises(PolicyLoadError, match="asks its parts and declares none"):
        Parts({}).of(Scores(None))
