"""Models by name: the bundled one, folders, hub ids; and telling one from another."""

import copy
from pathlib import Path

import pytest
import torch
from tiny import tiny_model

from kvpolicy.errors import ModelError
from kvpolicy.lab import hub, models
from kvpolicy.lab.models import fingerprint, fingerprint_texts
from kvpolicy.model.loading import load_model, load_skeleton


def test_the_reasoner_is_run_in_full_precision_unless_told_otherwise() -> None:
    assert load_model("reasoner")[0].dtype == torch.float32
    assert load_model("reasoner", dtype="bfloat16")[0].dtype == torch.bfloat16


def test_a_skeleton_has_the_shapes_of_the_model_and_no_memory(model_folder: Path) -> None:
    skeleton, (model, _) = load_skeleton(str(model_folder)), load_model(str(model_folder))
    shapes = {name: tensor.shape for name, tensor in skeleton.named_parameters()}
    assert shapes == {name: tensor.shape for name, tensor in model.named_parameters()}
    assert skeleton.device.type == "meta"
    assert skeleton.dtype == model.dtype


@pytest.mark.parametrize("name", ["reasonr", "Reasoner", "./nowhere", "/nowhere", "a/b/c", " "])
def test_what_cannot_be_a_hub_id_is_refused_without_asking_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: str) -> bool:
        pytest.fail("the hub was asked")

    monkeypatch.setattr(models, "_may_be_had", ask)
    with pytest.raises(ModelError, match="no folder"):
        load_model(name)


def test_a_hub_that_cannot_be_reached_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_address(*_: object) -> None:
        raise OSError

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "getproxies", dict)
    monkeypatch.setattr(hub.socket, "getaddrinfo", no_address)
    with pytest.raises(ModelError, match="the hub cannot be reached"):
        load_model("somebody/something")


def test_loading_says_nothing(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load_model(str(model_folder))
    assert capsys.readouterr() == ("", "")


def test_equal_models_have_equal_fingerprints_and_others_have_others() -> None:
    model = tiny_model(seed=1)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_input_embeddings().weight[3, 2] += 1e-6
    longer = copy.deepcopy(model)
    longer.config.max_position_embeddings += 1
    others = [changed, longer, tiny_model(seed=2), tiny_model(seed=1).to(torch.bfloat16)]
    found = [fingerprint(each) for each in (model, *others)]
    assert len(set(found)) == len(found)
    assert fingerprint(tiny_model(seed=1)) == found[0]


def test_a_fingerprint_does_not_depend_on_where_a_model_lies(
    model_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(str(model_folder))
    model.save_pretrained(tmp_path / "copy")
    tokenizer.save_pretrained(tmp_path / "copy")
    assert fingerprint(load_model(str(tmp_path / "copy"))[0]) == fingerprint(model)


def test_a_fingerprint_does_not_depend_on_the_version_that_loads_a_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_model()
    found = fingerprint(model)
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.1")
    assert model.config.to_dict()["transformers_version"] == "99.1"
    assert fingerprint(model) == found


def test_texts_are_told_apart_by_where_one_ends() -> None:
    assert fingerprint_texts(["ab", "c"]) != fingerprint_texts(["a", "bc"])
