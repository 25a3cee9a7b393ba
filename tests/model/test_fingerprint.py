"""A fingerprint is that of the weights, wherever they come from."""

from pathlib import Path

import pytest
import torch
from tiny import byte_tokenizer, tiny_model, tiny_tokenizer
from transformers import AutoModelForCausalLM

from kvpolicy import packed_model
from kvpolicy.model.fingerprint import (
    ModelFingerprint,
    model_fingerprint,
    tokenizer_fingerprint,
)


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


def test_a_change_of_a_single_number_changes_it() -> None:
    model, expected = tiny_model(vocab=2003), model_fingerprint(tiny_model(vocab=2003))
    model.model.layers[1].self_attn.v_proj.weight.data[5, 7] += 3
    assert model_fingerprint(model) != expected


def test_the_order_of_numbers_counts() -> None:
    model = tiny_model()
    weight = model.lm_head.weight.data
    weight[[0, 1]] = weight[[1, 0]]
    assert model_fingerprint(model) != model_fingerprint(tiny_model())


def test_it_follows_the_model() -> None:
    model = tiny_model()
    live, expected = ModelFingerprint(model), model_fingerprint(model)
    assert live.current() == live.current() == expected
    weight = model.lm_head.weight
    for change in (lambda: weight.neg_(), lambda: weight.data.mul_(3), lambda: model.half()):
        with torch.no_grad():
            change()
        assert live.current() == model_fingerprint(model) != expected
        expected = live.current()


def test_tensors_of_any_kind_count() -> None:
    found = set()
    for value in (1.0, 2.0):
        model = tiny_model()
        for name, tensor in {
            "empty": torch.zeros(0),
            "scalar": torch.tensor(value),
            "flags": torch.tensor([value > 1]),
            "sparse": torch.eye(3).mul(value).to_sparse(),
            "turned": torch.full((3, 4), value).T,
            "expanded": torch.tensor(value).expand(5),
            "small": torch.full((5,), value).to(torch.float8_e4m3fn),
        }.items():
            model.register_buffer(name, tensor)
            found.add(model_fingerprint(model))
    assert len(found) == 1 + 2 * 6


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
def test_of_weights_that_were_freed_the_numbers_count() -> None:
    kept = model_fingerprint(packed_model(tiny_model()))
    assert model_fingerprint(packed_model(tiny_model(), release=True)) == kept
    assert model_fingerprint(packed_model(tiny_model(seed=1), release=True)) != kept


def test_tokenizers_differ_by_their_vocabulary() -> None:
    ours = tokenizer_fingerprint(tiny_tokenizer())
    assert ours == tokenizer_fingerprint(tiny_tokenizer())
    others = {tokenizer_fingerprint(one) for one in (tiny_tokenizer(50), byte_tokenizer(), None)}
    assert len({ours, *others}) == 4
