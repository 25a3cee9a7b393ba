"""Models with adapters of PEFT, in `generate` with a cache and in an engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from batches import generated_tokens
from packaging.version import Version
from tiny import tiny_model
from transformers.integrations import peft as adapters

from kvpolicy import Engine, Plan, PolicyCache
from kvpolicy.errors import CacheError, ModelError

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Position ids are not supported:UserWarning"),
    pytest.mark.filterwarnings("ignore:Already unmerged:UserWarning"),
]

FULL = Plan.uniform("full")
TIGHT = Plan.uniform("h2o", budget=12, buffer=4)
PROMPTS = [[5, 9, 40, 2, 2, 7, 11] * 4, [1, 2, 3]]
NUM_TOKENS = 10


@pytest.fixture
def new_peft() -> None:
    """Skips where transformers wants a newer PEFT than is installed: 5.24 wants 0.22."""
    wanted = getattr(adapters, "MIN_PEFT_VERSION", "0")
    if Version(peft.__version__) < Version(wanted):
        pytest.skip(f"transformers wants PEFT {wanted}; {peft.__version__} is installed")


def adapted(config: Any, *more: Any) -> Any:
    """A tiny model with random adapters: ``default``, then ``more``, ``more2``."""
    model = peft.get_peft_model(tiny_model(dtype=torch.float64), config)
    for number, other in enumerate(more):
        model.add_adapter(f"more{number or ''}", other)
    model = model.double().eval()
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if ".default" in name or ".more" in name or ".adaption" in name:
            weight.data.normal_(std=0.5, generator=generator)
    return model


def lora(**options: Any) -> Any:
    settings = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    return peft.LoraConfig(task_type="CAUSAL_LM", **(settings | options))


def plain(model: Any, **options: Any) -> list[list[int]]:
    return generated_tokens(model, PROMPTS, NUM_TOKENS, **options)


def cached(model: Any, owner: Any, plan: Plan = FULL) -> list[list[int]]:
    return plain(model, past_key_values=PolicyCache(owner, plan))


def engine_tokens(model: Any, plan: Plan) -> list[list[int]]:
    run = Engine(model, plan=plan).generate(PROMPTS, max_new_tokens=NUM_TOKENS)
    return [list(result.tokens) for result in run.results()]


KINDS = {
    "lora": lora,
    "dora": lambda: lora(use_dora=True),
    "ia3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj"], feedforward_modules=[]
    ),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(
        task_type="CAUSAL_LM", adapter_len=3, adapter_layers=2
    ),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
def test_adapted_models_give_their_own_tokens(kind: str) -> None:
    model = adapted(KINDS[kind]())
    expected = plain(model)
    assert expected != plain(tiny_model(dtype=torch.float64))
    assert cached(model, model) == cached(model.get_base_model(), model) == expected
    assert cached(model, model.get_base_model()) == engine_tokens(model, FULL) == expected
    assert cached(model, model, TIGHT) == engine_tokens(model, TIGHT) != expected


def test_direct_calls_of_an_adapted_model_are_served() -> None:
    model = adapted(lora())
    ids = torch.tensor(PROMPTS[:1])
    with torch.no_grad():
        output = model(ids, past_key_values=PolicyCache(model, FULL))
        torch.testing.assert_close(output.logits[:, -1], model(ids).logits[:, -1])


@pytest.mark.usefixtures("new_peft")
def test_models_with_adapters_of_transformers_run() -> None:
    model = tiny_model(dtype=torch.float64)
    model.add_adapter(lora(init_lora_weights=False))
    model.double().eval()
    assert cached(model, model) == engine_tokens(model, FULL) == plain(model)


def test_adapters_are_switched_disabled_and_merged_under_a_cache() -> None:
    model = adapted(lora(), lora(r=2, target_modules=["o_proj"]))
    cache, engine = PolicyCache(model, FULL), Engine(model, plan=FULL)

    def agree() -> list[list[int]]:
        cache.reset()
        expected = plain(model)
        assert plain(model, past_key_values=cache) == expected
        results = engine.generate(PROMPTS, max_new_tokens=NUM_TOKENS).results()
        assert [list(result.tokens) for result in results] == expected
        return expected

    first = agree()
    model.set_adapter("more")
    second = agree()
    with model.disable_adapter():
        third = agree()
    assert len({str(tokens) for tokens in (first, second, third)}) == 3
    model.set_adapter("default")
    model.merge_adapter()
    assert agree() == first
    model.unmerge_adapter()
    assert agree() == first
    merged = model.merge_and_unload()
    assert cached(merged, merged) == first


def test_an_adapter_for_each_row_is_refused() -> None:
    """Rows are computed in order of length, which PEFT does not know."""
    model = adapted(lora(), lora())
    names = {"adapter_names": ["default", "more"]}
    with pytest.raises(CacheError, match="adapter_names"):
        plain(model, past_key_values=PolicyCache(model, FULL), **names)


REFUSED = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "alora": lambda: lora(alora_invocation_tokens=[2, 7]),
}


@pytest.mark.parametrize("build", [PolicyCache, lambda model, plan: Engine(model, plan=plan)])
@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_do_more_than_change_weights_are_refused(
    kind: str, build: Callable[[Any, Plan], Any]
) -> None:
    with pytest.raises(ModelError, match="default") as found:
        build(adapted(REFUSED[kind]()), FULL)
    assert "\n" not in str(found.value)


@pytest.mark.usefixtures("new_peft")
@pytest.mark.parametrize(
    ("kind", "message"),
    [("prompt tuning", "policies need token ids"), ("prefix tuning", "prefix tuning")],
)
def test_learned_prompts_of_a_wrapper_are_not_ignored(kind: str, message: str) -> None:
    """The cache was made for the base model, which knows nothing of its wrapper."""
    model = adapted(REFUSED[kind]())
    with pytest.raises(CacheError, match=message):
        cached(model, model.get_base_model())
