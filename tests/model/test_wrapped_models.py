"""A model that is compiled, offloaded or wrapped runs as before, or is refused with the cause."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import greedy_tokens, tiny_model
from torch import nn
from transformers import AutoModelForSequenceClassification

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.errors import ModelError

FULL = Plan.uniform("full")
PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2]]


def engine_tokens(model: Any, policy: str = "full") -> list[list[int]]:
    engine = Engine(model, plan=Plan.uniform(policy, budget=64))
    return [list(one.tokens) for one in engine.generate(PROMPTS, max_new_tokens=8).results()]


def cache_tokens(model: Any) -> list[int]:
    ids = torch.tensor(PROMPTS[:1])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(PolicyCache(model, FULL)),
        max_new_tokens=8,
        do_sample=False,
    )
    return answer[0, ids.shape[1] :].tolist()


def expected() -> list[list[int]]:
    return [greedy_tokens(tiny_model(), prompt, 8) for prompt in PROMPTS]


def compiled_layers(model: Any) -> Any:
    layers = model.model.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    layers[1].mlp = torch.compile(layers[1].mlp, backend="eager")
    return model


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


COMPILED: list[Callable[[Any], Any]] = [
    lambda model: torch.compile(model, backend="eager"),
    compiled_in_place,
    compiled_layers,
    compiled_forward,
]


@pytest.mark.nightly
@pytest.mark.parametrize("compiled", COMPILED)
def test_compiled_model_equals_generate(compiled: Callable[[Any], Any]) -> None:
    model = compiled(tiny_model())
    assert engine_tokens(model) == expected()
    assert cache_tokens(model) == expected()[0]


def test_steering_hooks_reach_a_compiled_layer() -> None:
    model = compiled_layers(tiny_model())
    engine = Engine(model, plan=FULL)
    engine.adapter.add_hooks(steered=[0, 1], states=True)
    assert [list(one.tokens) for one in engine.generate(PROMPTS, max_new_tokens=8).results()] == (
        expected()
    )


def test_gradient_checkpointing_and_use_cache_do_not_matter() -> None:
    model = tiny_model()
    model.config.use_cache = False
    model.model.layers.apply(lambda one: setattr(one, "gradient_checkpointing", True))
    model.train()
    assert engine_tokens(model) == expected()
    assert model.model.layers[0].gradient_checkpointing


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # transformers 5.2
@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_offloaded_model_equals_generate(offload: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model()
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device="cpu")
    assert model.device.type == "meta"
    assert engine_tokens(model) == expected()
    assert cache_tokens(model) == expected()[0]


@pytest.mark.parametrize("policy", ["full", "h2o", "rkv"])
def test_autocast_equals_generate_under_autocast(policy: str) -> None:
    model = tiny_model()
    with torch.autocast("cpu", torch.bfloat16):
        tokens = [greedy_tokens(model, prompt, 8) for prompt in PROMPTS]
        assert engine_tokens(model, policy) == tokens
        assert cache_tokens(model) == tokens[0]


def test_autocast_to_a_dtype_that_cannot_be_stored_raises() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    with (
        torch.autocast("cpu", torch.float16),
        pytest.raises(
            ModelError,
            match=r"bfloat16.*autocast",
        ),
    ):
        Engine(model, plan=FULL)


def on_meta(model: Any) -> Any:
    return model.to("meta")


def partly_on_meta(model: Any) -> Any:
    model.model.layers[1].to("meta")
    return model


def head_on_meta(model: Any) -> Any:
    model.lm_head.to("meta")
    return model


def head_in_another_dtype(model: Any) -> Any:
    model.lm_head.to(torch.bfloat16)
    return model


def with_logits_of_a_class(model: Any) -> Any:
    model.lm_head.register_forward_hook(lambda _, args, logits: logits[:, -1])
    return model


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (on_meta, "21 of its weights, .*embed_tokens.weight first, are not loaded"),
    (partly_on_meta, "9 of its weights, model.layers.1.* are not loaded"),
    (head_on_meta, "1 of its weights, lm_head.weight first"),
    (head_in_another_dtype, "a forward of a few tokens of text fails: .*same dtype"),
    (with_logits_of_a_class, "no logits of tokens"),
    (lambda model: model.model, "no head that gives logits of tokens"),
    (
        lambda model: AutoModelForSequenceClassification.from_config(model.config),
        "no head that gives logits of tokens",
    ),
    (nn.DataParallel, "given DataParallel for a model; .* give the model that it wraps"),
    (lambda model: model.model.layers[0], "given LlamaDecoderLayer for a model; load it first"),
    (type, "given <class '.*for a model; load it first"),
    (lambda model: model.config, "given LlamaConfig .*for a model; load it first"),
    (lambda _: None, "given None for a model; load it first"),
    (lambda _: "reasoner", "given 'reasoner' for a model; load it first"),
    (lambda model: (model, None), "for a model; load it first"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
@pytest.mark.parametrize("build", [Engine, PolicyCache])
def test_model_that_cannot_be_run_is_refused_when_it_is_given(
    build: Any, change: Callable[[Any], Any], message: str
) -> None:
    model = change(tiny_model())
    with pytest.raises(ModelError, match=message) as raised:
        build(model, plan=FULL)
    assert "\n" not in str(raised.value)
