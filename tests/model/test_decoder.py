"""Decoders whose layers are found by their attention, and what layers say of their heads."""

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from any_model import tiny_random_model
from families import model_of
from tiny import greedy_tokens
from torch import nn

from kvpolicy import Engine, Plan
from kvpolicy.compat import has_states
from kvpolicy.errors import ModelError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.decoder import attention_module, decoder_layers, decoder_of

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 6]

# Each keeps its layers under another name; the second has one KV head, the last is a part.
NAMES = ["GPT2LMHeadModel", "GPTBigCodeForCausalLM", "BertLMHeadModel", "MllamaForCausalLM"]
WITH_HEADS_BY_LAYER = "MiMoV2FlashForCausalLM"
# Those of older releases warn, fail in `generate` with a tiny configuration, or are refused: their
# layers pass nothing on to their attention.
NEWER = ("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "DbrxForCausalLM")


@cache
def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    if (name in NEWER and not has_states()) or not hasattr(transformers, name):
        pytest.skip("this release of transformers has no such model")
    return tiny_random_model(name).to(dtype)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*NAMES, "DbrxForCausalLM", WITH_HEADS_BY_LAYER])
def test_tokens_equal_generate(name: str) -> None:
    model = tiny(name)
    expected = [greedy_tokens(model, prompt, 9) for prompt in PROMPTS]
    run = Engine(model, plan=Plan.uniform("h2o", budget=64), slots=2, chunk=5).generate(
        PROMPTS, max_new_tokens=9
    )
    assert [list(result.tokens) for result in run.results()] == expected


@pytest.mark.parametrize("name", NAMES)
def test_layers_are_those_whose_attention_has_their_numbers(name: str) -> None:
    model = tiny(name)
    layers, decoder = decoder_layers(model), decoder_of(model)
    assert len(layers) == model.config.get_text_config(decoder=True).num_hidden_layers
    assert any(one is layers for one in decoder.modules())
    for index, layer in enumerate(layers):
        attention = attention_module(model, index)
        assert attention in list(layer.modules())
        assert attention.layer_idx == index
    output = decoder(input_ids=torch.tensor(PROMPTS[:1]))
    assert output.last_hidden_state.shape[:2] == (1, len(PROMPTS[0]))


def test_layers_may_have_different_numbers_of_kv_heads() -> None:
    """Which their attention says, and no configuration."""
    model = tiny(WITH_HEADS_BY_LAYER, torch.float64)
    shapes = ModelAdapter(model).layer_shapes()
    assert [shape.num_kv_heads for shape in shapes] == [2, 4, 2, 4]
    plan = Plan.uniform("snapkv", budget=8, buffer=4, knobs={"snapkv": {"window_size": 3}})
    results = Engine(model, plan=plan, slots=3, chunk=5).generate(PROMPTS, max_new_tokens=9)
    for prompt, result in zip(PROMPTS, results.results(), strict=True):
        (alone,) = Engine(model, plan=plan).generate([prompt], max_new_tokens=9)
        assert result.tokens == alone.tokens


def test_several_lists_are_refused() -> None:
    model = model_of("gpt2", n_embd=32, n_layer=1, n_head=4)
    model.transformer.twice = nn.ModuleList(model.transformer.h)
    with pytest.raises(ModelError, match="several lists of decoder layers"):
        Engine(model, plan=Plan.full_cache())


@pytest.mark.slow
@pytest.mark.skipif(not has_states(), reason="this release itself counts them in two ways")
def test_other_positions_than_those_of_generate_are_refused() -> None:
    with pytest.raises(ModelError, match="counts them in another way than from 0"):
        Engine(tiny("Kosmos2_5ForConditionalGeneration"), plan=Plan.full_cache())
