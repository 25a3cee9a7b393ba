"""The text of tokens, and tables of those that hold a text."""

import gc
import weakref

import pytest
import torch
from kvpolicy_reasoner.tokenizer import build_tokenizer
from tiny import bpe_tokenizer, byte_tokenizer, tiny_tokenizer
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvpolicy.errors import KVPolicyError
from kvpolicy.toolkit.paragraphs import (
    look_up,
    texts_in_context,
    token_texts,
    tokens_containing,
    tokens_equal,
)


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


@pytest.mark.parametrize("text", ["a b\n", "größer als €", "3 of 🙂🙂 ok", "\ufffd é", ""])
def test_texts_in_context_are_the_text_and_characters_are_said_once_they_are_whole(
    text: str,
) -> None:
    for tokenizer in (byte_tokenizer(), bpe_tokenizer()):
        ids = tokenizer(text)["input_ids"]
        texts = texts_in_context(tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == text
        is_bytes = tokenizer.vocab_size == 256
        assert all(len(one) <= 1 or "\ufffd" in one for one in texts if is_bytes)


def test_texts_in_context_have_the_spaces_that_a_token_alone_has_not() -> None:
    tokenizer = Tokenizer(WordLevel({"▁two": 0, "▁three": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )
    assert token_texts(tokenizer)[1] == "three"
    assert texts_in_context(tokenizer, [0, 2, 1]) == ["two", "s", " three"]


def test_bytes_that_are_no_text_hold_nothing_up() -> None:
    tokenizer = byte_tokenizer()
    half = tokenizer("é")["input_ids"][:1]
    a = tokenizer("a")["input_ids"]
    texts = texts_in_context(tokenizer, [*half * 9, *a])
    assert texts[-1].endswith("a")
    assert "".join(texts) == "\ufffd" * 9 + "a"


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
