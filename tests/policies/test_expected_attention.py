"""ExpectedAttention against loops, against kvpress, and on models."""

from functools import partial
from typing import Any

import pytest
import reference_expected_attention
import torch
from compare import assert_rows_shape, assert_threshold, heads
from families import FAMILIES, family_model
from golden_cases import Case, recorded_press
from hypothesis import given
from hypothesis import strategies as st
from strategies import Drawn, caches
from tiny import shared_model, tiny_model
from torch import Tensor
from torch.nn import functional as F

from kvpolicy import CacheView, Engine, Plan, hookimpl, load_policy, select_rows
from kvpolicy.engine.engine import Run
from kvpolicy.errors import BudgetError, ModelError
from kvpolicy.hooks.stack import Stack
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.rope import rotate_halves
from kvpolicy.state import Bound, LayerWeights
from kvpolicy.testing import keep_rows, replay

PROMPTS = [[5, 9, 40, 2, 2, 7, 11, 30, 1] * 3, [8, 1], [3] * 13, [17, 4, 4, 59, 21] * 4]


@st.composite
def knobs(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "window_size": draw(st.sampled_from([1, 3, 8, 128])),
        "n_future": draw(st.sampled_from([1, 5, 70])),
        "n_sink": draw(st.integers(0, 4)),
        "use_covariance": draw(st.booleans()),
        "use_vnorm": draw(st.booleans()),
        "epsilon": draw(st.sampled_from([0.0, 0.02])),
    }


def llama_weights(num_heads: int, head_dim: int) -> LayerWeights:
    """Weights of which only the rotation is real."""
    empty = torch.zeros(num_heads, head_dim, 1)
    rotate = partial(rotate_halves, 0)
    return LayerWeights(
        q=empty, k=empty, v=empty, o=empty.mT, scaling=head_dim**-0.5, rotate=rotate
    )


def bound_by(policy: object, weights: LayerWeights) -> Bound:
    return Stack([("expected_attention", policy)]).bind(0, weights)


def scores_of(drawn: Drawn, **knobs: Any) -> Tensor:
    policy = load_policy("expected_attention", **knobs)
    bound = bound_by(policy, llama_weights(drawn.queries.shape[1], drawn.keys.shape[3]))
    return policy.score(
        keys=drawn.keys,
        values=drawn.values,
        positions=torch.arange(drawn.num_rows).expand(drawn.keys.shape[:3]),
        queries=drawn.queries,
        seq_len=torch.tensor([drawn.num_rows] * len(drawn.keys)),
        bound=bound,
    )


@given(st.data(), knobs(), st.integers(0, 3))
def test_rows_and_scores_are_those_of_the_reference(
    data: st.DataObject, knobs: dict, more: int
) -> None:
    drawn = data.draw(caches(batch=1, min_rows=knobs["n_sink"] + 2, max_rows=16))
    least = max(knobs["n_sink"], 1)
    budget = data.draw(st.integers(least, drawn.num_rows - 1))
    inputs = (drawn.keys, drawn.values, drawn.queries)
    kept = keep_rows("expected_attention", *inputs, budget=budget, **knobs)
    assert_rows_shape(kept, drawn.keys, budget)
    scores, n_sink = scores_of(drawn, **knobs), knobs["n_sink"]
    for b, h, keys, queries in heads(drawn.keys, drawn.queries):
        expected = reference_expected_attention.expected_attention(
            keys, drawn.values[b, h].double().tolist(), queries, **knobs
        )
        found = scores[b, h, n_sink:].double()
        torch.testing.assert_close(found, torch.tensor(expected).double(), rtol=2e-3, atol=2e-5)
        rows = kept[b, h].tolist()
        assert rows[:n_sink] == list(range(n_sink))
        size = max(expected, default=1.0)
        assert_threshold([t - n_sink for t in rows[n_sink:]], expected, atol=1e-4 * size + 2e-5)


@given(caches(min_rows=6, max_rows=14), st.integers(1, 3))
def test_columns_that_a_head_has_no_row_for_change_nothing(drawn: Drawn, num_gone: int) -> None:
    policy = load_policy("expected_attention", n_sink=0, n_future=4)
    bound = bound_by(policy, llama_weights(drawn.queries.shape[1], drawn.keys.shape[3]))
    positions = torch.arange(drawn.num_rows).repeat(*drawn.keys.shape[:2], 1)
    positions[:, 0, :num_gone] = -1
    rows = {"queries": drawn.queries, "bound": bound}
    rows["seq_len"] = torch.tensor([drawn.num_rows] * len(drawn.keys))
    left = slice(num_gone, None)
    ragged = policy.score(keys=drawn.keys, values=drawn.values, positions=positions, **rows)
    alone = policy.score(
        keys=drawn.keys[:, :, left],
        values=drawn.values[:, :, left],
        positions=positions[:, :, left],
        **rows,
    )
    torch.testing.assert_close(ragged[:, 0, left], alone[:, 0])


def test_a_head_that_has_sinks_only_is_scored() -> None:
    policy = load_policy("expected_attention")
    zeros = torch.ones(1, 1, 4, 8)
    scores = policy.score(
        keys=zeros,
        values=zeros,
        positions=torch.arange(4).view(1, 1, 4),
        queries=zeros,
        seq_len=torch.tensor([30]),
        bound=bound_by(policy, llama_weights(1, 8)),
    )
    assert (scores == 0).all()


@recorded_press("ExpectedAttention")
def test_scores_and_rows_are_those_of_kvpress(case: Case) -> None:
    args = case.args
    arrays = {name: torch.from_numpy(array) for name, array in case.arrays().items()}
    keys, values, queries = (arrays[name] for name in "KVQ")
    options = dict(args["press_args"])
    if "n_future_positions" in options:
        options["n_future"] = options.pop("n_future_positions")
    options["window_size"] = args["T"]
    drawn = Drawn(keys=keys, values=values, queries=queries, kind="recorded", seed=0)
    scores, n_sink = scores_of(drawn, **options), options.get("n_sink", 4)
    recorded = arrays["score"]
    torch.testing.assert_close(scores[:, :, n_sink:], recorded[:, :, n_sink:], rtol=1e-4, atol=1e-6)
    assert (recorded[:, :, :n_sink] > recorded[:, :, n_sink:].amax()).all()
    policy = load_policy("expected_attention", **options)
    bound = bound_by(policy, llama_weights(args["Hq"], args["d"]))
    rows = CacheView(
        positions=torch.arange(args["T"]).expand(keys.shape[:3]),
        keys=keys,
        values=values,
        queries=queries,
        bound=bound,
    )
    for ratio in args["ratios"]:
        kept = arrays[f"r{100 * ratio:.0f}_kept"].long()
        inputs, budget = (keys, values, queries), kept.shape[2]
        assert torch.equal(keep_rows("expected_attention", *inputs, budget=budget, **options), kept)
        (once,) = replay(
            "expected_attention",
            *inputs,
            budget=budget,
            prompt=args["T"],
            compact_at=[args["T"]],
            **options,
        )
        assert torch.equal(once, kept)
        assert torch.equal(select_rows(policy, rows, budget=budget).keep, kept)


@recorded_press("ExpectedAttention")
def test_recorded_queries_before_rope_are_found_again(case: Case) -> None:
    arrays = {name: torch.from_numpy(array) for name, array in case.arrays().items()}
    queries = arrays["Q"]
    if "Q_prerope" in arrays:
        plain = arrays["Q_prerope"]
    else:
        plain = arrays["hidden_states"] @ arrays["q_weight"].mT + arrays.get("q_bias", 0)
        plain = plain.unflatten(2, (case.args["Hq"], -1)).transpose(1, 2)
        if "q_norm_weight" in arrays:
            plain = F.rms_norm(plain, plain.shape[3:], arrays["q_norm_weight"], eps=1e-6)
    back = -torch.arange(queries.shape[2]).expand(queries.shape[:3])
    torch.testing.assert_close(rotate_halves(0, queries, back), plain, rtol=1e-4, atol=1e-5)


# On models


class Watches:
    """Compares the scores under it with those of the queries that the model projects.

    `annotate` sees what enters the attention; from that, kvpress' formula is computed literally:
    the mean and covariance of projections, then the mean of rotated ones.
    """

    tracks = ("nothing",)

    def __init__(self, n_future: int, n_sink: int) -> None:
        self.n_future, self.n_sink, self.num = n_future, n_sink, 0
        self.states: dict[int, list[Tensor]] = {}

    @hookimpl
    def bind(self, weights: LayerWeights) -> LayerWeights:
        return weights

    @hookimpl
    def annotate(self, layer_idx: int, states: Tensor, keys: Tensor) -> dict[str, Tensor]:
        self.states.setdefault(layer_idx, []).append(states.clone())
        return {"nothing": keys.new_zeros(keys.shape[:2])}

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        seq_len: Tensor,
        bound: Bound,
    ) -> Any:
        scores = yield
        weights: LayerWeights = bound.of(self)
        states = torch.cat(self.states[layer_idx])[self.n_sink :]
        assert len(states) == int(seq_len[0]) - self.n_sink
        dim = keys.shape[3]
        queries = weights.queries(states).transpose(0, 1)  # [H_q, N, D]
        queries = queries * weights.scaling * dim**0.5
        mean = queries.mean(dim=1)
        off = queries - mean[:, None]
        covariance = off.mT @ off / off.shape[1]
        future = int(seq_len[0]) + torch.arange(self.n_future)
        num_heads = len(queries)
        basis = torch.eye(dim, dtype=queries.dtype)[None, :, None]
        spread = basis.expand(num_heads, -1, self.n_future, -1)
        turned = weights.rotate(spread, future.expand(spread.shape[:3])).mean(dim=2)  # R^T
        mean = (mean[:, None] @ turned)[:, 0]
        covariance = turned.mT @ covariance @ turned
        own = keys[0].repeat_interleave(num_heads // keys.shape[1], dim=0)  # [H_q, T, D]
        logits = (own @ mean[:, :, None])[..., 0] / dim**0.5
        logits += torch.einsum("htd,hde,hte->ht", own, covariance, own) / (2 * dim)
        logits = logits.unflatten(0, (keys.shape[1], -1))
        logits = logits.masked_fill(positions[0][:, None] < self.n_sink, -torch.inf)
        expected = logits.softmax(dim=-1).mean(dim=1) * values[0].norm(dim=-1)
        after = positions[0] >= self.n_sink
        torch.testing.assert_close(
            scores[0][after].double(), expected[after].double(), rtol=5e-3, atol=1e-5
        )
        self.num += 1
        return scores


@pytest.mark.few(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_on_models_it_is_the_formula_of_their_projections(family: str) -> None:
    model = family_model(family, window=100)
    watches = Watches(n_future=7, n_sink=2)
    policy = load_policy("expected_attention", n_future=7, n_sink=2)
    plan = Plan.uniform(policy, watches, budget=9, buffer=4)
    Engine(model, plan=plan, slots=1).generate(
        PROMPTS[:1], max_new_tokens=12, stop_ids=()
    ).results()
    assert watches.num > 3


def run(model: Any, prompts: list[list[int]], **knobs: Any) -> Run:
    plan = Plan.uniform(load_policy("expected_attention", **knobs), budget=9, buffer=4)
    engine = Engine(model, plan=plan, slots=len(prompts))
    return engine.generate(prompts, max_new_tokens=10, stop_ids=())


@pytest.mark.few(1)
@pytest.mark.parametrize("window", [128, 6])
def test_statistics_are_those_of_a_sequence_alone(window: int) -> None:
    model = shared_model(dtype=torch.float64)
    together = [one.tokens for one in run(model, PROMPTS, window_size=window).results()]
    alone = [run(model, [one], window_size=window).results()[0].tokens for one in PROMPTS]
    assert together == alone


def test_models_whose_queries_cannot_be_moved_are_refused_when_an_engine_is_built() -> None:
    model = tiny_model()
    model.get_decoder().rotary_emb.rope_type = "dynamic"
    plan = Plan.uniform("expected_attention", budget=9)
    with pytest.raises(ModelError, match="dynamic"):
        Engine(model, plan=plan)


def test_one_compaction_can_be_given_a_models_weights() -> None:
    weights = next(ModelAdapter(tiny_model()).layer_weights([0]))
    rng = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 2, 12, 8, generator=rng)
    queries = keys.repeat(1, 2, 1, 1)
    inputs = ("expected_attention", keys, keys, queries)
    given_weights = keep_rows(*inputs, budget=6, layer_weights=weights)
    assert torch.equal(given_weights, keep_rows(*inputs, budget=6))  # a Llama, too


def test_budget_below_the_sinks_raises() -> None:
    keys = torch.zeros(1, 1, 20, 2)
    with pytest.raises(BudgetError, match="expected_attention"):
        keep_rows("expected_attention", keys, keys, keys, budget=3)
