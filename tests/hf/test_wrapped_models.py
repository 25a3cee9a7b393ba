"""Models in training, with settings or wrappers that change how they use caches."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import generated_tokens
from tiny import tiny_model

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.errors import CacheError, ModelError

TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
PROMPTS = [[5, 9, 40, 2, 2, 7, 11] * 4, [1, 2, 3]]


def cache_tokens(model: Any, **options: Any) -> list[list[int]]:
    return generated_tokens(
        model, PROMPTS, 10, past_key_values=PolicyCache(model, TIGHT), **options
    )


def engine_tokens(model: Any) -> list[list[int]]:
    run = Engine(model, plan=TIGHT).generate(PROMPTS, max_new_tokens=10)
    return [list(result.tokens) for result in run.results()]


@pytest.mark.few(1)
@pytest.mark.parametrize("tokens_of", [cache_tokens, engine_tokens])
def test_gradient_checkpointing_changes_no_token(tokens_of: Callable[[Any], Any]) -> None:
    """transformers drops the cache of a layer that is checkpointed in training."""
    model = tiny_model(dtype=torch.float64)
    expected = tokens_of(model)
    # Its name in older releases of transformers.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    assert tokens_of(model.train()) == expected
    checkpointed = [layer.gradient_checkpointing for layer in model.get_decoder().layers]
    assert all(checkpointed)
    assert tokens_of(model.eval()) == expected


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["generation_config", "config"])
def test_a_model_that_is_set_to_use_no_cache_is_named(name: str) -> None:
    model = tiny_model()
    expected = cache_tokens(model)
    getattr(model, name).use_cache = False
    with pytest.raises(CacheError, match=rf"{name}\.use_cache"):
        cache_tokens(model, use_cache=False)
    assert cache_tokens(model, use_cache=True) == expected
    assert engine_tokens(model) == expected


def test_use_cache_as_an_argument_is_named() -> None:
    with pytest.raises(CacheError, match="use_cache=False"):
        cache_tokens(tiny_model(), use_cache=False)


@pytest.mark.few(1)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_get_caches_of_their_own(copied: Callable[[Any], Any]) -> None:
    model = tiny_model()
    cache = PolicyCache(model, TIGHT)
    other = copied(model)
    assert cache_tokens(other) == cache_tokens(model)
    plain = generated_tokens(model, PROMPTS, 10)
    assert generated_tokens(other, PROMPTS, 10) == plain
    del cache
    assert generated_tokens(other, PROMPTS, 10) == generated_tokens(model, PROMPTS, 10) == plain


@pytest.mark.parametrize("where", ["model", "model.model.layers.0.self_attn"])
def test_a_replaced_forward_that_calls_the_original_is_named(where: str) -> None:
    """As by a profiler, with a function and not with a method."""
    model = tiny_model()
    module = model.get_submodule(where.partition(".")[2])
    expected = generated_tokens(model, PROMPTS, 10)
    cache = PolicyCache(model, TIGHT)
    original = module.forward
    module.forward = lambda *args, **options: original(*args, **options)
    named = rf"; {where}\.forward was replaced by a function that calls the original$"
    for attempt in (
        lambda: PolicyCache(model, TIGHT),
        lambda: Engine(model, plan=TIGHT),
        lambda: generated_tokens(model, PROMPTS, 10, past_key_values=cache),
    ):
        with pytest.raises(ModelError, match=named):
            attempt()
    assert generated_tokens(model, PROMPTS, 10) == expected


def test_a_model_in_training_computes_no_gradients() -> None:
    model = tiny_model().train()
    with pytest.raises(CacheError, match="no_grad"):
        model(torch.tensor(PROMPTS[1:]), past_key_values=PolicyCache(model, TIGHT))
