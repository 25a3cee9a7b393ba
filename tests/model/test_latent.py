"""Latent attention: rows of latents serve all heads, and nothing is expanded."""

from functools import cache
from typing import Any

import attrs
import pytest
import torch
import transformers
from any_model import tiny_random_model
from families import attention_implementation
from tiny import greedy_tokens
from torch import Tensor, nn

from kvpolicy import Engine, Plan, PolicyCache, hookimpl
from kvpolicy.compat import cache_argument
from kvpolicy.errors import ModelError, PlanError

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]
# Sizes of a latent and of a rotated key in tiny models.
LATENT, ROTATED = 12, 4


@cache
def latent_model(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = tiny_random_model(name)
    if not any(hasattr(module, "expand_kv") for module in model.modules()):
        pytest.skip("this release of transformers stores what latents are expanded to")
    return model.to(dtype)


NAMES = ["YoutuForCausalLM", "DeepseekV3ForCausalLM"]  # decoded in static and in eager steps


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NAMES)
def test_an_unexceeded_budget_equals_generate(name: str) -> None:
    model = latent_model(name)
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    run = Engine(model, plan=Plan.uniform("h2o", budget=64), slots=2, chunk=5).generate(
        PROMPTS, max_new_tokens=9
    )
    assert [list(result.tokens) for result in run.results()] == expected
    for prompt, answer in zip(PROMPTS, expected, strict=True):
        found = model.generate(
            torch.tensor([prompt]),
            **cache_argument(PolicyCache(model, Plan.uniform("full"))),
            max_new_tokens=9,
            do_sample=False,
        )
        assert found[0, len(prompt) :].tolist() == answer


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["h2o", "snapkv", "rkv", "merge"])
def test_a_sequence_in_a_batch_equals_itself_alone(policy: str) -> None:
    model = latent_model(NAMES[0], torch.float64)
    stack = ("h2o", "merge") if policy == "merge" else (policy,)
    plan = Plan.uniform(*stack, budget=24, buffer=4)
    prompts = [PROMPTS[0] * 6, PROMPTS[2] * 3]
    run = Engine(model, plan=plan, slots=2, chunk=5).generate(prompts, max_new_tokens=13)
    for prompt, result in zip(prompts, run.results(), strict=True):
        (alone,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=13)
        assert result.tokens == alone.tokens
        assert result.compactions > 0


@attrs.define(eq=False)
class Records:
    """Records the arguments of its first `score` call, after ``at`` tokens."""

    at: int
    recorded: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = attrs.field(factory=dict)
    window_size: int = 4

    @hookimpl
    def due(self, seq_len: Tensor) -> Tensor:
        return seq_len >= self.at

    @hookimpl
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        attn_weights: Tensor,
        attn_sums: Tensor,
        positions: Tensor,
    ) -> Tensor:
        seen = (keys.clone(), values.clone(), attn_weights.clone(), attn_sums.clone())
        self.recorded.setdefault(layer_idx, seen)
        return positions.float()


@pytest.mark.parametrize("name", NAMES)
def test_policies_read_latents_and_the_weights_of_the_model(name: str) -> None:
    model, prompt = latent_model(name), [5, 9, 40, 2, 2, 7, 11, 30, 31, 6, 17]
    policy = Records(at=20)
    plan = Plan.uniform(policy, budget=3, buffer=64)
    (result,) = Engine(model, plan=plan, chunk=4).generate([prompt], max_new_tokens=12)
    seen = torch.tensor([[*prompt, *result.tokens][: policy.at]])
    with attention_implementation(model, "eager"), torch.no_grad():
        output = model(seen, output_attentions=True, use_cache=True)
    cached = output.past_key_values if "past_key_values" in output else output.cache
    assert sorted(policy.recorded) == list(range(model.config.num_hidden_layers))
    for layer_idx, (keys, values, attn_weights, attn_sums) in policy.recorded.items():
        latents, rotated = cached.layers[layer_idx].keys, cached.layers[layer_idx].values
        torch.testing.assert_close(keys, torch.cat([latents, rotated], dim=-1))
        torch.testing.assert_close(values, latents)
        weights = output.attentions[layer_idx]
        torch.testing.assert_close(attn_weights, weights[:, :, -4:], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(
            attn_sums, weights.sum(dim=(1, 2))[:, None], atol=1e-4, rtol=1e-4
        )


def test_bytes_are_those_of_latents() -> None:
    model = latent_model(NAMES[0])
    plan = Plan.uniform("h2o", budget=8, buffer=4)
    engine = Engine(model, plan=plan, slots=1)
    (result,) = engine.generate([PROMPTS[0]], max_new_tokens=13)
    row = (LATENT + ROTATED + LATENT) * 4  # keys, and values beside them, in fp32
    assert result.peak_bytes == 12 * row * model.config.num_hidden_layers
    run = engine.open_run(max_len=64)
    allocated = sum(slab.nbytes for layer in run.cache.layers for slab in layer.store.slabs)
    assert allocated == 12 * row * model.config.num_hidden_layers


class Wrapped(nn.Linear):
    """A linear layer that is not torch's own, as those with adapters."""

    def forward(self, given: Tensor) -> Tensor:
        return super().forward(given) * 0.5


def test_a_projection_of_any_kind_is_absorbed() -> None:
    model = tiny_random_model(NAMES[0])
    latent_model(NAMES[0])  # skips
    for layer in model.model.layers:
        layer.self_attn.kv_b_proj.__class__ = Wrapped
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    run = Engine(model, plan=Plan.uniform("full"), slots=2).generate(PROMPTS, max_new_tokens=9)
    assert [list(result.tokens) for result in run.results()] == expected


def test_a_bias_of_the_expansion_is_refused() -> None:
    model = tiny_random_model(NAMES[0])
    latent_model(NAMES[0])  # skips
    attention = model.model.layers[0].self_attn
    attention.kv_b_proj.bias = nn.Parameter(torch.ones(attention.kv_b_proj.out_features))
    with pytest.raises(ModelError, match="bias"):
        Engine(model, plan=Plan.uniform("full"))


@pytest.mark.skipif(
    not hasattr(transformers, "DeepseekV32ForCausalLM"), reason="a later release has such models"
)
def test_an_indexer_is_refused() -> None:
    with pytest.raises(ModelError, match=r"indexe|sparse_attention"):
        Engine(tiny_random_model("DeepseekV32ForCausalLM"), plan=Plan.uniform("full"))


def test_integers_need_heads_of_one_size() -> None:
    plan = Plan.uniform("h2o", budget=8, buffer=4, rows="int8")
    with pytest.raises(PlanError, match="16 channels, its values 12"):
        Engine(latent_model(NAMES[0]), plan=plan)
