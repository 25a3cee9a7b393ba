"""Packed weights compute the same products up to rounding, for engines and `generate` alike."""

import copy
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, family_model, model_of
from hypothesis import given
from hypothesis import strategies as st
from model_state import state_of
from strategies import costly, prompts
from tiny import greedy_tokens, tiny_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from kvpolicy import Engine, Plan, PolicyCache, packed_model
from kvpolicy.compat import cache_argument
from kvpolicy.errors import KVPolicyError, ModelError
from kvpolicy.model import packed as packed_module
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.loading import load_model
from kvpolicy.model.packed import PackedLinear, PackedWeights, Product, packed_weights

# The most by which a sum of products of numbers of size 1 may differ, relative to their number.
TOLERANCE = 1e-6
# The most by which logits of the tiny models, which are of size 10, may differ.
LOGITS_TOLERANCE = 1e-4

pytestmark = pytest.mark.usefixtures("packs_small_products")

FULL = Plan.full_cache()
TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 12]


def logits(model: Any, token_ids: Tensor) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(input_ids=token_ids, use_cache=False).logits
    return found


def tokens(model: Any, plan: Plan = FULL, *, slots: int = 2, **options: Any) -> list[list[int]]:
    engine = Engine(model, plan=plan, slots=slots, chunk=5, **options)
    return [list(one.tokens) for one in engine.generate(PROMPTS, max_new_tokens=10).results()]


def linear_layers(sizes: list[int], width: int, biases: list[bool]) -> list[nn.Linear]:
    with torch.random.fork_rng():
        torch.manual_seed(sum(sizes) + width)
        layers = [nn.Linear(width, size, bias) for size, bias in zip(sizes, biases, strict=True)]
        for layer in layers:
            nn.init.normal_(layer.weight)
    return layers


def exact(layer: nn.Linear, states: Tensor) -> Tensor:
    """The product in double precision."""
    found = states.double() @ layer.weight.double().T
    return found if layer.bias is None else found + layer.bias.double()


@given(st.data())
def test_products_equal_those_in_double_precision_whoever_asks_and_when(
    data: st.DataObject,
) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    width = data.draw(st.integers(1, 70))
    biases = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    layers = linear_layers(sizes, width, biases)
    product = Product(layers)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    inputs = [torch.randn(2, length, width, generator=generator) for length in lengths]
    # Parts in any order, of inputs in any order, some several times and some never.
    calls = st.tuples(st.integers(0, len(inputs) - 1), st.integers(0, len(sizes) - 1))
    with torch.inference_mode():
        for number, part in data.draw(st.lists(calls, max_size=12)):
            found = product.columns(inputs[number], part)
            wanted = exact(layers[part], inputs[number])
            torch.testing.assert_close(found.double(), wanted, atol=width * TOLERANCE, rtol=1e-5)


def test_layers_that_share_a_product_compute_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = packed_model(tiny_model(num_layers=3))
    num_calls = 0
    multiply = Product._multiply

    def counting(self: Product, states: Tensor) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return multiply(self, states)

    monkeypatch.setattr(Product, "_multiply", counting)
    logits(model, torch.tensor([[1, 2, 3]]))
    assert num_calls == packed_weights(model).num_products == 3 * 4 + 1


@pytest.mark.parametrize(("least", "products"), [(0, 9), (4097, 7), (8193, 2), (16_385, 0)])
def test_small_products_stay_plain(
    least: int, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers: q/k/v and o of 8 and 4 KiB, gate/up and down of 16 and 8; a head of 7.6."""
    monkeypatch.setattr(packed_module, "MIN_BYTES", least)
    model = tiny_model()
    found = packed_model(model)
    assert packed_weights(found).num_products == products
    assert (found is model) == (products == 0)
    token_ids = torch.tensor([[5, 9, 40]])
    torch.testing.assert_close(
        logits(found, token_ids), logits(model, token_ids), atol=LOGITS_TOLERANCE, rtol=0
    )


def test_an_input_that_was_changed_in_place_is_multiplied_again() -> None:
    layers = linear_layers([3, 4], 5, [False, True])
    product, states = Product(layers), torch.ones(1, 5)
    with torch.no_grad():
        for factor in (1.0, 3.0):
            states.fill_(factor)
            for part, layer in enumerate(layers):
                found = product.columns(states, part).double()
                torch.testing.assert_close(found, exact(layer, states), atol=1e-5, rtol=1e-5)


def test_a_product_keeps_no_input_after_its_last_layer() -> None:
    product = Product(linear_layers([3, 4], 5, [False, False]))
    states = torch.ones(1, 5)
    with torch.no_grad():
        product.columns(states, 0)
        product.columns(states, 1)
    assert product._last is None


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_same_logits(family: str) -> None:
    model = family_model(family)
    packed = packed_model(model)
    num_linear = sum(type(one) is nn.Linear for one in model.modules())
    found = packed_weights(packed)
    assert found.num_layers == num_linear
    has_parts = hasattr(model.model.layers[0].self_attn, "q_proj")
    assert (found.num_products < num_linear) == has_parts
    token_ids = torch.tensor([prompt * 9 for prompt in ([1, 2], [8, 5], [60, 3])])
    for given_ids in (token_ids, token_ids[:, :1]):
        torch.testing.assert_close(
            logits(packed, given_ids), logits(model, given_ids), atol=LOGITS_TOLERANCE, rtol=0
        )


@pytest.mark.few(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_has_the_tokens_of_generate_with_the_same_weights(family: str) -> None:
    model = family_model(family)
    packed = packed_model(model)
    expected = [greedy_tokens(packed, prompt, 10) for prompt in PROMPTS]
    assert tokens(packed) == expected
    assert tokens(model, cpu_weights="packed") == expected


@costly
@given(prompts(count=3, max_len=30), st.integers(2, 3))
def test_a_row_in_a_batch_has_the_tokens_that_it_has_alone(
    prompts: list[list[int]], slots: int
) -> None:
    engine = Engine(
        tiny_model("qwen2", tie_word_embeddings=True),
        plan=TIGHT,
        slots=slots,
        cpu_weights="packed",
    )
    together = engine.generate(prompts, max_new_tokens=12).results()
    alone = [engine.generate([prompt], max_new_tokens=12).results()[0] for prompt in prompts]
    assert [one.tokens for one in together] == [one.tokens for one in alone]


def test_generate_with_a_policy_cache_has_the_tokens_of_the_engine() -> None:
    packed = packed_model(tiny_model())
    ids = torch.tensor([PROMPTS[2]])
    answer = packed.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **cache_argument(PolicyCache(packed, TIGHT)),
        max_new_tokens=10,
        do_sample=False,
        pad_token_id=0,
    )
    assert answer[0, len(PROMPTS[2]) :].tolist() == tokens(packed, TIGHT)[2]


@pytest.mark.nightly
def test_threads_share_a_packed_model() -> None:
    model = packed_model(tiny_model(num_layers=3))
    jobs: list[Callable[[], Any]] = [
        lambda: tokens(model, TIGHT),
        lambda: tokens(model, TIGHT),
        lambda: [greedy_tokens(model, prompt, 10) for prompt in PROMPTS],
    ]
    alone = [job() for job in jobs]
    found: list[Any] = [None] * len(jobs)
    begin = threading.Barrier(len(jobs))

    def run(number: int) -> None:
        begin.wait()
        found[number] = [jobs[number]() for _ in range(3)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[expected] * 3 for expected in alone]


def test_the_model_is_left_as_it_is() -> None:
    model = tiny_model(tie_word_embeddings=True)
    before, expected = state_of(model), tokens(model)
    packed = packed_model(model)
    assert tokens(model, cpu_weights="packed") == tokens(packed) == expected
    assert state_of(model) == before
    assert type(model.lm_head) is nn.Linear
    packed.set_attn_implementation("eager")
    assert model.config._attn_implementation == "sdpa"


def test_hooks_that_are_registered_on_a_layer_later_run_in_its_packed_form() -> None:
    model = tiny_model()
    engine = Engine(model, plan=FULL, cpu_weights="packed")
    calls: list[tuple[int, ...]] = []
    layer = model.model.layers[1].mlp.down_proj
    with layer.register_forward_hook(lambda _, args, output: calls.append(tuple(output.shape))):
        engine.generate([[1, 2, 3]], max_new_tokens=2).results()
    assert calls == [(1, 3, 32), (1, 1, 32)]


@pytest.mark.parametrize("tied", [False, True])
def test_released_weights_are_freed_and_still_saved(tied: bool) -> None:
    plain, model = (tiny_model("qwen2", tie_word_embeddings=tied) for _ in range(2))
    linear = [one for one in model.modules() if type(one) is nn.Linear]
    released = [one.weight for one in linear if one is not model.lm_head or not tied]
    num_bytes = sum(one.nbytes for one in released)
    expected = tokens(plain)
    packed = packed_model(model, release=True)
    found = packed_weights(packed)
    assert (found.num_layers, found.num_products) == (15, 9)
    assert found.released_bytes == num_bytes
    assert found.packed_bytes >= num_bytes
    assert all(one.untyped_storage().nbytes() == 4 for one in released)
    assert all(one.isnan().all() for one in released)
    assert tokens(packed) == expected
    state, wanted = packed.state_dict(), plain.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)


def test_a_run_reports_the_bytes_of_weights() -> None:
    model = tiny_model()
    plain, packed, released = (
        Engine(one, plan=FULL).generate([[1, 2]]).report
        for one in (model, packed_model(model), packed_model(tiny_model(), release=True))
    )
    num_bytes = sum(one.weight.nbytes for one in model.modules() if type(one) is nn.Linear)
    assert (plain.packed_bytes, plain.released_bytes) == (0, 0)
    assert (packed.packed_bytes >= num_bytes, packed.released_bytes) == (True, 0)
    assert released.to_dict()["packed_bytes"] == packed.packed_bytes
    assert released.to_dict()["released_bytes"] == num_bytes


def test_packing_twice_changes_nothing() -> None:
    packed = packed_model(tiny_model())
    assert packed_model(packed, release=True) is packed
    assert Engine(packed, plan=FULL, cpu_weights="packed").adapter.model is packed
    assert packed_weights(packed).released_bytes == 0
    assert packed_weights(tiny_model()) == PackedWeights(0, 0, 0, 0)


def test_a_layer_whose_forward_was_replaced_is_not_packed() -> None:
    model = tiny_model()
    layer = model.model.layers[0].self_attn.k_proj
    plain_forward = layer.forward
    layer.forward = lambda states: 2 * plain_forward(states)
    packed = packed_model(model)
    assert packed_weights(packed).num_layers == 14
    assert not isinstance(packed.model.layers[0].self_attn.k_proj, PackedLinear)
    ids = torch.tensor([[1, 2, 3]])
    torch.testing.assert_close(
        logits(packed, ids), logits(model, ids), atol=LOGITS_TOLERANCE, rtol=0
    )


def test_a_copy_of_a_packed_model_has_the_same_logits() -> None:
    packed, ids = packed_model(tiny_model()), torch.tensor([[1, 2, 3]])
    copied = copy.deepcopy(packed)
    assert torch.equal(logits(copied, ids), logits(packed, ids))
    assert packed_weights(copied) == packed_weights(packed)


def test_gradients_are_refused_and_not_wrong() -> None:
    ids = torch.tensor([[1, 2, 3]])
    loss = packed_model(tiny_model())(input_ids=ids, labels=ids).loss
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss.backward()


def test_bfloat16_is_packed_where_onednn_multiplies_it() -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN does not multiply bfloat16 on this processor")
    model = tiny_model(dtype=torch.bfloat16)
    ids = torch.tensor([[1, 2, 3]])
    found, wanted = logits(packed_model(model), ids), logits(model, ids)
    torch.testing.assert_close(found, wanted, atol=0.2, rtol=0)  # 8 bits of logits of size 10


@pytest.mark.nightly
def test_a_packed_model_is_one_graph() -> None:
    model = packed_model(tiny_model())
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=False, backend=counter)
    ids = torch.tensor([[1], [2]])
    for _ in range(3):
        torch.testing.assert_close(logits(compiled, ids), logits(model, ids))
    assert counter.frame_count == 1


def missing_onednn(monkeypatch: pytest.MonkeyPatch) -> Any:
    def fail(*_: object) -> None:
        msg = "'_OpNamespace' 'mkldnn' object has no attribute '_reorder_linear_weight'"
        raise AttributeError(msg)

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", fail)
    return tiny_model()


def quantised(_: pytest.MonkeyPatch) -> Any:
    model = tiny_model()
    model.is_quantized = True  # as the quantisers of transformers note it
    return model


def with_other_tensors(_: pytest.MonkeyPatch) -> Any:
    class Other(nn.Parameter):
        """Stands for the subclasses in which torchao stores quantised weights."""

    model = tiny_model()
    model.lm_head.weight = Other(model.lm_head.weight.detach())
    return model


def split(monkeypatch: pytest.MonkeyPatch) -> Any:
    model = tiny_model()
    monkeypatch.setattr(type(model), "tp_size", 2, raising=False)
    return model


def with_adapter(_: pytest.MonkeyPatch) -> Any:
    peft = pytest.importorskip("peft")
    warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
    return peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"]))


REFUSED: dict[str, tuple[Callable[[pytest.MonkeyPatch], Any], str]] = {
    "double": (
        lambda _: tiny_model(dtype=torch.float64),
        "does not multiply float64 here.*float32",
    ),
    "elsewhere": (lambda _: tiny_model().to("meta"), "on the device 'meta'; load it on the CPU"),
    "onednn": (missing_onednn, "does not multiply float32 here .*no attribute"),
    "quantised": (quantised, "they are quantised; load the model in float32"),
    "subclass": (with_other_tensors, "they are quantised"),
    "split": (split, "several processes share them"),
    "adapter": (with_adapter, "it has adapters, .* by merge_and_unload"),
    "no layers": (
        lambda _: model_of("gpt2", n_embd=32, n_layer=1, n_head=4).transformer,
        "it has no linear layers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_be_packed_are_refused_in_one_sentence(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, problem = REFUSED[kind]
    model = make(monkeypatch)
    with pytest.raises(ModelError) as error:
        packed_model(model, release=True)
    assert re.search(rf"^the weights of model \w+ cannot be packed: .*{problem}", str(error.value))
    assert not str(error.value).endswith(".")
    assert not any(one.isnan().any() for one in model.parameters() if not one.is_meta)


def test_tokens_that_are_added_after_packing_are_refused() -> None:
    model = tiny_model("llama")
    engine = Engine(model, plan=FULL, cpu_weights="packed")
    model.resize_token_embeddings(64, mean_resizing=False)
    (refused,) = engine.generate([[5, 63]], max_new_tokens=1).results()
    assert refused.error is not None
    assert "63" in refused.error


def test_wrong_values_are_refused() -> None:
    with pytest.raises(KVPolicyError, match="fast"):
        Engine(tiny_model(), plan=FULL, cpu_weights="fast")  # type: ignore[arg-type]
    with pytest.raises(KVPolicyError, match="None"):
        load_model("reasoner", cpu_weights=None)  # type: ignore[arg-type]
    with pytest.raises(KVPolicyError, match="packed_model"):
        Engine(ModelAdapter(tiny_model()), plan=FULL, cpu_weights="packed")


@pytest.mark.parametrize("change", [nn.Module.half, lambda one: one.to("meta")])
def test_a_packed_model_cannot_be_moved_or_converted(change: Callable[[Any], Any]) -> None:
    with pytest.raises(ModelError, match="packed"):
        change(packed_model(tiny_model()))
