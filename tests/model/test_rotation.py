"""Keys rotated to other positions equal the keys that the model computes there."""

from typing import Any

import pytest
import tiny
import torch
import transformers
from any_model import tiny_random_model
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_reasoner.model import load_reasoner
from transformers import AutoModelForCausalLM, PreTrainedModel

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.cache.eager_step import EagerStep
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rows import LayerRows
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.compat import cache_in, has_states
from kvpolicy.errors import ModelError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.forward_input import ForwardInput
from kvpolicy.model.rope import rotate_halves

_SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,  # whose state is zero
}


def model_of(family: str, **changes: Any) -> PreTrainedModel:
    config_class = getattr(transformers, f"{family}Config")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config_class(**(_SMALL | changes))).eval()


def rope(kind: str, **options: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


MOVABLE = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "normed heads": ("Qwen3", {"head_dim": 8}),
    "mistral": ("Mistral", {}),
    "half of the head": ("Phi3", rope("default", partial_rotary_factor=0.5)),
    "half of the head, split by the model": ("Phi", rope("default", partial_rotary_factor=0.5)),
    "interleaved": ("Cohere", {}),
    "interleaved half": ("Glm", {"head_dim": 8}),
    "scaled attention": (
        "Llama",
        rope("yarn", factor=4.0, original_max_position_embeddings=128),
    ),
    "linear scaling": ("Llama", rope("linear", factor=2.0)),
    "a layer without RoPE": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "two thetas": ("Gemma3Text", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
}


def keys_at(model: PreTrainedModel, position: int) -> list[torch.Tensor]:
    """Keys in every layer of a single token at ``position``, by plain transformers."""
    ids = torch.tensor([[7]])
    with torch.inference_mode():
        cache = cache_in(model(ids, position_ids=torch.tensor([[position]]), use_cache=True))
    return [layer.keys for layer in cache.layers]


@pytest.mark.few(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("family", "changes"), MOVABLE.values(), ids=MOVABLE)
def test_rotated_key_equals_the_key_at_its_new_position(
    family: str, changes: dict, dtype: torch.dtype
) -> None:
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"this release has no {family}")
    model = model_of(family, **changes).to(dtype)
    rotation = ModelAdapter(model).rotation()
    for start, by in ((0, 1), (5, 300), (9, 0)):
        for layer_idx, (source, target) in enumerate(
            zip(keys_at(model, start), keys_at(model, start + by), strict=True)
        ):
            moved = rotation(layer_idx, source, torch.full(source.shape[:3], by))
            assert moved.dtype == dtype
            if by == 0:
                assert torch.equal(moved, source)
            error = (moved.float() - target.float()).norm() / target.float().norm()
            assert error < (1e-5 if dtype == torch.float32 else 0.02)


ANY = {
    "the last numbers of a head": "DeepseekV3ForCausalLM",
    "the last numbers, of heads with latents": "MiniCPM3ForCausalLM",
    "keys apart from queries": "Gemma3nForCausalLM",
    "no positions at all": "JambaForCausalLM",
    "states in some layers": "Lfm2ForCausalLM",
    "an embedding of another name": "Lfm2MoeForCausalLM",
    "states and a part of the head": "Qwen3NextForCausalLM",
}


@pytest.mark.slow
@pytest.mark.parametrize("class_name", ANY.values(), ids=ANY)
def test_keys_of_models_with_other_layers_are_rotated(class_name: str) -> None:
    if not (has_states() and hasattr(transformers, class_name)):
        pytest.skip(f"this release has no {class_name}, or runs none of its layers")
    model = tiny_random_model(class_name)
    adapter = ModelAdapter(model)
    rotation = adapter.rotation()
    found = {}
    for position in (4, 90):
        shapes = adapter.layer_shapes()
        cache = KVCache(shapes, [Slab(1)] * len(shapes), 1)
        cache.seq_len[0] = position
        step = EagerStep(cache, [0], [1])
        adapter.forward(ForwardInput(torch.tensor([[7]]), step))
        step.commit()
        found[position] = {index: cache.layers[index].keys for index in adapter.attention_layers}
    assert adapter.attention_layers
    for layer_idx in adapter.attention_layers:
        source, target = (found[position][layer_idx] for position in (4, 90))
        moved = rotation(layer_idx, source, torch.full(source.shape[:3], 86))
        torch.testing.assert_close(moved, target, atol=1e-4, rtol=1e-4)


def test_rotated_keys_of_a_trained_model_equal_its_own() -> None:
    model, _ = load_reasoner()
    rotation = ModelAdapter(model).rotation()
    for layer_idx, (source, target) in enumerate(
        zip(keys_at(model, 4), keys_at(model, 90), strict=True)
    ):
        moved = rotation(layer_idx, source, torch.full(source.shape[:3], 86))
        torch.testing.assert_close(moved, target, atol=1e-4, rtol=1e-4)


REFUSED = {
    "dynamic": ("Llama", rope("dynamic", factor=2.0), "'dynamic', changes with the length"),
    "longrope": (
        "Phi3",
        rope(
            "longrope",
            short_factor=[1.0] * 4,
            long_factor=[2.0] * 4,
            original_max_position_embeddings=128,
        )
        | {"original_max_position_embeddings": 128},
        "'longrope', changes with the length",
    ),
    "learned": (
        "OPT",
        {"word_embed_proj_dim": 32, "ffn_dim": 64, "num_key_value_heads": 4},
        "no rotary embedding",
    ),
}


class RotatesKeptKeys:
    """Rotates all kept keys by one position."""

    @hookimpl
    def evict(self, rows: LayerRows, keep: torch.Tensor) -> bool:
        moved = rows.rotate(rows.keys, torch.ones_like(rows.positions))
        rows.keep(keep, keys=moved[:, :, -keep.shape[2] :])
        return True


@pytest.mark.parametrize(("family", "changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_unsupported_rope_raises_with_the_reason(family: str, changes: dict, reason: str) -> None:
    plan = Plan.uniform(RotatesKeptKeys(), budget=8, buffer=2)
    engine = Engine(model_of(family, **changes), None, plan, slots=1)
    with pytest.raises(ModelError, match=reason) as caught:
        engine.generate([[1, 2, 3]], max_new_tokens=20).results()
    assert "leave the policy that moves them out of the plan" in str(caught.value)


def test_rotation_that_differs_from_the_embedding_raises() -> None:
    model = model_of("Llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, position_ids.clamp(max=50))
    keys = torch.zeros(1, 2, 1, 8)
    with pytest.raises(ModelError, match="layer 0"):
        ModelAdapter(model).rotation()(0, keys, torch.ones(keys.shape[:3], dtype=torch.int64))


def test_rope_is_not_checked_before_a_key_is_rotated() -> None:
    model = model_of("Llama", **rope("dynamic", factor=2.0))
    plan = Plan.uniform("streaming", budget=8, buffer=2)
    (result,) = Engine(model, None, plan, slots=1).generate([[1, 2]], max_new_tokens=20).results()
    assert result.compactions


def test_rotating_rows_without_a_model_raises() -> None:
    shape = LayerShape(2, 1, 4, torch.float32, torch.device("cpu"))
    rows = LayerRows(KVCache([shape], [Slab(4)], 1), 0, [0])
    with pytest.raises(ModelError, match="model"):
        rows.rotate(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, dtype=torch.int64))


@given(st.integers(1, 9), st.integers(-500, 500), st.integers(-500, 500))
def test_consecutive_rotations_add_up(head_dim: int, first: int, second: int) -> None:
    keys = torch.randn(1, 2, 3, head_dim, generator=torch.Generator().manual_seed(head_dim))
    by = torch.ones(keys.shape[:3], dtype=torch.int64)
    twice = rotate_halves(0, rotate_halves(0, keys, first * by), second * by)
    torch.testing.assert_close(
        twice, rotate_halves(0, keys, (first + second) * by), atol=1e-3, rtol=1e-3
    )
    torch.testing.assert_close(twice.norm(dim=-1), keys.norm(dim=-1))


def test_rotate_halves_equals_llama_rotation() -> None:
    model = tiny.shared_model()
    rotation = ModelAdapter(model).rotation()
    keys = torch.randn(2, 2, 5, 8, generator=torch.Generator().manual_seed(1))
    by = torch.arange(20).view(2, 2, 5)
    torch.testing.assert_close(rotation(0, keys, by), rotate_halves(0, keys, by))
