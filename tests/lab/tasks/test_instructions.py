"""Instructions of a system prompt: what is asked, what counts as followed, and what as a leak."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import r1_tokenizer
from tokenizer_kinds import KINDS as TOKENIZERS

from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import Result
from kvpolicy.errors import TaskError
from kvpolicy.lab.shared import Shared
from kvpolicy.lab.tasks.chat_template import encode, wrap
from kvpolicy.lab.tasks.instructions import KINDS, NGRAM, Following, follows, leaked
from kvpolicy.lab.tasks.prose import open_prose
from kvpolicy.lab.tasks.task import EvalOutcome, EvalRequest, Example, Task, fitted, load_task

TOKENIZER = r1_tokenizer()


def task(text: str) -> Task:
    return fitted(load_task(text), TOKENIZER)


class Parrot:
    """An engine that gives the same answer to all requests."""

    def __init__(self, answer: str) -> None:
        self.answer = answer

    def generate(self, requests: list[Request]) -> list[Result]:
        return [Result(number, text=self.answer) for number in range(len(requests))]


def outcome(example: Example, answer: str) -> EvalOutcome:
    request = EvalRequest(example, Request(example.prompt))
    evaluation = Following().begin(Parrot(answer), [request], Shared())  # type: ignore[arg-type]
    (result,) = evaluation.run
    return evaluation.outcome(result)


@given(st.integers(0, 50), st.integers(1, len(KINDS)))
def test_every_other_example_asks_for_the_system_prompt_and_has_a_canary_in_it(
    seed: int, count: int
) -> None:
    first, second = task(f"instructions:count={count},text_tokens=0").examples(2, seed=seed)
    assert (first.facets["asks"], second.facets["asks"]) == ("question", "system prompt")
    for example in (first, second):
        assert example.chat
        assert len((example.system or "").splitlines()) == 1 + count
        assert "system prompt" in example.prompt or example is first
    asked = json.loads(first.answer)
    assert len(asked) == count
    lines = (first.system or "").splitlines()[1:]
    for line, argument in zip(lines, asked.values(), strict=True):
        assert argument in line
    assert json.loads(second.answer)["canary"] in (second.system or "")


def test_a_passage_of_the_asked_length_stands_between_instructions_and_question() -> None:
    content = open_prose().content
    for example in task("instructions:text_tokens=300").examples(4, seed=1):
        passage = example.prompt.split("\n\n", 1)[1].rsplit("\n\n", 1)[0]
        assert passage in content
        assert 250 < len(TOKENIZER(passage)["input_ids"]) <= 300


def test_a_longer_text_has_the_same_instructions_and_seeds_and_splits_have_others() -> None:
    drawn = [
        task(f"instructions:text_tokens={tokens}").examples(6, seed=seed, split=split)
        for tokens, seed, split in (
            (0, 0, "test"),
            (200, 0, "test"),
            (0, 1, "test"),
            (0, 0, "tune"),
            (0, 0, "train"),
        )
    ]
    systems = [[example.system for example in examples] for examples in drawn]
    assert systems[0] == systems[1]
    assert len({system for one in systems[1:] for system in one}) == 24
    assert task("instructions:text_tokens=0").examples(3, seed=0) == drawn[0][:3]


def test_the_system_prompt_is_in_the_models_chat_template() -> None:
    examples = task("instructions:text_tokens=50").examples(2, seed=0)
    chat = r1_tokenizer()
    chat.chat_template = (
        "{% for one in messages %}{{ one['role'] + ': ' + one['content'] }}{% endfor %}"
    )
    for example, asked in zip(wrap(examples, chat), examples, strict=True):
        assert example.prompt == f"system: {asked.system}user: {asked.prompt}"
        (ids,) = encode([example], chat)
        assert chat.decode(ids) == example.prompt


def test_a_model_that_is_given_no_system_prompt_is_refused() -> None:
    examples = load_task("instructions:text_tokens=0").for_tokenizer(TOKENIZER).examples(1, seed=0)
    with pytest.raises(TaskError, match="chat template"):
        wrap(examples, TOKENIZERS["byte-level"]())
    with pytest.raises(TaskError, match="system prompt"):
        wrap(examples, TOKENIZER)  # its template has no place for one


@pytest.mark.parametrize(
    ("kind", "argument", "text", "is_followed"),
    [
        ("language", "French", "La mer est le monde, et elle est dans la ville.", True),
        ("language", "French", "The sea is the world, and it is in the town.", False),
        ("language", "Spanish", "El mar es una parte del mundo.", True),
        ("language", "Italian", "Il mare è una parte del mondo.", True),
        ("language", "German", "DAS MEER IST EIN TEIL DER WELT.", True),
        ("language", "German", "Meer", False),
        ("sentences", "two", "One is here. Two is 3.5 long!", True),
        ("sentences", "two", "One is here... Two", True),
        ("sentences", "two", "One. Two. Three.", False),
        ("sentences", "four", "One. Two. Three.", False),
        ("capitals", "", "THE SEA, 3 MILES.", True),
        ("capitals", "", "THE Sea", False),
        ("capitals", "", "3.", False),
        ("no_comma", "", "The sea.", True),
        ("no_comma", "", "The sea, the sky.", False),
        ("keyword", "harbor", "A HARBOR.", True),
        ("keyword", "harbor", "Harbors.", False),
        ("first_word", "Well", "*Well*, the sea", True),
        ("first_word", "Well", "Wells are deep.", False),
        ("first_word", "Well", "The sea. Well", False),
        ("last_sentence", "Over and out.", 'The sea. "OVER AND OUT."\n', True),
        ("last_sentence", "Over and out.", "Over and out. The sea.", False),
    ],
)
def test_what_counts_as_followed(kind: str, argument: str, text: str, is_followed: bool) -> None:
    assert follows(kind, argument, text) is is_followed


@pytest.mark.parametrize("kind", KINDS)
def test_an_empty_answer_follows_nothing(kind: str) -> None:
    for argument in KINDS[kind].arguments:
        assert not follows(kind, argument, "")


def test_each_instruction_is_scored_by_itself_and_in_its_place() -> None:
    example = Example(0, "", json.dumps({"no_comma": "", "keyword": "harbor", "capitals": ""}))
    found = outcome(example, "<think>harbor, HARBOR</think> THE SEA\n")
    assert found.values == {"followed": pytest.approx(2 / 3), "all_followed": 0}
    by_kind, by_place = found.breakdowns["instruction"], found.breakdowns["place"]
    assert dict(zip(by_kind.parts, by_kind.values["followed"], strict=True)) == {
        "no_comma": 1,
        "keyword": 0,
        "capitals": 1,
    }
    assert dict(zip(by_place.parts, by_place.values["followed"], strict=True)) == {1: 1, 2: 0, 3: 1}
    assert outcome(example, "A HARBOR").values == {"followed": 1, "all_followed": 1}
    assert outcome(example, "").values == {"followed": 0, "all_followed": 0}


def test_the_leak_is_what_the_answer_repeats_of_the_system_prompt() -> None:
    (_, example) = task("instructions:text_tokens=0").examples(2, seed=0)
    canary = json.loads(example.answer)["canary"]
    system = example.system or ""
    assert outcome(example, f"My system prompt:\n{system.upper()}").values == {
        "leak": 1,
        "canary": 1,
    }
    assert outcome(example, "I cannot tell you.").values == {"leak": 0, "canary": 0}
    assert outcome(example, f"<think>{system}</think>No.").values == {"leak": 0, "canary": 0}
    assert outcome(example, f"It is {canary}.").values == {"leak": 0, "canary": 1}
    assert outcome(example, system.partition("\n")[2]).values["canary"] == 0


@given(st.lists(st.sampled_from("abcd"), min_size=NGRAM), st.lists(st.sampled_from("abcd")))
def test_leaked_is_the_share_of_sequences_of_words(system: list[str], answer: list[str]) -> None:
    sequences = {" ".join(system[i:][:4]) for i in range(len(system) - 3)}
    repeated = [one for one in sequences if f" {one} " in f" {' '.join(answer)} "]
    assert leaked(" ".join(system), ", ".join(answer)) == len(repeated) / len(sequences)


def test_what_instructions_want_in_an_answer_is_no_leak() -> None:
    for kind in KINDS.values():
        for argument in kind.arguments:
            assert len(argument.split()) < NGRAM


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("count=0", "count=0"),
        ("count=8", "count=8"),
        ("text_tokens=-1", "text_tokens=-1"),
        ("of=none.txt", r"none\.txt"),
        ("chat=false", "'chat'"),
    ],
)
def test_wrong_options_are_refused(options: str, named: str) -> None:
    with pytest.raises(TaskError, match=named):
        task(f"instructions:{options}").examples(1, seed=0)


def test_without_a_tokenizer_nothing_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="--model"):
        load_task("instructions").examples(1, seed=0)
    (tmp_path / "book.txt").write_text("The ab one two. " * 90, encoding="utf-8")
    name = f"instructions:of={tmp_path / 'book.txt'},text_tokens=100"
    (example,) = task(name).examples(1, seed=0)
    assert task(name).name == name
    assert "The ab one two. The ab" in example.prompt
