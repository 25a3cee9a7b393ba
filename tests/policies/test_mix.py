"""A mix ranks rows by the weighted sum of its parts' normalised scores."""

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


# The weighted sum, against an oracle


class FixedParts:
    """Parts with given scores, ``[P][T]`` for one head."""

    def __init__(self, ratings: list[list[float]]) -> None:
        self.ratings = ratings

    def of(self, _: object) -> list[torch.Tensor]:
        return [torch.tensor(part)[None, None] for part in self.ratings]


NOT_PROTECTED = torch.tensor(False)

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
def test_weighted_sum_equals_the_oracle(
    part_scores: list[list[float]], data: st.DataObject, normalise: str
) -> None:
    weights = [data.draw(st.sampled_from([0.25, 1.0, 3.0])) for _ in part_scores]
    of = [{"policy": "streaming", "weight": weight} for weight in weights]
    answer = Mix(of=of, normalise=normalise).score(NOT_PROTECTED, FixedParts(part_scores))
    expected = reference.mix(part_scores, weights, normalise)
    assert answer.dtype == torch.float32
    assert torch.allclose(answer[0, 0].double(), torch.tensor(expected).double(), atol=1e-5)


@given(ratings(), scales)
def test_constant_scores_of_a_part_do_not_change_the_ranking(
    part_scores: list[list[float]], normalise: str
) -> None:
    of = ["streaming"] * len(part_scores)
    without = Mix(of=of, normalise=normalise).score(NOT_PROTECTED, FixedParts(part_scores))
    part_scores = [*part_scores, [7.0] * len(part_scores[0])]
    with_it = Mix(of=[*of, "streaming"], normalise=normalise).score(
        NOT_PROTECTED, FixedParts(part_scores)
    )
    # The other parts are scaled by their share, and all rows get the same constant.
    share = (len(part_scores) - 1) / len(part_scores)
    difference = (with_it - share * without)[0, 0]
    assert torch.allclose(difference[difference.isfinite()].diff(), torch.zeros(1), atol=1e-5)


@given(ratings(), scales)
def test_infinite_scores_stay_infinite(part_scores: list[list[float]], normalise: str) -> None:
    answer = Mix(of=["streaming"] * len(part_scores), normalise=normalise).score(
        NOT_PROTECTED, FixedParts(part_scores)
    )[0, 0]
    for t in range(len(part_scores[0])):
        if any(part[t] == math.inf for part in part_scores):
            assert answer[t] == math.inf
        elif any(part[t] == -math.inf for part in part_scores):
            assert answer[t] == -math.inf
        else:
            assert answer[t].isfinite()


# A mix of real policies


@given(st.data(), drawn_cache(), parts, scales)
def test_mix_of_one_part_equals_the_part(
    data: st.DataObject, drawn: Drawn, part: dict[str, Any], normalise: str
) -> None:
    budget = data.draw(budgets(drawn.num_rows, min_budget=MOST_PROTECTED))
    plan = data.draw(rounds(drawn.num_rows))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    alone = replay(part["policy"], *inputs, budget=budget, **plan, **knobs_of(part))
    mixed = replay("mix", *inputs, budget=budget, **plan, of=[part], normalise=normalise)
    assert all(torch.equal(a, b) for a, b in zip(alone, mixed, strict=True))


@given(st.data(), drawn_cache(), parts, mixtures)
def test_part_with_weight_zero_has_no_effect(
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
def test_only_ratios_of_weights_matter(
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
def test_kept_rows_equal_the_oracle(
    data: st.DataObject, drawn: Drawn, mixture: list[dict[str, Any]], normalise: str
) -> None:
    """The scores of the parts come from the policies, which have their own oracle tests."""
    budget = data.draw(st.integers(MOST_PROTECTED, drawn.num_rows))
    weights = [data.draw(st.sampled_from([0.5, 1.0, 4.0])) for _ in mixture]
    of = [part | {"weight": w} for part, w in zip(mixture, weights, strict=True)]
    inputs = (drawn.keys, drawn.values, drawn.queries)
    recorded: list[torch.Tensor] = []
    for part in mixture:
        keep_rows(
            [load_policy(part["policy"], **knobs_of(part)), RecordsScores(recorded)],
            *inputs,
            budget=budget,
        )
    kept = keep_rows("mix", *inputs, budget=budget, of=of, normalise=normalise)
    if drawn.num_rows == budget:
        assert not recorded
        return
    for b in range(2):
        for head in range(drawn.keys.shape[1]):
            part_scores = [scores[b, head].tolist() for scores in recorded]
            mixed = reference.mix(part_scores, weights, normalise)
            assert_best_rows(kept[b, head].tolist(), mixed, budget=budget, atol=1e-5)


class RecordsScores:
    """A wrapper that records the wrapped scores, infinite where a row is protected."""

    def __init__(self, recorded: list[torch.Tensor]) -> None:
        self.recorded = recorded

    @hookimpl(wrapper=True)
    def score(
        self, layer_idx: int, protected: torch.Tensor
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        scores = yield
        self.recorded.append(scores.masked_fill(protected, torch.inf))
        return scores


@given(drawn_cache(), mixtures, scales)
def test_mixing_does_not_depend_on_other_sequences(
    drawn: Drawn, mixture: list[dict[str, Any]], normalise: str
) -> None:
    assert_batch_equals_single_rows("mix", drawn, MOST_PROTECTED, of=mixture, normalise=normalise)


@given(drawn_cache(), seeds)
def test_nested_mix_equals_its_part(drawn: Drawn, seed: int) -> None:
    inner = {"policy": "mix", "of": [PARTS[seed % 5]], "normalise": "rank"}
    outer = PARTS[(seed // 5) % 5]
    kept = [
        keep_rows("mix", drawn.keys, drawn.values, drawn.queries, budget=8, of=of)
        for of in ([inner, outer], [PARTS[seed % 5], outer])
    ]
    assert torch.equal(*kept)


# Cost


def stack_of(*of: Any) -> Stack:
    return Stack([("mix", load_policy("mix", of=list(of)))])


def test_stack_reads_only_the_arguments_of_the_parts() -> None:
    cheap = stack_of("streaming", {"policy": "streaming", "n_sink": 2})
    assert cheap.reads == {"parts", "positions", "protected"}
    assert (cheap.window_size, cheap.tracks) == (0, ())
    costly = stack_of({"policy": "rkv", "window_size": 5}, "h2o", "snapkv")
    assert costly.reads >= {"keys", "queries", "attn_sums"}
    assert "attn_weights" not in costly.reads
    assert costly.window_size == 8
    assert costly.tracks == ("attn_sums", "mix.0.rkv_rank", "mix.2.snapkv_rank")


def test_arguments_of_parts_with_weight_zero_are_not_computed() -> None:
    stack = stack_of("streaming", {"policy": "h2o", "weight": 0})
    assert "attn_sums" not in stack.reads
    assert stack.tracks == ()


def test_plan_protects_the_rows_that_parts_protect() -> None:
    stack = stack_of("streaming", {"policy": "rkv", "window_size": 5})
    assert (stack.n_first, stack.n_last) == (4, 5)
    plan = Plan.uniform("mix", budget=8, knobs={"mix": {"of": ["streaming", "rkv"]}})
    with pytest.raises(BudgetError, match=r"mix.*12 rows"):
        plan.resolve(2)


def test_one_unbounded_part_makes_the_stack_unbounded() -> None:
    assert stack_of("streaming", "rkv").bounded
    assert not stack_of("streaming", {"policy": "snapkv", "phase": "prefill"}).bounded


def test_part_decides_when_to_compact() -> None:
    plan = Plan.uniform(
        "mix",
        budget=12,
        buffer=8,
        knobs={"mix": {"of": [{"policy": "h2o", "n_recent": 4, "every": 1}, "streaming"]}},
    )
    (result,) = Engine(shared_model(), plan=plan).generate([[1, 2, 3]], max_new_tokens=20).results()
    assert result.peak_rows == 13


def test_part_divides_the_budget_among_layers() -> None:
    part = {"policy": "pyramidkv", "window_size": 4, "beta": 5}
    stacks: list[dict[str, Any]] = [part, {"policy": "mix", "of": ["random", part]}]
    alone, mixed = (
        Plan.from_dict({"stack": [one], "budget": 16, "buffer": 4}).resolve(4) for one in stacks
    )
    assert mixed.layers[0].budget == alone.layers[0].budget > 16
    assert sum(layer.budget or 0 for layer in mixed.layers) == 64


# Plans


TOML = """
budget = 24
stack = [
  { policy = "mix", of = [{ policy = "h2o", weight = 0.5 }, { policy = "rkv", mix_lambda = 0.2 }] },
]
"""


def test_resolved_plan_contains_all_knobs_of_parts(tmp_path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(TOML)
    (spec,) = Plan.load(file).resolve(2).layers[0].stack
    assert spec.knobs["normalise"] == "rank"
    first, second = spec.knobs["of"]
    assert (first["policy"], first["weight"]) == ("h2o", 0.5)
    assert (second["weight"], second["mix_lambda"], second["window_size"]) == (1.0, 0.2, 8)


def test_resolved_plan_survives_a_json_round_trip() -> None:
    plan = Plan.uniform("mix", budget=24, knobs={"mix": {"of": ["h2o", "snapkv", "mix"]}})
    resolved = plan.resolve(2)
    spec = resolved.layers[0].stack[0]
    # TOML and JSON hold lists where Python holds tuples.
    of = json.loads(json.dumps(spec.knobs["of"]))
    assert None not in [knob for part in of for knob in part.values()]
    again = Plan.from_dict({"budget": 24, "stack": [{"policy": "mix", "of": of}]})
    assert again.resolve(2).digest() == resolved.digest()
    other = Plan.uniform("mix", budget=24, knobs={"mix": {"of": ["h2o", "snapkv"]}})
    assert other.resolve(2).digest() != resolved.digest()


# Mistakes


@pytest.mark.parametrize("knobs", [{"mixlambda": 0.2}, {"mix_lambda": 2}], ids=str)
def test_invalid_knobs_of_a_part_give_the_message_of_the_part(knobs: dict) -> None:
    with pytest.raises(KnobError, match=r"'mix'.* 0.*'rkv'.*mix_lambda"):
        load_policy("mix", of=[{"policy": "rkv", **knobs}])


def test_unknown_part_suggests_the_nearest_policy() -> None:
    with pytest.raises(KVPolicyError, match=r"1: .*'h20'.* h2o"):
        load_policy("mix", of=["streaming", "h20"])


@pytest.mark.parametrize(
    ("part", "part_scores"),
    [
        ("merge", r"policy 'merge' in 'mix' implements evict\(\), which is not called for parts"),
        ("full", r"policy 'full' in 'mix' implements no score\(\)"),
        ("skipkv_batches", r"policy 'skipkv_batches' in 'mix' implements schedule\(\)"),
    ],
)
def test_unsupported_parts_raise(part: str, part_scores: str) -> None:
    plan = Plan.uniform("mix", budget=24, knobs={"mix": {"of": ["streaming", part]}})
    with pytest.raises(PolicyLoadError, match=part_scores):
        plan.resolve(2)


def test_undeclared_parts_raise() -> None:
    with pytest.raises(PolicyLoadError, match="parts"):
        Parts({}).of(Scores(None))
