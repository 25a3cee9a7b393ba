"""The reasoner's tokenizer, its initial weights, and its bundled trained weights."""

import shutil
from functools import cache
from pathlib import Path

import pytest
import torch
from kvpolicy_reasoner import bundled_path
from kvpolicy_reasoner.evaluate import attempt, score
from kvpolicy_reasoner.model import load_reasoner, new_model
from kvpolicy_reasoner.task import make_problems
from kvpolicy_reasoner.tokenizer import NEWLINES, build_tokenizer
from kvpolicy_reasoner.train.recipes import recipe_of
from reasoners import WHOLE
from slow_share import share_of
from transformers import AutoTokenizer, GenerationConfig

from kvpolicy.errors import ModelError


@cache
def problems():
    return make_problems(60, seed=11, split="tune")


@pytest.mark.parametrize("source", ["built", "bundled"])
def test_tokenizer_round_trip_is_exact_without_unknown_tokens(source):
    built = build_tokenizer()
    tokenizer = built if source == "built" else AutoTokenizer.from_pretrained(bundled_path())
    for problem in problems():
        for text in (problem.prompt, problem.trace):
            ids = tokenizer(text)["input_ids"]
            assert ids == built(text)["input_ids"]
            assert tokenizer.decode(ids) == text
            assert tokenizer.unk_token_id not in ids


def test_sentence_end_is_tokenized_separately():
    tokenizer = build_tokenizer()
    assert tokenizer.convert_tokens_to_ids(NEWLINES) != tokenizer.unk_token_id
    assert tokenizer.tokenize(" so tea is 12.\n\n")[-3:] == [" 12", ".", "\n\n"]


def test_initial_first_layer_heads_attend_to_previous_tokens():
    model = new_model(seed=0)
    model.set_attn_implementation("eager")
    ids = torch.randint(5, 140, (1, 60), generator=torch.Generator().manual_seed(0))
    weights = model(ids, output_attentions=True).attentions[0][0]  # [H, T, T]
    for head in range(weights.shape[0]):
        assert weights[head, 50].argmax() == 50 - (head + 1)


def test_initial_weights_depend_only_on_the_seed():
    state = torch.get_rng_state()
    first, again, other = (new_model(seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("name", WHOLE)
def test_generation_configs_leave_the_length_to_the_caller(name):
    """A length there takes precedence over the ``max_length`` of an evaluation harness."""
    for model in (load_reasoner(bundled_path(name))[0], recipe_of(name).new_model(0)):
        config = model.generation_config
        assert (config.max_new_tokens, config.max_length) == (None, GenerationConfig().max_length)


@pytest.mark.nightly
def test_bundled_model_solves_many_held_out_problems():
    attempts = attempt(*load_reasoner(), make_problems(share_of(500), seed=0), max_new_tokens=700)
    assert score(attempts).accuracy >= 0.95
    assert sum(one.finished for one in attempts) >= 0.98 * len(attempts)


def test_folder_without_weights_raises(tmp_path: Path):
    shutil.copy(bundled_path() / "config.json", tmp_path)
    with pytest.raises(ModelError, match="weights"):
        load_reasoner(tmp_path)
