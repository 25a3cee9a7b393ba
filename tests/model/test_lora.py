"""LoRA adapters of PEFT: the model that they name, with their factors added to its weights."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import save_tiny_model
from kvpolicy_reasoner.tokenizer import build_tokenizer
from safetensors.torch import load_file, save_file
from tiny import tiny_model
from torch import Tensor

from kvpolicy.errors import ModelError
from kvpolicy.model import installed
from kvpolicy.model.installed import InstalledModel
from kvpolicy.model.loading import load_model, load_skeleton

RANK, ALPHA = 2, 6
TARGETS = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj")
WEIGHTS = "adapter_model.safetensors"


def factors_for(base: Path, targets: tuple[str, ...] = TARGETS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = load_file(base / "model.safetensors")
    found = {}
    for target in targets:
        rows, columns = weights[f"{target}.weight"].shape
        key = f"base_model.model.{target}"
        found[f"{key}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator)
        found[f"{key}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator)
    return found


def save_adapter(
    folder: Path, base: str | Path, factors: Mapping[str, Tensor], **settings: Any
) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    config |= {"r": RANK, "lora_alpha": ALPHA, **settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(dict(factors), folder / WEIGHTS)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny_model(tmp_path / "base")


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return save_adapter(tmp_path / "adapter", base, factors_for(base))


@pytest.mark.parametrize(
    ("settings", "scale"), [({}, ALPHA / RANK), ({"use_rslora": True}, ALPHA / RANK**0.5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_of_the_factors_is_added_to_the_weights_that_they_name(
    tmp_path: Path, base: Path, settings: dict[str, Any], scale: float, dtype: torch.dtype
) -> None:
    factors = factors_for(base)
    folder = save_adapter(tmp_path / "adapter", base, factors, **settings)
    merged = load_model(folder, dtype=dtype)[0].state_dict()
    for name, before in load_model(base, dtype=dtype)[0].state_dict().items():
        expected = before.double()
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        if f"{key}A.weight" in factors:
            a, b = (factors[f"{key}{one}.weight"].double() for one in "AB")
            expected = expected + scale * torch.einsum("or,ri->oi", b, a)
        # One rounding to `dtype` of a sum in float32.
        torch.testing.assert_close(merged[name].double(), expected, **tolerance(dtype))


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_peft_computes_with_its_adapter_is_what_the_merged_model_computes(
    tmp_path: Path, base: Path
) -> None:
    peft = pytest.importorskip("peft")
    model, _ = load_model(base)
    config = peft.LoraConfig(r=4, lora_alpha=3, target_modules=["v_proj", "up_proj", "o_proj"])
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([[1, 5, 9, 2, 7]])
    with torch.no_grad():
        expected = adapted(input_ids=tokens).logits
        found = load_model(tmp_path / "adapter")[0](input_ids=tokens).logits
        plain = load_model(base)[0](input_ids=tokens).logits
    torch.testing.assert_close(found, expected)
    assert (found - plain).abs().max() > 0.01


def test_tokenizer_is_that_of_the_adapter_if_it_has_one(adapter: Path) -> None:
    assert load_model(adapter)[1].chat_template is None
    build_tokenizer().save_pretrained(adapter)
    assert load_model(adapter)[1].chat_template is not None


def test_adapter_and_its_model_are_found_by_the_names_that_packages_register(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(tmp_path / "adapter", "tiny", factors_for(base))
    models = {"tuned": InstalledModel(folder, dtype="bfloat16"), "tiny": InstalledModel(base)}
    monkeypatch.setattr(installed, "installed", lambda _: dict.fromkeys(models))
    monkeypatch.setattr(installed, "load_installed", lambda _, name, **__: lambda: models[name])
    assert load_model("tuned")[0].dtype == load_skeleton("tuned").dtype == torch.bfloat16
    del models["tiny"]
    with pytest.raises(ModelError, match=r"tuned.*tiny"):
        load_model("tuned")


def changed(**settings: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))

    return change


def more_weights(**weights: Tensor) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        save_file(load_file(folder / WEIGHTS) | weights, folder / WEIGHTS)

    return change


NO_SUCH = f"base_model.model.{TARGETS[0]}.lora_magnitude_vector.weight"
OTHER = "base_model.model.model.layers.7.mlp.up_proj.lora_"
ONE = torch.ones(1)

BROKEN: dict[str, Callable[[Path], None]] = {
    "no settings": lambda folder: (folder / "adapter_config.json").write_text("{}") and None,
    "no object": lambda folder: (folder / "adapter_config.json").write_text("[]") and None,
    "no base": changed(base_model_name_or_path=None),
    "base that is not there": changed(base_model_name_or_path="./nowhere"),
    "another kind": changed(peft_type="IA3"),
    "magnitudes": changed(use_dora=True),
    "ranks by layer": changed(rank_pattern={"q_proj": 4}),
    "no rank": changed(r=None),
    "another rank": changed(r=RANK + 1),
    "no weights": lambda folder: (folder / WEIGHTS).unlink(),
    "cut weights": lambda folder: (folder / WEIGHTS).write_bytes(b"12345678") and None,
    "a weight that is no factor": more_weights(**{NO_SUCH: ONE}),
    "one factor of two": more_weights(**{OTHER + "A.weight": ONE}),
    "a module that is not there": more_weights(
        **{OTHER + "A.weight": torch.ones(RANK, 4), OTHER + "B.weight": torch.ones(4, RANK)}
    ),
}


@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_adapter_that_cannot_be_merged_raises_one_sentence(
    adapter: Path, change: Callable[[Path], None]
) -> None:
    change(adapter)
    with pytest.raises(ModelError, match=str(adapter)) as caught:
        load_model(adapter)
    assert "\n" not in str(caught.value)


def test_adapter_of_another_width_raises(tmp_path: Path, base: Path, adapter: Path) -> None:
    weights = {key: value[:, :1] for key, value in load_file(adapter / WEIGHTS).items()}
    save_file({key: value.contiguous() for key, value in weights.items()}, adapter / WEIGHTS)
    with pytest.raises(ModelError):
        load_model(adapter)


def test_weight_that_is_shared_is_not_changed_for_one_of_its_modules(
    tmp_path: Path, base: Path
) -> None:
    tiny_model("qwen2", tie_word_embeddings=True).save_pretrained(base)
    rows, columns = load_model(base)[0].lm_head.weight.shape
    key = "base_model.model.lm_head.lora_"
    factors = {
        key + "A.weight": torch.ones(RANK, columns),
        key + "B.weight": torch.ones(rows, RANK),
    }
    with pytest.raises(ModelError):
        load_model(save_adapter(tmp_path / "adapter", base, factors))


def test_adapter_of_an_adapter_raises(tmp_path: Path, adapter: Path) -> None:
    changed(base_model_name_or_path=str(adapter))(adapter)  # even of itself
    with pytest.raises(ModelError):
        load_model(adapter)


def test_adapter_is_not_split_over_processes(adapter: Path) -> None:
    with pytest.raises(ModelError):
        load_model(adapter, tp_plan="auto")
