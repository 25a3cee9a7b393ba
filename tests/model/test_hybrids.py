"""Hybrid models: states of fixed size beside rows. Tokens equal ``generate``, and batches alone."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import pytest
import torch
from families import model_of
from hybrids import FAMILIES_WITH_STATES, QUICK, hybrid_model
from tiny import greedy_tokens
from torch import Tensor

from kvpolicy import Engine, Lookahead, Plan, Request, hookimpl
from kvpolicy.compat import has_states
from kvpolicy.engine.memory.footprint import footprint, slots_within
from kvpolicy.errors import ModelError, PlanError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.dump import to_plan_data

pytestmark = pytest.mark.skipif(not has_states(), reason="transformers has no cache for states")

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 12, [8, 30, 7]]

# Policies with the knobs that small budgets need, and the budget.
POLICIES: dict[str, tuple[dict[str, Any], int]] = {
    "h2o": ({"n_recent": 3}, 8),
    "snapkv": ({"window_size": 3}, 8),
    "streaming": ({}, 12),
    "skipkv": ({"delimiters": (3, 7), "tau": 0.5, "window_size": 4}, 12),
}


def plan_of(policy: str) -> Plan:
    knobs, budget = POLICIES[policy]
    return Plan.uniform(policy, budget=budget, buffer=4, knobs={policy: knobs} if knobs else {})


@pytest.mark.parametrize("family", FAMILIES_WITH_STATES)
def test_every_hybrid_equals_generate(family: str) -> None:
    """In batches of unequal prompts, whole and in chunks."""
    model = hybrid_model(family)
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    assert len({tuple(tokens) for tokens in expected}) > 1
    for policy, chunk in (("full", 512), ("h2o", 5)):
        engine = Engine(model, plan=Plan.uniform(policy, budget=64), slots=3, chunk=chunk)
        run = engine.generate(PROMPTS, max_new_tokens=9)
        assert [list(result.tokens) for result in run.results()] == expected, policy
        assert run.report.path.startswith("eager")


@pytest.mark.parametrize("family", FAMILIES_WITH_STATES)
def test_chunks_leave_no_token_to_enter_alone(family: str) -> None:
    """Which some compute otherwise, so that logits would depend on how a prompt is cut."""
    model = hybrid_model(family, dtype=torch.float64)
    request = Request(prompt=[3 + 7 * i % 50 for i in range(31)], max_new_tokens=1, logprobs=0)
    found = []
    for chunk in (512, 15, 10, 3):
        engine = Engine(model, plan=Plan.uniform("full"), chunk=chunk)
        (result,) = engine.generate([request]).results()
        assert result.logprobs is not None
        found.append(result.logprobs[0].logprob)
    assert found == pytest.approx([found[0]] * 4, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES_WITH_STATES)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sequence_in_a_batch_equals_itself_alone(family: str, policy: str) -> None:
    """In double precision, as in `test_open_run`."""
    model, plan = hybrid_model(family, dtype=torch.float64), plan_of(policy)
    run = Engine(model, plan=plan, slots=3, chunk=5).generate(PROMPTS, max_new_tokens=13)
    results = run.results()
    assert results[2].compactions > 1
    assert max(result.peak_rows for result in results) == POLICIES[policy][1] + 4
    for prompt, result in zip(PROMPTS, results, strict=True):
        (alone,) = Engine(model, plan=plan, chunk=5).generate([prompt], max_new_tokens=13).results()
        assert result.tokens == alone.tokens
        assert result.rows_evicted == alone.rows_evicted


@pytest.mark.parametrize("family", ["lfm2", pytest.param("falcon_h1", marks=pytest.mark.slow)])
def test_bytes_of_both_kinds_are_those_that_are_allocated(family: str) -> None:
    model, plan = hybrid_model(family), plan_of("snapkv")
    found = footprint(plan, model, slots=2, longest=20)
    run = Engine(model, plan=plan, slots=2).generate([[5] * 10] * 2, max_new_tokens=10)
    run.results()
    assert found.num_bytes == run.cache.num_bytes
    states = sum(layer.num_bytes for layer in run.cache.states.values())
    assert found.slots * found.state_bytes_per_slot == states > 0
    smaller = footprint(plan_of("h2o"), model, slots=2, longest=20)
    assert smaller.state_bytes_per_slot == found.state_bytes_per_slot
    assert slots_within(found.needed_bytes, plan, model, longest=20) == 2
    assert slots_within(found.needed_bytes - 1, plan, model, longest=20) == 1


@pytest.mark.parametrize("family", [*QUICK, pytest.param("jamba", marks=pytest.mark.slow)])
def test_bytes_are_known_without_weights(family: str) -> None:
    model = hybrid_model(family)
    with torch.device("meta"):
        skeleton = type(model)(model.config)
    shapes = zip(
        ModelAdapter(skeleton).layer_shapes(), ModelAdapter(model).layer_shapes(), strict=True
    )
    assert all(one.states == other.states for one, other in shapes)


class Asked:
    """Keeps the newest rows, and notes the layers that it is asked about."""

    def __init__(self) -> None:
        self.layers: set[int] = set()
        self.budgets: list[int] = []

    @hookimpl
    def allocate(
        self, layer_indices: Sequence[int], total: int, floors: Sequence[int]
    ) -> list[int]:
        rest = total - sum(floors)
        return [floor + (rest if i == 0 else 0) for i, floor in enumerate(floors)]

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor) -> Tensor:
        self.layers.add(layer_idx)
        return positions.float()


def test_policies_are_asked_in_attention_layers_and_share_their_rows() -> None:
    model, policy = hybrid_model("lfm2"), Asked()
    run = Engine(model, plan=Plan.uniform(policy, budget=6, buffer=4)).generate(
        [[5] * 20], max_new_tokens=4
    )
    run.results()
    assert policy.layers == {1, 3}
    layers = run.engine.plan.layers
    assert [layer.budget for layer in layers] == [None, 11, None, 1]
    assert [layer.has_rows for layer in layers] == [False, True, False, True]


def test_plans_name_attention_layers() -> None:
    first = {"where": "attention[:1]", "stack": ["full"]}
    rest = {"where": "attention[1:]", "stack": ["h2o"], "budget": 8}
    plan = Plan.from_dict({"layers": [first, rest]})
    names = [[spec.policy for spec in layer.stack] for layer in plan.resolve(3).layers]
    assert names == [["full"], ["h2o"], ["h2o"]]
    hybrid = plan.resolve(4, attention=[1, 3])
    assert [[spec.policy for spec in layer.stack] for layer in hybrid.layers] == [
        [],
        ["full"],
        [],
        ["h2o"],
    ]
    assert hybrid.attention == [1, 3]
    for where in ("all", "attention", "::1", [1, 3]):
        same = Plan.from_dict({"layers": [rest | {"where": where}]}).resolve(4, attention=[1, 3])
        assert same == Plan.uniform("h2o", budget=8).resolve(4, attention=[1, 3])
        assert Plan.from_dict(to_plan_data(same)).resolve(4, attention=[1, 3]) == same


@pytest.mark.parametrize(
    ("where", "problem"),
    [([0], "layer 0, which holds no rows"), ("0:1", "covers none"), ([1], "cover layer 3")],
)
def test_plans_for_layers_without_attention_are_refused(where: Any, problem: str) -> None:
    plan = Plan.from_dict({"stack": ["full"], "layers": [{"where": where}]})
    with pytest.raises(PlanError, match=problem):
        plan.resolve(4, attention=[1, 3])


def test_a_plan_resolved_for_other_layers_is_refused() -> None:
    with pytest.raises(PlanError, match=r"rows in layers 0, 1, 2, 3.* 1, 3"):
        Engine(hybrid_model("lfm2"), plan=Plan.full_cache().resolve(4))


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (
            "recurrent_gemma",
            {"num_hidden_layers": 3, "max_position_embeddings": 256},
            "its own modules",
        ),
        ("mamba2", {"num_heads": 4, "head_dim": 16, "n_groups": 1}, "attention"),
        ("falcon_mamba", {}, "attention"),
    ],
)
def test_hybrids_that_cannot_be_run_are_refused(
    kind: str, changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ModelError, match=problem):
        Engine(model_of(kind, **changes), plan=Plan.full_cache())


class FirstQueries:
    """Notes the queries of its first compaction in each layer, and keeps the newest rows."""

    def __init__(self) -> None:
        self.seen: dict[int, Tensor] = {}


class LooksAhead(FirstQueries):
    lookahead_size = 3

    def __init__(self, *, follow: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.follow = follow

    @hookimpl
    def lookahead(self) -> Lookahead:
        return Lookahead(self.follow) if self.follow else Lookahead(num_greedy=3)

    @hookimpl
    def score(self, layer_idx: int, lookahead_queries: Tensor, positions: Tensor) -> Tensor:
        self.seen.setdefault(layer_idx, lookahead_queries.clone())
        return positions.double()


class LooksBack(FirstQueries):
    window_size = 3

    @hookimpl
    def score(self, layer_idx: int, queries: Tensor, positions: Tensor) -> Tensor:
        self.seen.setdefault(layer_idx, queries.clone())
        return positions.double()


@pytest.mark.parametrize(
    "family",
    ["lfm2", *(pytest.param(one, marks=pytest.mark.slow) for one in ("qwen3_next", "jamba"))],
)
@pytest.mark.parametrize("is_greedy", [True, False])
def test_a_lookahead_has_the_queries_of_the_tokens_that_follow(
    family: str, is_greedy: bool
) -> None:
    """Those that the same tokens have once they are decoded, and it changes no token."""
    model, prompt = hybrid_model(family, dtype=torch.float64), PROMPTS[0]
    expected = greedy_tokens(model, prompt, 12)
    # The cache is full at 10 rows, so with the first 3 new tokens; the next are looked at.
    ahead = LooksAhead(follow=None if is_greedy else tuple(expected[3:6]))
    back = LooksBack()
    for policy, buffer in ((ahead, 3), (back, 6)):
        plan = Plan.uniform(policy, budget=7, buffer=buffer)
        (result,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=12).results()
        assert list(result.tokens[:4]) == expected[:4]
        assert result.compactions > 0
    assert ahead.seen.keys() == back.seen.keys()
    assert len(ahead.seen) > 0
    for layer_idx, queries in back.seen.items():
        # Parts of some models compute in single precision.
        torch.testing.assert_close(ahead.seen[layer_idx], queries, rtol=1e-4, atol=1e-5)


@attrs.define(eq=False)
class KeepsBrightStates:
    """Annotates each row with the norm of what entered its attention, and keeps the largest."""

    tracks: ClassVar[tuple[str, ...]] = ("norm",)
    seen: list[Tensor] = attrs.field(factory=list)

    @hookimpl
    def annotate(self, states: Tensor, keys: Tensor) -> dict[str, Tensor]:
        norms = states.norm(dim=1, keepdim=True).expand(keys.shape[:2])
        return {"norm": norms.float()}

    @hookimpl
    def score(self, tracks: Mapping[str, Tensor]) -> Tensor:
        self.seen.append(tracks["norm"].clone())
        return tracks["norm"]


@pytest.mark.parametrize("family", FAMILIES_WITH_STATES)
def test_rows_are_annotated_or_the_model_is_refused(family: str) -> None:
    """Zamba's layers share the module that attends, and what enters it has another size."""
    policy = KeepsBrightStates()
    plan = Plan.uniform(policy, budget=6, buffer=4)
    if family in ("zamba", "zamba2", "zaya"):
        with pytest.raises(ModelError, match="read its attention"):
            Engine(hybrid_model(family), plan=plan)
        return
    Engine(hybrid_model(family), plan=plan).generate(PROMPTS, max_new_tokens=9).results()
    assert policy.seen
    assert all((norms > 0).all() for norms in policy.seen)
