"""A fingerprint is that of the weights, wherever they come from."""

from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from kvpolicy import packed_model
from kvpolicy.model.fingerprint import model_fingerprint, tokenizer_fingerprint


def test_models_with_equal_weights_have_the_same(tmp_path: Path) -> None:
    model = tiny_model()
    assert model_fingerprint(model) == model_fingerprint(tiny_model())
    for folder in ("a", "b"):
        model.save_pretrained(tmp_path / folder)
    loaded = [AutoModelForCausalLM.from_pretrained(tmp_path / folder) for folder in ("a", "b")]
    first, second = map(model_fingerprint, loaded)
    assert first == second


def test_a_change_of_any_parameter_changes_it() -> None:
    expected = model_fingerprint(tiny_model())
    for name, _ in tiny_model().named_parameters():
        changed = tiny_model()
        changed.get_parameter(name).data.mul_(1.01)
        assert model_fingerprint(changed) != expected, name


def test_a_large_parameter_is_not_read_as_a_whole() -> None:
    model = tiny_model(vocab=2003)
    model.lm_head.weight.data *= 1.5
    assert model_fingerprint(model) != model_fingerprint(tiny_model(vocab=2003))


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dtype": torch.float64},
        {"num_layers": 3},
        {"family": "qwen3"},
        {"rms_norm_eps": 1e-3},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0}},
    ],
    ids=str,
)
def test_other_models_have_another_one(changes: dict) -> None:
    assert model_fingerprint(tiny_model()) != model_fingerprint(tiny_model(**changes))


@pytest.mark.usefixtures("packs_small_products")
def test_of_weights_that_were_freed_the_name_of_the_model_counts() -> None:
    found = set()
    for name in ("mine", "yours", "mine"):
        model = tiny_model()
        model.config.name_or_path = name
        plain = model_fingerprint(model)
        found.add(model_fingerprint(packed_model(model, release=True)))
        assert plain == model_fingerprint(tiny_model())
    assert len(found) == 2


def test_tokenizers_differ_by_their_vocabulary() -> None:
    ours = tokenizer_fingerprint(tiny_tokenizer())
    assert ours == tokenizer_fingerprint(tiny_tokenizer())
    others = {tokenizer_fingerprint(one) for one in (tiny_tokenizer(50), byte_tokenizer(), None)}
    assert len({ours, *others}) == 4
