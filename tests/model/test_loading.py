"""Loading models by installed name, folder or hub id."""

from pathlib import Path

import pytest
import torch
from folders import save_tiny_model

from kvpolicy.entry_points import EntryPoint
from kvpolicy.errors import ModelError
from kvpolicy.model import hub, loading
from kvpolicy.model.loading import InstalledModel, load_model, load_skeleton


def install(monkeypatch: pytest.MonkeyPatch, **models: InstalledModel) -> None:
    """Register models as packages do by entry point."""
    monkeypatch.setattr(loading, "installed", lambda _: dict.fromkeys(models))
    monkeypatch.setattr(loading, "load_installed", lambda _, name, **__: lambda: models[name])


def test_an_installed_model_is_loaded_in_its_preferred_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "weights")
    install(monkeypatch, tiny=InstalledModel(folder, dtype="bfloat16"))
    assert load_model("tiny")[0].dtype == load_skeleton("tiny").dtype == torch.bfloat16
    assert load_model("tiny", dtype="float16")[0].dtype == torch.float16
    assert load_model(folder)[0].dtype == torch.float32


def test_an_installed_model_with_a_broken_package_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("tiny", "no_such_package:model", loading.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    with pytest.raises(ModelError, match=r"model 'tiny'.*cannot be imported"):
        load_model("tiny")


def test_a_skeleton_has_the_shapes_of_the_model_and_no_memory(model_folder: Path) -> None:
    skeleton, (model, _) = load_skeleton(str(model_folder)), load_model(str(model_folder))
    shapes = {name: tensor.shape for name, tensor in skeleton.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in model.named_parameters()}
    assert skeleton.device.type == "meta"
    assert skeleton.dtype == model.dtype


@pytest.mark.parametrize("name", ["tinny", "Tiny", "./nowhere", "/nowhere", "a/b/c", " "])
def test_what_cannot_be_a_hub_id_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: str) -> bool:
        pytest.fail("the hub was asked")

    install(monkeypatch, tiny=InstalledModel(Path()))
    monkeypatch.setattr(loading, "_is_available", ask)
    with pytest.raises(ModelError, match="no folder"):
        load_model(name)


def test_a_hub_that_cannot_be_reached_is_not_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_address(*_: object) -> None:
        raise OSError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "getaddrinfo", no_address)
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        load_model("somebody/something")


def test_loading_prints_nothing(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(str(model_folder))
    assert capsys.readouterr() == ("", "")
