"""Every bundled reasoner, and the initial weights of the second one."""

import json

import pytest
import torch
from kvpolicy_reasoner import REASONER_VERBOSE, REASONERS, bundled_path
from kvpolicy_reasoner.evaluate import attempt, score
from kvpolicy_reasoner.model import load_reasoner
from kvpolicy_reasoner.problems import problems_of
from kvpolicy_reasoner.train.recipes import recipe_of
from kvpolicy_reasoner.train.train import CHECKPOINT, IDENTITY, train
from reasoners import WHOLE
from transformers import AutoTokenizer

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.task import load_task
from kvpolicy.model.loading import load_model


@pytest.mark.parametrize("name", REASONERS)
def test_bundled_files_are_small_and_contain_no_pickle(name):
    files = list(bundled_path(name).iterdir())
    assert sum(file.stat().st_size for file in files) < (6e6 if name in WHOLE else 18e6)
    assert {file.suffix for file in files} == {".jinja", ".json", ".safetensors", ".md"}


@pytest.mark.parametrize("name", WHOLE)
def test_bundled_tokenizer_equals_the_recipe(name):
    shipped, built = AutoTokenizer.from_pretrained(bundled_path(name)), recipe_of(name)
    for problem in problems_of(name).draw(20, seed=0):
        ids = built.build_tokenizer()(problem.prompt + problem.trace)["input_ids"]
        assert shipped(problem.prompt + problem.trace)["input_ids"] == ids
        assert shipped.decode(ids) == problem.prompt + problem.trace


@pytest.mark.parametrize("name", WHOLE)
def test_the_chat_template_writes_the_prompts_of_the_task(name):
    shipped, built = AutoTokenizer.from_pretrained(bundled_path(name)), recipe_of(name)
    assert shipped.chat_template == built.build_tokenizer().chat_template
    for problem in problems_of(name).draw(5, seed=0):
        question = problem.prompt.removeprefix("<|user|>").partition("<|assistant|>")[0]
        talk = [{"role": "user", "content": question}]
        options = {"tokenize": False, "add_generation_prompt": True}
        first = shipped.apply_chat_template(talk, **options)
        assert first == problem.prompt
        talk += [{"role": "assistant", "content": problem.trace}, talk[0]]
        answer = problem.trace.partition("</think>")[2]
        begin = f"<|user|>{question}<|assistant|>"
        assert shipped.apply_chat_template(talk, **options) == begin + answer + first


@pytest.mark.parametrize("name", WHOLE)
def test_reasoner_loads_by_name_in_float32_with_its_task(name):
    model, tokenizer = load_model(name)
    assert model.dtype == torch.float32
    item = load_task(name).examples(1, seed=0)[0]
    assert tokenizer.unk_token_id not in tokenizer(item.prompt)["input_ids"]
    assert load_task(name).grade(f"\\boxed{{{item.answer}}}", item)


def test_reasoner_tasks_have_different_prompts():
    prompts = {load_task(name).examples(1, seed=0)[0].prompt for name in REASONERS}
    assert len(prompts) == len(REASONERS)


def test_unknown_reasoner_suggests_the_nearest():
    with pytest.raises(KVPolicyError, match=" reasoner-verbose"):
        problems_of("reasoner-verbos")


def test_second_reasoner_starts_from_the_weights_of_the_first():
    state = torch.get_rng_state()
    start = dict(recipe_of(REASONER_VERBOSE).new_model(0).named_parameters())
    other = dict(recipe_of(REASONER_VERBOSE).new_model(1).named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in load_reasoner()[0].named_parameters():
        assert torch.equal(start[name][: len(value)], value)
        assert torch.equal(start[name][len(value) :], other[name][len(value) :]) == (
            len(start[name]) == len(value)
        )


@pytest.mark.nightly
def test_training_run_of_another_reasoner_is_not_continued(tmp_path, monkeypatch):
    monkeypatch.setattr("kvpolicy_reasoner.train.train.tune_accuracy", lambda learner, team: 0.0)
    toy = {"tokens": 2 * 2048, "tokens_per_step": 2048, "workers": 1}
    train(tmp_path, name=REASONER_VERBOSE, **toy, stop_after=1)
    before = (tmp_path / CHECKPOINT).read_bytes()
    with pytest.raises(KVPolicyError, match="run"):
        train(tmp_path, **toy)
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    train(tmp_path, name=REASONER_VERBOSE, **toy)
    assert json.loads((tmp_path / IDENTITY).read_text())["name"] == REASONER_VERBOSE
    assert len(AutoTokenizer.from_pretrained(tmp_path / "model")) == 180


@pytest.mark.nightly
def test_bundled_verbose_reasoner_solves_held_out_problems():
    verbose = problems_of(REASONER_VERBOSE)
    attempts = attempt(
        *load_reasoner(bundled_path(REASONER_VERBOSE)),
        verbose.draw(24, seed=101),
        max_new_tokens=verbose.max_new_tokens,
    )
    assert score(attempts).accuracy >= 0.85
