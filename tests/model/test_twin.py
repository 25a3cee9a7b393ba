"""The engine's twin of a model follows every later change and changes nothing itself."""

import copy
from collections.abc import Callable
from functools import partial, update_wrapper
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_state import state_of
from tiny import greedy_tokens, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.compat import cache_argument
from kvpolicy.model.adapter import ATTENTION, ModelAdapter
from kvpolicy.model.twin import Twin

FULL = Plan.uniform("full")
PROMPT = [5, 9, 40, 2, 2, 7, 11]


def engine_tokens(engine: Engine) -> list[int]:
    (result,) = engine.generate([PROMPT], max_new_tokens=10).results()
    return list(result.tokens)


def twin_of(model: Any) -> Twin:
    ModelAdapter(model)  # registers the attention
    return Twin(model, ATTENTION, lambda copies: None)


def cache_tokens(model: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    answer = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(PolicyCache(model, FULL)),
        max_new_tokens=10,
        do_sample=False,
        pad_token_id=0,
    )
    return answer[0, len(PROMPT) :].tolist()


class Wrapper(nn.Module):
    """A linear layer with an adapter, like LoRA."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.change = nn.Linear(base_layer.in_features, base_layer.out_features, bias=False)
        self.active = True

    def forward(self, states: Tensor) -> Tensor:
        output = self.base_layer(states)
        return output + 3 * self.change(states) if self.active else output


class WrappedAttention(nn.Module):
    """A wrapped attention module, as adaption prompts wrap it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = self.model(*args, **kwargs)
        return 2 * output, weights


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    return tiny_model(num_layers=3)


def first_layer(model: Any) -> Any:
    return model.get_decoder().layers[0]


def wrap_linear(model: Any) -> Callable[[], None]:
    attention = first_layer(model).self_attn
    base_layer = attention.q_proj
    attention.q_proj = Wrapper(base_layer)
    return lambda: setattr(attention, "q_proj", base_layer)


def wrap_and_disable(model: Any) -> Callable[[], None]:
    undo = wrap_linear(model)
    wrapper = first_layer(model).self_attn.q_proj
    wrapper.active = False
    wrapper.active = True
    return undo


def wrap_head(model: Any) -> Callable[[], None]:
    base_layer = model.lm_head
    model.lm_head = Wrapper(base_layer)
    return lambda: setattr(model, "lm_head", base_layer)


def wrap_attention(model: Any) -> Callable[[], None]:
    layer = first_layer(model)
    attention = layer.self_attn
    layer.self_attn = WrappedAttention(attention)
    return lambda: setattr(layer, "self_attn", attention)


def hook_on_layer(model: Any) -> Callable[[], None]:
    return first_layer(model).register_forward_pre_hook(lambda _, args: (args[0] * 0.3,)).remove


def hook_on_linear(model: Any) -> Callable[[], None]:
    layer = first_layer(model).mlp.down_proj
    return layer.register_forward_hook(lambda _, args, output: -output).remove


def hook_on_model(model: Any) -> Callable[[], None]:
    def flip(_: nn.Module, args: Any, output: Any) -> Any:
        output.logits = -output.logits
        return output

    return model.register_forward_hook(flip).remove


def new_forward(model: Any) -> Callable[[], None]:
    """Like accelerate: bound to the module and calling the old forward."""
    layer = first_layer(model)
    layer._old_forward = layer.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return -module._old_forward(*args, **kwargs)

    layer.forward = update_wrapper(partial(forward, layer), layer._old_forward)

    def undo() -> None:
        del layer.forward, layer._old_forward

    return undo


def other_weights(model: Any) -> Callable[[], None]:
    weight = first_layer(model).self_attn.k_proj.weight
    before = weight.data.clone()
    first_layer(model).self_attn.k_proj.weight = nn.Parameter(-before)
    return lambda: setattr(first_layer(model).self_attn.k_proj, "weight", nn.Parameter(before))


CHANGES = [
    wrap_linear,
    wrap_and_disable,
    wrap_head,
    wrap_attention,
    hook_on_layer,
    hook_on_linear,
    hook_on_model,
    new_forward,
    other_weights,
]


@pytest.mark.few(2)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_after_building_the_engine_take_effect(change: Any, model: Any) -> None:
    engine = Engine(model, plan=FULL)
    plain = engine_tokens(engine)
    undo = change(model)
    changed = greedy_tokens(model, PROMPT, 10)
    assert changed != plain
    assert engine_tokens(engine) == cache_tokens(model) == changed
    undo()
    assert engine_tokens(engine) == cache_tokens(model) == greedy_tokens(model, PROMPT, 10) == plain


def test_switching_an_adapter_takes_effect(model: Any) -> None:
    engine = Engine(model, plan=FULL)
    plain = engine_tokens(engine)
    wrap_linear(model)
    adapted = engine_tokens(engine)
    wrapper = first_layer(model).self_attn.q_proj
    for active, expected in ((False, plain), (True, adapted)):
        wrapper.active = active
        assert engine_tokens(engine) == greedy_tokens(model, PROMPT, 10) == expected
    assert adapted != plain


def test_model_is_unchanged(model: Any) -> None:
    before = state_of(model)
    engine = Engine(model, plan=Plan.uniform("h2o", budget=8, buffer=2))
    engine_tokens(engine)
    assert state_of(model) == before
    cache = PolicyCache(model, FULL)
    assert model.config._attn_implementation == "sdpa"
    del cache
    assert state_of(model) == before


def test_hidden_states_that_a_configuration_asks_for_are_captured_once_after_a_run() -> None:
    model = tiny_model()
    model.config.output_hidden_states = True
    for _ in range(2):
        assert engine_tokens(Engine(model, plan=FULL)) == cache_tokens(model)
        output = model(torch.tensor([[5, 6, 7]]))
        assert len(output.hidden_states) == model.config.num_hidden_layers + 1


def test_twin_shares_parameters_and_buffers(model: Any) -> None:
    twin = twin_of(model).current()
    tensors, shared = (one.state_dict(keep_vars=True) for one in (model, twin))
    assert tensors.keys() == shared.keys()
    assert all(shared[name] is tensor for name, tensor in tensors.items())
    assert twin is not model
    assert twin.config._attn_implementation != model.config._attn_implementation


def test_twin_is_built_once(model: Any) -> None:
    greedy_tokens(model, PROMPT, 2)  # kvpress, once imported, notes something at modules that ran
    twin = twin_of(model)
    found = twin.current()
    greedy_tokens(model, PROMPT, 2)
    assert twin.current() is found
    model.train().eval()
    assert twin.current().training is False


@pytest.mark.few(2)
@pytest.mark.parametrize("move", ["double", "half", "to", "bfloat16"])
def test_dtype_change_after_building_the_engine_takes_effect(move: str, model: Any) -> None:
    engine = Engine(model, plan=FULL)
    engine_tokens(engine)
    model.to(torch.float64) if move == "to" else getattr(model, move)()
    expected = Engine(copy.deepcopy(model), plan=FULL)
    assert engine_tokens(engine) == engine_tokens(expected)
    assert engine.generate([PROMPT]).cache.layers[0].keys.dtype == model.dtype


@pytest.mark.parametrize("eager", [False, True])
def test_tokens_that_are_added_after_building_the_engine_can_be_given_and_drawn(
    eager: bool,
) -> None:
    model = tiny_model("llama", bos_token_id=1)
    engine = Engine(model, plan=FULL, eager=eager)
    (refused,) = engine.generate([[5, 63]], max_new_tokens=1).results()
    assert refused.error is not None
    assert "63" in refused.error
    model.resize_token_embeddings(64, mean_resizing=False)
    with torch.no_grad():
        model.get_input_embeddings().weight[61:].copy_(torch.eye(3, 32))
        model.lm_head.weight[61:] = 2 * model.lm_head.weight[:3]
    prompt = [5, 63, 2]
    (result,) = engine.generate([prompt], max_new_tokens=12).results()
    assert list(result.tokens) == greedy_tokens(model, prompt, 12)
    assert max(result.tokens) > 60


def test_tied_weights_stay_tied() -> None:
    model = tiny_model(tie_word_embeddings=True)
    engine = Engine(model, plan=FULL)
    assert engine_tokens(engine) == greedy_tokens(model, PROMPT, 10)
    model.get_input_embeddings().weight.data.neg_()
    assert engine_tokens(engine) == greedy_tokens(model, PROMPT, 10)
    twin: Any = twin_of(model).current()
    assert twin.lm_head.weight is twin.get_input_embeddings().weight is model.lm_head.weight


class Quantised(nn.Module):
    """A linear layer whose weights are 8-bit integers in buffers."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (linear.weight / scale).round().to(torch.int8))

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.linear(states, self.weight.to(states.dtype) * self.scale)


@pytest.mark.few(1)
@pytest.mark.parametrize("later", [False, True])
def test_quantised_layers_equal_generate(later: bool, model: Any) -> None:
    engine = Engine(model, plan=FULL)
    if later:
        engine_tokens(engine)
    with torch.no_grad():
        for layer in model.get_decoder().layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(layer.self_attn, name, Quantised(getattr(layer.self_attn, name)))
    assert engine_tokens(engine) == cache_tokens(model) == greedy_tokens(model, PROMPT, 10)


@pytest.fixture(params=["before", "after"])
def dispatched(request: Any, model: Any) -> Any:
    """A model that accelerate has dispatched, before or after the engine was built."""
    accelerate = pytest.importorskip("accelerate")
    engines = SimpleNamespace(model=model, engine=None)
    if request.param == "after":
        engines.engine = Engine(model, plan=FULL)
        engines.cache = PolicyCache(model, FULL)
    device_map = {name: "cpu" for name, _ in model.named_children()}
    accelerate.dispatch_model(model, device_map, main_device="cpu", force_hooks=True)
    if request.param == "before":
        engines.engine = Engine(model, plan=FULL)
    return engines


@pytest.mark.few(1)
def test_dispatched_model_equals_generate(dispatched: Any) -> None:
    assert "forward" in vars(dispatched.model.get_decoder())
    expected = greedy_tokens(dispatched.model, PROMPT, 10)
    assert engine_tokens(dispatched.engine) == cache_tokens(dispatched.model) == expected
