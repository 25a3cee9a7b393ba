"""Telling models from one another: fingerprints of weights and of texts."""

import copy
import itertools
from pathlib import Path

import attrs
import pytest
import torch
from families import family_model
from tiny import tiny_model, tiny_tokenizer
from tokenizers import normalizers

from kvpolicy.errors import ModelError
from kvpolicy.lab.models import ModelCache, fingerprint, fingerprint_texts
from kvpolicy.model.loading import load_model
from kvpolicy.model.packed import packed_model


def test_equal_models_have_equal_fingerprints_and_others_have_others() -> None:
    model = tiny_model(seed=1)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_input_embeddings().weight[3, 2] += 1e-6
    longer = copy.deepcopy(model)
    longer.config.max_position_embeddings += 1
    penalised = tiny_model(seed=1)
    penalised.generation_config.repetition_penalty = 1.1
    others = [changed, longer, penalised, tiny_model(seed=2), tiny_model(seed=1).to(torch.bfloat16)]
    found = [fingerprint(each) for each in (model, *others)]
    assert len(set(found)) == len(found)
    alike = tiny_model(seed=1)
    alike.generation_config.temperature = 0.5  # a request says it
    assert fingerprint(alike) == found[0]


def test_a_fingerprint_does_not_depend_on_where_a_model_lies(
    model_folder: Path, tmp_path: Path
) -> None:
    model, tokenizer = load_model(str(model_folder))
    model.save_pretrained(tmp_path / "copy")
    tokenizer.save_pretrained(tmp_path / "copy")
    copied, of_copy = load_model(str(tmp_path / "copy"))
    assert fingerprint(copied) == fingerprint(model)
    assert fingerprint(copied, of_copy) == fingerprint(model, tokenizer)


@pytest.mark.parametrize("change", ["chat template", "added token", "rules"])
def test_a_model_with_another_tokenizer_has_another_fingerprint(
    model_folder: Path, change: str
) -> None:
    model, tokenizer = load_model(str(model_folder))
    found = fingerprint(model, tokenizer)
    tokenizer(["1", "1+1"], padding=True, truncation=True, max_length=2)
    assert fingerprint(model, tokenizer) == found, "what one call asks for does not count"
    if change == "chat template":
        tokenizer.chat_template = "{{ messages[0]['content'] }}"
    elif change == "added token":
        tokenizer.add_tokens(["1+"])
    else:
        tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    assert fingerprint(model, tokenizer) != found


@pytest.mark.usefixtures("packs_small_products")
def test_packed_weights_are_named_and_have_another_fingerprint(model_folder: Path) -> None:
    plain, _ = ModelCache().describe(str(model_folder))
    packed, _ = ModelCache(cpu_weights="packed").describe(str(model_folder))
    assert (plain.dtype, packed.dtype) == ("float32", "float32, packed")
    assert packed.fingerprint != plain.fingerprint
    changed = {"dtype": plain.dtype, "fingerprint": plain.fingerprint}
    assert attrs.evolve(packed, **changed) == plain
    model, tokenizer = load_model(str(model_folder))
    assert fingerprint(packed_model(model), tokenizer) == packed.fingerprint


def test_each_form_of_computing_is_named_and_has_another_fingerprint(
    model_folder: Path, packs_small_products: None, no_compiler: None
) -> None:
    found = {}
    for order, compiled in itertools.product(("plain", "packed"), (False, True)):
        models = ModelCache(cpu_weights=order, compile=compiled)
        found[order, compiled], _ = models.describe(str(model_folder))
        assert models.open(str(model_folder)).compile == compiled
    assert [one.dtype for one in found.values()] == [
        "float32",
        "float32, compiled",
        "float32, packed",
        "float32, packed, compiled",
    ]
    assert len({one.fingerprint for one in found.values()}) == len(found)


def test_a_model_that_cannot_be_compiled_is_refused_when_it_is_opened(
    tmp_path: Path, no_compiler: None
) -> None:
    family_model("mixtral").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    ModelCache().describe(str(tmp_path))
    models = ModelCache(compile=True)
    for _ in range(2):
        with pytest.raises(ModelError, match="compiled"):
            models.describe(str(tmp_path))


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
