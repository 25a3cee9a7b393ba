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


def test_installed_model_is_loaded_in_its_preferred_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny_model(tmp_path / "weights")
    install(monkeypatch, tiny=InstalledModel(folder, dtype="bfloat16"))
    assert load_model("tiny")[0].dtype == load_skeleton("tiny").dtype == torch.bfloat16
    assert load_model("tiny", dtype="float16")[0].dtype == torch.float16
    assert load_model(folder)[0].dtype == torch.float32


def test_installed_model_with_import_error_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    point = EntryPoint("tiny", "no_such_package:model", loading.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **_: [point])
    with pytest.raises(ModelError, match=r"model 'tiny'.*cannot be imported"):
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
