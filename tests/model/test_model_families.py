"""Every supported family: tokens equal ``generate``, and hooks get the model's attention."""

from typing import ClassVar

import attrs
import pytest
import torch
from families import FAMILIES, attention_implementation, family_model
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts, roomy_plans
from tiny import greedy_tokens
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.cache.rows import Tracks

ROOMY = 64  # rows: more than any prompt and its continuation


@pytest.mark.nightly
@given(
    st.sampled_from(sorted(FAMILIES)),
    prompts(count=3, max_len=40),
    roomy_plans(num_layers=2, rows=ROOMY),
    st.integers(1, 3),
    st.sampled_from([1, 4, 512]),
)
def test_unexceeded_budget_equals_generate(
    family: str, prompts: list[list[int]], plan: Plan, slots: int, chunk: int
) -> None:
    model = family_model(family)
    engine = Engine(model, plan=plan, slots=slots, chunk=chunk)
    for prompt, result in zip(
        prompts, engine.generate(prompts, max_new_tokens=16).results(), strict=True
    ):
        assert list(result.tokens) == greedy_tokens(model, prompt, 16)
        assert result.rows_evicted == 0


PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 12]


@pytest.mark.few(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_generate(family: str) -> None:
    """By fused attention, by weights that rows accumulate, and with a window of queries."""
    model = family_model(family)
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    for policy in ("full", "h2o", "rkv"):
        engine = Engine(model, plan=Plan.uniform(policy, budget=64), slots=2, chunk=5)
        results = engine.generate(PROMPTS, max_new_tokens=9).results()
        assert [list(result.tokens) for result in results] == expected, policy


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("policy", ["h2o", "snapkv"])
def test_batched_sequence_equals_sequence_alone_and_is_bounded(family: str, policy: str) -> None:
    """In double precision, as in `test_open_run`."""
    model = family_model(family, window=17, dtype=torch.float64)
    knobs = {"h2o": {"n_recent": 3}} if policy == "h2o" else {"snapkv": {"window_size": 3}}
    plan = Plan.uniform(policy, budget=8, buffer=4, knobs=knobs)
    run = Engine(model, plan=plan, slots=2, chunk=5).generate(PROMPTS, max_new_tokens=13)
    for prompt, result in zip(PROMPTS, run.results(), strict=True):
        (alone,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=13).results()
        assert result.tokens == alone.tokens
        assert result.peak_rows == 12
        assert result.compactions > 0


@attrs.define(eq=False)
class RecordsScoreArguments:
    """Records the arguments of its first `score` call, after ``at`` tokens."""

    at: int
    recorded: dict[int, tuple[Tensor, Tensor, Tensor]] = attrs.field(factory=dict)
    window_size: int = 4

    @hookimpl
    def due(self, seq_len: Tensor) -> Tensor:
        return seq_len >= self.at

    @hookimpl
    def score(
        self, layer_idx: int, attn_weights: Tensor, attn_sums: Tensor, positions: Tensor
    ) -> Tensor:
        arguments = (attn_weights.clone(), attn_sums.clone(), positions.clone())
        self.recorded.setdefault(layer_idx, arguments)
        return positions.float()


@pytest.mark.few(6)
@pytest.mark.parametrize("family", FAMILIES)
def test_attention_arguments_equal_the_weights_of_the_model(family: str) -> None:
    """Including soft caps, sinks and scaling: compared with transformers' weights."""
    model, prompt = family_model(family), [5, 9, 40, 2, 2, 7, 11, 30, 31, 6, 17]
    policy = RecordsScoreArguments(at=20)
    plan = Plan.uniform(policy, budget=3, buffer=64)
    (result,) = Engine(model, plan=plan, chunk=4).generate([prompt], max_new_tokens=12).results()
    seen = torch.tensor([[*prompt, *result.tokens][: policy.at]])
    with attention_implementation(model, "eager"), torch.no_grad():
        weights = model(seen, output_attentions=True, use_cache=False).attentions
    for layer_idx, (attn_weights, attn_sums, positions) in policy.recorded.items():
        rows = positions[0].repeat_interleave(2, dim=0)  # two query heads to a KV head
        used = weights[layer_idx][0]  # [H_q, L, T]
        everything = used.sum(dim=2, keepdim=True)
        used = used.gather(2, rows[:, None].expand(-1, used.shape[1], -1))
        # Weight on rows that have left a window is redistributed over the rows still held.
        held = 1 - (everything - used.sum(dim=2, keepdim=True))
        assert torch.allclose(attn_weights[0] * held[:, -4:], used[:, -4:], atol=1e-5)
        received = used.sum(dim=1).view(2, 2, -1).sum(dim=1)
        assert torch.allclose(attn_sums[0], received, atol=1e-4)
    assert sorted(policy.recorded) == [0, 1]


@attrs.define(eq=False)
class AccumulatesWeights:
    """Accumulates the weights of all compactions in a track."""

    tracks: ClassVar[tuple[str, ...]] = ("added",)
    held: list[Tensor] = attrs.field(factory=list)

    @hookimpl
    def score(self, layer_idx: int, keys: Tensor, attn_weights: Tensor, tracks: Tracks) -> Tensor:
        weights = attn_weights.sum(dim=2).unflatten(1, (keys.shape[1], -1)).sum(dim=2)
        tracks["added"] = tracks["added"] + weights
        self.held.append(tracks["added"])
        return tracks["added"]


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])  # with sinks and without
def test_tracks_do_not_hold_an_autograd_graph(family: str) -> None:
    """Learned sinks are parameters, so a track could keep the graph of every step alive."""
    policy = AccumulatesWeights()
    plan = Plan.uniform(policy, budget=3, buffer=2)
    Engine(family_model(family), plan=plan).generate([[5, 9, 40]], max_new_tokens=9).results()
    assert len(policy.held) > 2
    assert not any(held.requires_grad for held in policy.held)
