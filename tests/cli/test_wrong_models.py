"""Invalid model folders: refused with the reason, never completed with defaults."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from shell import Shell, refusal

H2O = ("--policy", "h2o", "--budget", "16", "--max-new-tokens", "2")


def config(**changes: Any) -> Callable[[Path], None]:
    """Change entries of config.json; ``...`` takes one out."""

    def spoil(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text())
        found = {key: value for key, value in (found | changes).items() if value is not ...}
        (folder / "config.json").write_text(json.dumps(found))

    return spoil


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Change the tensors of model.safetensors."""

    def spoil(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return spoil


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def torn(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


UP = "model.layers.0.mlp.up_proj.weight"
SPOILT: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), ("model.safetensors",)),
    "a pickle only": (
        pickled,
        ("pytorch_model.bin", "safetensors"),
    ),
    "torn weights": (torn, ("model.safetensors", "cut or damaged")),
    "empty weights": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        ("model.safetensors", "empty"),
    ),
    "a tensor missing": (weights(lambda t: t.pop(UP)), (UP,)),
    "two tensors missing": (
        weights(lambda t: (t.pop(UP), t.pop(UP.replace("up", "down")))),
        (UP.replace("up", "down"), "1 more"),
    ),
    "a tensor of another shape": (
        weights(lambda t: t.update({UP: t[UP][:3].clone()})),
        (UP, "shape"),
    ),
    "no tokenizer": (without_tokenizer, ("tokenizer",)),
    "a broken tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), ()),
    "no config": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), ("JSON",)),
    "config is a list": (lambda f: (f / "config.json").write_text("[1]"), ()),
    "config is not UTF-8": (
        lambda f: (f / "config.json").write_bytes(b'{"a": "\xe9"}'),
        (),
    ),
    "no such architecture": (config(model_type="nosuch"), ("nosuch",)),
    "no architecture": (config(model_type=...), ("model_type",)),
    "layers in words": (config(num_hidden_layers="two"), ("num_hidden_layers",)),
    "no heads": (config(num_attention_heads=0), ()),
    "another size": (config(hidden_size=33), ("shape",)),
    "an unknown kind of RoPE": (config(rope_parameters={"rope_type": "nosuch"}), ("nosuch",)),
}


@pytest.mark.few(8)
@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_a_damaged_folder_is_refused_with_the_reason(
    kvpolicy: Shell,
    model_folder: Path,
    tmp_path: Path,
    spoil: Callable[[Path], object],
    message: tuple[str, ...],
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(model_folder, folder)
    spoil(folder)
    sentence = refusal(kvpolicy("run", "tea is 3.", "--model", folder, *H2O))
    assert f"'{folder}'" in sentence
    assert f"mean {folder}" not in sentence, "it is not what might be meant"
    for words in message:
        assert words in sentence


@pytest.mark.parametrize(
    "spoil",
    [
        config(num_attention_heads=0),
        config(num_hidden_layers="two"),
        config(rope_parameters={"rope_type": "nosuch"}),
        lambda f: (f / "config.json").unlink(),
    ],
)
@pytest.mark.parametrize("command", ["show", "check"])
def test_a_configuration_that_cannot_be_built_is_refused(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, spoil: Any, command: str
) -> None:
    folder = tmp_path / "spoilt"
    folder.mkdir()
    shutil.copy(model_folder / "config.json", folder)
    spoil(folder)
    (tmp_path / "plan.toml").write_text('budget = 16\nstack = ["h2o"]\n')
    sentence = refusal(kvpolicy("plan", command, tmp_path / "plan.toml", "--model", folder))
    assert f"'{folder}'" in sentence


def test_an_undamaged_folder_is_loaded(kvpolicy: Shell, model_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(model_folder, tmp_path / "whole")
    assert kvpolicy("run", "tea is 3.", "--model", tmp_path / "whole", *H2O).status == 0
