"""A text that goes on from others gets neither a first token nor a space of its own."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import r1_tokenizer, tiny_model
from tokenizer_kinds import KINDS, TURN

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.requests.encoding import following

EXACT = ["byte-level", "Llama", "Llama, no space in front", "Gemma"]
texts = st.text("abtheing .\né한국🦄", min_size=1, max_size=10)


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


@pytest.mark.parametrize("kind", EXACT)
@given(first=texts, second=texts)
def test_the_text_is_the_one_that_was_given(kind: str, first: str, second: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = tokenizer(first)["input_ids"]
    both = [*before, *following(tokenizer, before, second)]
    assert tokenizer.decode(both) == tokenizer.decode(before) + second


@pytest.mark.parametrize("kind", ["unigram", "WordPiece"])
def test_words_go_on_where_the_tokenizer_can_say_so(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = tokenizer("go")["input_ids"]
    decode = tokenizer.decode
    assert decode([*before, *following(tokenizer, before, "ing")]) == "going"
    assert decode([*before, *following(tokenizer, before, " the")]) == "go the"


@pytest.mark.parametrize("kind", EXACT)
def test_a_special_token_in_the_text_is_one(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    before = tokenizer("one")["input_ids"]
    found = following(tokenizer, before, f"{TURN}two")
    assert found[0] == tokenizer.convert_tokens_to_ids(TURN)


def test_a_turn_after_a_snapshot_has_no_first_token() -> None:
    tokenizer = r1_tokenizer()
    engine = Engine(tiny_model(num_layers=1, vocab=len(tokenizer)), tokenizer, Plan.uniform("full"))
    (first,) = engine.generate([Request("ab", 5, stop_ids=(), snapshot=True)]).results()
    assert first.prompt_len == 3
    plain = tokenizer(" and?", add_special_tokens=False)["input_ids"]
    turns = [Request(turn, 5, stop_ids=(), resume=first.snapshot) for turn in (" and?", plain)]
    text, ids = engine.generate(turns).results()
    assert text.prompt_len == ids.prompt_len == len(" and?")
    assert text.tokens == ids.tokens
