"""Loading models by installed name, folder or hub id."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import save_tiny_model
from tiny import tiny_model, tiny_tokenizer
from tiny_images import tiny_seeing_model

from kvpolicy import Engine, Plan
from kvpolicy.entry_points import EntryPoint
from kvpolicy.errors import ModelError
from kvpolicy.model import hub, installed, loading
from kvpolicy.model.installed import GROUP, InstalledModel
from kvpolicy.model.loading import load_model, load_skeleton


def install(monkeypatch: pytest.MonkeyPatch, **models: InstalledModel) -> None:
    """Register models as packages do by entry point."""
    monkeypatch.setattr(installed, "installed", lambda _: dict.fromkeys(models))
    monkeypatch.setattr(installed, "load_installed", lambda _, name, **__: lambda: models[name])


def test_installed_model_is_loaded_in_its_preferred_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "weights")
    install(monkeypatch, tiny=InstalledModel(folder, dtype="bfloat16"))
    assert load_model("tiny")[0].dtype == load_skeleton("tiny").dtype == torch.bfloat16
    assert load_model("tiny", dtype="float16")[0].dtype == torch.float16
    assert load_model(folder)[0].dtype == torch.float32


def test_a_class_for_images_and_text_is_loaded_and_answers_texts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    model = tiny_seeing_model("LlavaForConditionalGeneration")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    # transformers has no class for text alone of this configuration.
    loaded, _ = load_model(tmp_path)
    assert type(loaded) is type(load_skeleton(tmp_path)) is type(model)
    ours, theirs = (
        Engine(one, plan=Plan.uniform("full")).generate([[5, 9, 3]], max_new_tokens=4).results()
        for one in (loaded, model)
    )
    assert ours[0].tokens == theirs[0].tokens


def test_installed_model_with_import_error_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("tiny", "no_such_package:model", GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    with pytest.raises(ModelError, match="tiny"):
        load_model("tiny")


def test_skeleton_has_the_shapes_of_the_model_on_the_meta_device(model_folder: Path) -> None:
    skeleton, (model, _) = load_skeleton(str(model_folder)), load_model(str(model_folder))
    shapes = {name: tensor.shape for name, tensor in skeleton.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in model.named_parameters()}
    assert skeleton.device.type == "meta"
    assert skeleton.dtype == model.dtype


@pytest.mark.parametrize("name", ["tinny", "Tiny", "./nowhere", "/nowhere", "a/b/c", " "])
def test_invalid_hub_id_raises_without_a_hub_request(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: str) -> bool:
        pytest.fail("a hub request was sent")

    install(monkeypatch, tiny=InstalledModel(Path()))
    monkeypatch.setattr(loading, "_is_available", ask)
    with pytest.raises(ModelError, match="no folder"):
        load_model(name)


def test_unreachable_hub_is_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_to_resolve(*_: object) -> None:
        raise OSError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "getaddrinfo", fail_to_resolve)
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        load_model("somebody/something")


def test_loading_prints_nothing(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(str(model_folder))
    assert capsys.readouterr() == ("", "")


def change_config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def replaced(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def only(name: str, content: str) -> Callable[[Path], None]:
    """Without all files, and with another one."""

    def change(folder: Path) -> None:
        for path in folder.iterdir():
            path.unlink()
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return change


#: Further folders are in tests/cli/test_wrong_models.py.
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "empty": (only("README.md", ""), "it has no config.json"),
    "nested": (only("inner/config.json", "{}"), "no config.json, but .*inner has one"),
    "adapter": (only("adapter_config.json", "{}"), "it is an adapter of no known kind.*PEFT"),
    "deep JSON": (replaced("config.json", "[" * 100_000), "nested more than 100 levels"),
    "null": (replaced("config.json", "null"), "its config.json does not describe a model"),
    "encoder": (change_config(model_type="clip"), "CLIPConfig"),
    "deep tokenizer": (replaced("tokenizer.json", "[" * 100_000), "RecursionError"),
}


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_folder_raises_one_sentence(
    change: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "weights")
    change(folder)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_other_folders_are_offered_for_a_name_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("weights", "weights-2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{")
    with pytest.raises(ModelError, match="weights"):
        load_model("./weihgts")
    for name in ("weights", "./weights", tmp_path / "weights"):
        with pytest.raises(ModelError, match="JSON") as caught:
            load_model(name)
        assert "mean" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_file_raises(name: str, model_folder: Path) -> None:
    with pytest.raises(ModelError, match="folder"):
        load_model(model_folder / name)


@pytest.mark.parametrize("name", ["x" * 5000, "a/" + "x" * 300, "a\0b", "~/x", "C:\\model"])
def test_impossible_name_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.socket, "getaddrinfo", lambda *_: pytest.fail("the network was used"))
    with pytest.raises(ModelError, match=r"^model "):
        load_model(name)


@pytest.mark.parametrize("dtype", [None, 3, []])
def test_dtype_of_another_type_raises(dtype: Any, model_folder: Path) -> None:
    with pytest.raises(ModelError, match="auto"):
        load_model(model_folder, dtype=dtype)


def test_end_token_that_is_none_raises() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [1, "end"]
    with pytest.raises(ModelError, match="eos_token_id"):
        Engine(model, plan=Plan.uniform("full"))


@pytest.mark.parametrize("content", ['{"eos_token_id": [1,', "[1]", "", "\udcff"])
def test_generation_config_that_is_no_json_object_raises(content: str, tmp_path: Path) -> None:
    folder = save_tiny_model(tmp_path / "model")
    file = folder / "generation_config.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        load_model(folder)
    file.unlink()
    load_model(folder)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n", "git lfs pull"),
        (b"\n<!doctype html><html></html>", "HTML"),
        (None, "cut"),
    ],
)
def test_weights_that_are_something_else_are_named_with_what_they_are(
    content: bytes | None, named: str, tmp_path: Path
) -> None:
    folder = save_tiny_model(tmp_path / "model")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-5] if content is None else content)
    with pytest.raises(ModelError, match=rf"model\.safetensors.*{named}"):
        load_model(folder)
