"""A prefix store never gives rows of other weights, whatever has changed them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import tiny_model

from kvpolicy import Engine, Plan, PrefixStore, Request
from kvpolicy.errors import ModelError

PROMPT = [5, 9, 40, 2, 2, 7, 11, 30, 3, 3, 8, 1] * 3
NEW = 12
PLAN = Plan.uniform("full")


def store() -> PrefixStore:
    return PrefixStore(2**30, block_tokens=4)


def tokens(engine: Engine, prompt: Any = PROMPT, **options: Any) -> tuple[int, ...]:
    (result,) = engine.generate([Request(prompt, NEW, stop_ids=(), **options)]).results()
    assert result.error is None, result.error
    return result.tokens


def adapted() -> Any:
    """A tiny model with two adapters, the first of them active."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny_model(dtype=torch.float64), config)
    model.add_adapter("other", config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.double().eval().named_parameters():
        if "lora_" in name:
            weight.data.normal_(std=0.5, generator=generator)
    return model


def train(model: Any) -> None:
    weights = [w for name, w in model.named_parameters() if "lora_A.default" in name]
    for weight in weights:
        weight.requires_grad_(True)
    model(torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    torch.optim.SGD(weights, lr=10.0).step()


def rescale(model: Any) -> None:
    for module in model.modules():
        if isinstance(scaling := getattr(module, "scaling", None), dict):
            scaling["default"] *= 3.0


CHANGES: dict[str, Callable[[Any], None]] = {
    "switched": lambda model: model.set_adapter("other"),
    "disabled": lambda model: model.base_model.disable_adapter_layers(),
    "merged": lambda model: model.merge_adapter(["other"]),
    "trained": train,
    "rescaled": rescale,
    "removed": lambda model: model.delete_adapter("default"),
}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
@pytest.mark.parametrize("is_new", [False, True], ids=["same engine", "new engine"])
@pytest.mark.few(3)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_adapter_finds_nothing(change: Callable[[Any], None], is_new: bool) -> None:
    model, kept = adapted(), store()
    engine = Engine(model, plan=PLAN, prefix_store=kept)
    first = tokens(engine)
    change(model)
    if is_new:
        engine = Engine(model, plan=PLAN, prefix_store=kept)
    found = kept.stats.hits
    again = tokens(engine)
    assert kept.stats.hits == found
    assert again == tokens(Engine(model, plan=PLAN))
    assert again != first


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_an_adapter_that_is_active_again_finds_its_own_rows() -> None:
    model, kept = adapted(), store()
    engine = Engine(model, plan=PLAN, prefix_store=kept)
    answers = {}
    for name in ("default", "other", "default", "other"):
        model.set_adapter(name)
        found = kept.stats.hits
        assert answers.setdefault(name, tokens(engine)) == tokens(Engine(model, plan=PLAN))
    assert kept.stats.hits > found


def write(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight[5, 7] += 3


def write_through_data(model: Any) -> None:
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.data.copy_(weight.data * 1.5)


def replace(model: Any) -> None:
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 1.5)


def replace_data(model: Any) -> None:
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight.data = layer.weight.detach() * 1.5


def load(model: Any) -> None:
    model.load_state_dict(tiny_model(seed=1, dtype=torch.float64).state_dict())


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, output: output + 0.5)


@pytest.mark.parametrize(
    "change",
    [write, write_through_data, replace, replace_data, load, hook],
    ids=lambda change: change.__name__,
)
@pytest.mark.few(3)
@pytest.mark.parametrize("is_new", [False, True], ids=["same engine", "new engine"])
def test_changed_weights_find_nothing(change: Callable[[Any], None], is_new: bool) -> None:
    model, kept = tiny_model(dtype=torch.float64), store()
    engine = Engine(model, plan=PLAN, prefix_store=kept)
    tokens(engine)
    change(model)
    if is_new:
        engine = Engine(model, plan=PLAN, prefix_store=kept)
    found = kept.stats.hits
    assert tokens(engine) == tokens(Engine(model, plan=PLAN))
    assert kept.stats.hits == found
    tokens(engine)
    assert kept.stats.hits > found


def test_files_of_a_store_are_those_of_weights(tmp_path: Path) -> None:
    def spilling() -> PrefixStore:
        return PrefixStore(2**30, block_tokens=4, spill=tmp_path)

    before = spilling()
    expected = tokens(Engine(tiny_model(dtype=torch.float64), plan=PLAN, prefix_store=before))
    before.flush()
    del before
    changed = tiny_model(dtype=torch.float64)
    write(changed)
    for model, is_found in ((changed, False), (tiny_model(dtype=torch.float64), True)):
        kept = spilling()
        found = tokens(Engine(model, plan=PLAN, prefix_store=kept))
        assert (kept.stats.spill_loads > 0) == is_found
        assert found == tokens(Engine(model, plan=PLAN))
        assert (found == expected) == is_found


@pytest.mark.few(1)
@pytest.mark.parametrize("num_steps", [1, 6], ids=["in its prompt", "in its answer"])
def test_a_request_that_saw_two_models_is_not_kept(num_steps: int) -> None:
    model, kept = tiny_model(dtype=torch.float64), store()
    engine = Engine(model, plan=PLAN, chunk=4, prefix_store=kept)
    run = engine.generate([Request(PROMPT, NEW, stop_ids=())])
    for _ in range(num_steps):
        run.step()
    write(model)
    (mixed,) = run.results()
    turn = [*PROMPT, *mixed.tokens, 7]
    assert tokens(engine, turn) == tokens(Engine(model, plan=PLAN), turn)


def test_a_snapshot_of_other_weights_is_refused() -> None:
    model = tiny_model(dtype=torch.float64)
    engine = Engine(model, plan=PLAN)
    (first,) = engine.generate([Request(PROMPT, NEW, stop_ids=(), snapshot=True)]).results()
    resumed = Request([7], NEW, resume=first.snapshot)
    assert engine.generate([resumed]).results()[0].error is None
    write(model)
    for other in (engine, Engine(model, plan=PLAN)):
        assert other.generate([resumed]).results()[0].error is not None


def test_weights_that_are_offloaded_have_no_store() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(dtype=torch.float64)
    accelerate.cpu_offload(model, execution_device="cpu")
    with pytest.raises(ModelError, match="offloaded"):
        Engine(model, plan=PLAN, prefix_store=store())
