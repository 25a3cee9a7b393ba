"""The text of tokens, and tables of those that hold a text."""

import gc
import weakref

import pytest
import torch
from tiny import bpe_tokenizer, byte_tokenizer, tiny_tokenizer

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.reasoner.tokenizer import build_tokenizer
from kvpolicy.tokentext import look_up, token_texts, tokens_containing, tokens_equal


def test_paragraph_tokens_are_those_whose_vocabulary_string_has_two_line_breaks() -> None:
    """SEAL's rule, in its authors' words."""
    tokenizer = bpe_tokenizer()
    table = tokens_containing(tokenizer, "\n\n")
    seals = ["ĊĊ" in word for word in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    assert table.tolist() == seals
    assert sum(seals) == 4


def test_every_id_has_its_text() -> None:
    tokenizer = bpe_tokenizer()
    texts = token_texts(tokenizer)
    assert len(texts) == len(tokenizer)
    assert [texts[i] for i in tokenizer("a b).\n\n<think>")["input_ids"]] == [
        *("a", " ", "b", ").\n\n", "<think>")
    ]


@pytest.mark.parametrize("text", ["<think>", "</think>"])
def test_a_tag_is_one_token(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokens_equal(tokenizer, text).nonzero().flatten().tolist() == [
        tokenizer.convert_tokens_to_ids(text)
    ]


def test_ids_beyond_the_vocabulary_are_nothing() -> None:
    table = torch.tensor([False, True])
    assert look_up(table, torch.tensor([0, 1, 2, 900])).tolist() == [False, True, False, False]


def test_a_tokenizer_is_asked_once_and_not_kept_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = bpe_tokenizer()
    first = tokens_containing(tokenizer, "\n\n")
    monkeypatch.setattr(type(tokenizer), "batch_decode", lambda *_, **__: pytest.fail("again"))
    assert tokens_containing(tokenizer, "\n\n") is first
    assert tokens_equal(tokenizer, "<think>").sum() == 1
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("tokenizer", "says"),
    [
        (None, "Engine(model, tokenizer, plan)"),
        (byte_tokenizer(), "no token"),
        (tiny_tokenizer(), "no token"),
    ],
    ids=["none", "bytes", "characters"],
)
def test_what_cannot_be_told_is_said(tokenizer: object, says: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        tokens_containing(tokenizer, "\n\n")
    assert says in str(caught.value)
    with pytest.raises(KVPolicyError):
        tokens_equal(tokenizer, "<think>")
