"""Tasks of passages: what is asked, with which lengths, in which model's tokens."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from lab_sweeps import BASE, Catalogue
from tiny import r1_tokenizer
from tokenizer_kinds import KINDS

from kvpolicy.errors import TaskError
from kvpolicy.lab.models import ModelInfo
from kvpolicy.lab.sweep.prepare import build_sweep
from kvpolicy.lab.tasks.chat_template import wrap
from kvpolicy.lab.tasks.prose import open_prose
from kvpolicy.lab.tasks.task import Task, fitted, load_task, needs_tokenizer

TOKENIZER = r1_tokenizer()  # bytes, and a first token
BOOK = "The ab one two and do. " * 40


def task(text: str) -> Task:
    return fitted(load_task(text), TOKENIZER)


def test_perplexity_scores_what_follows_each_passage_of_the_default_text() -> None:
    examples = task("perplexity:prompt_tokens=90,scored_tokens=50").examples(3, seed=4)
    text = open_prose().content
    for index, example in enumerate(examples):
        assert example.reference is not None
        assert example.index == index
        assert example.prompt + example.reference in text
        assert 60 < len(TOKENIZER(example.prompt)["input_ids"]) <= 90
        assert 20 < len(example.reference) <= 90 - len(example.prompt) + 50
    assert len({example.prompt for example in examples}) == 3


@pytest.mark.parametrize("family", ["agreement", "retention"])
def test_other_metrics_take_passages_as_prompts(family: str, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    (example,) = task(f"{family}:of={tmp_path / 'book.txt'},prompt_tokens=100").examples(1, seed=0)
    assert BOOK.startswith(example.prompt)
    assert 80 < len(TOKENIZER(example.prompt)["input_ids"]) <= 100
    assert example.reference is None


def test_passages_are_no_messages_where_the_tokenizer_has_a_chat_template() -> None:
    examples = task("perplexity:prompt_tokens=40").examples(2, seed=0)
    assert wrap(examples, TOKENIZER) == list(examples)


def test_lengths_are_1024_and_256_tokens_unless_others_are_given() -> None:
    (example,) = task("perplexity").examples(1, seed=0)
    (longer,) = task("perplexity:scored_tokens=500").examples(1, seed=0)
    assert 1000 < len(TOKENIZER(example.prompt)["input_ids"]) <= 1024
    for one, length in ((example, 256), (longer, 500)):
        whole = TOKENIZER(one.prompt + (one.reference or ""))["input_ids"]
        assert 1000 + length < len(whole) <= 1024 + length


def test_a_name_has_the_options_that_differ() -> None:
    assert load_task("perplexity:prompt_tokens=1024").name == "perplexity"
    name = "perplexity:of=book.txt,prompt_tokens=9,scored_tokens=8"
    assert load_task(name).name == name


@pytest.mark.needs_reasoner
@pytest.mark.parametrize("of", ["reasoner:level=easy", "book.jsonl", "owner/name"])
def test_prompts_of_another_task_have_lengths_of_their_own(of: str) -> None:
    assert load_task(f"agreement:of={of}").name == f"agreement:of={of}"
    with pytest.raises(TaskError, match="prompt_tokens"):
        load_task(f"agreement:of={of},prompt_tokens=9")


def test_a_text_that_does_not_exist_is_named() -> None:
    with pytest.raises(TaskError, match=r"folder/book\.txt cannot be read"):
        task("agreement:of=folder/book.txt,prompt_tokens=9").examples(1, seed=0)


@pytest.mark.parametrize(
    "options", ["prompt_tokens=0", "scored_tokens=-1", "prompt_tokens=many", "of=,prompt_tokens=9"]
)
def test_lengths_that_are_none_are_refused(options: str) -> None:
    with pytest.raises(TaskError):
        task(f"perplexity:{options}").examples(1, seed=0)


def test_without_a_tokenizer_nothing_is_drawn() -> None:
    assert needs_tokenizer(load_task("agreement"))
    with pytest.raises(TaskError, match="--model"):
        load_task("agreement").examples(1, seed=0)


@pytest.mark.needs_reasoner
def test_the_tokenizer_is_handed_on_to_the_other_task(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = load_task("agreement:prompt_tokens=50")
    monkeypatch.setattr("kvpolicy.lab.tasks.derived.load_task", lambda _: inner)
    (example,) = task("agreement:of=other").examples(1, seed=0)
    assert example == fitted(inner, TOKENIZER).examples(1, seed=0)[0]


@pytest.mark.needs_reasoner
def test_in_a_sweep_each_model_reads_passages_of_its_own_tokens(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(BOOK, encoding="utf-8")
    tokenizers = {"a": TOKENIZER, "b": KINDS["Gemma"]()}

    class WithTokenizers(Catalogue):
        def describe(self, name: str) -> tuple[ModelInfo, Any]:
            return super().describe(name)[0], tokenizers[name]

    passages = f"agreement:of={tmp_path / 'book.txt'},prompt_tokens=60"
    sweep = build_sweep(
        attrs.evolve(BASE, models=("a", "b"), tasks=(passages, "reasoner")), WithTokenizers()
    )
    for setting in sweep.settings:
        if setting.task.name != "reasoner":
            tokenizer = tokenizers[setting.model.name]
            for example in setting.examples:
                assert 40 < len(tokenizer(example.prompt)["input_ids"]) <= 60
    first, second = (one.examples for one in sweep.settings if one.task.name != "reasoner")
    assert [one.prompt for one in first] != [one.prompt for one in second]
