"""Token texts, and tables of the tokens that contain a text."""

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


def test_paragraph_tokens_contain_two_line_breaks() -> None:
    """The rule of SEAL's authors."""
    tokenizer = bpe_tokenizer()
    table = tokens_containing(tokenizer, "\n\n")
    seals = ["ĊĊ" in word for word in tokenizer.convert_ids_to_tokens(range(len(tokenizer)))]
    assert table.tolist() == seals
    assert sum(seals) == 4


def test_token_texts_has_a_text_for_every_id() -> None:
    tokenizer = bpe_tokenizer()
    texts = token_texts(tokenizer)
    assert len(texts) == len(tokenizer)
    assert [texts[i] for i in tokenizer("a b).\n\n<think>")["input_ids"]] == [
        *("a", " ", "b", ").\n\n", "<think>")
    ]


@pytest.mark.parametrize("text", ["a b\n", "größer als €", "3 of 🙂🙂 ok", "\ufffd é", ""])
def test_texts_in_context_join_to_the_text_without_partial_characters(
    text: str,
) -> None:
    for tokenizer in (byte_tokenizer(), bpe_tokenizer()):
        ids = tokenizer(text)["input_ids"]
        texts = texts_in_context(tokenizer, ids)
        assert len(texts) == len(ids)
        assert "".join(texts) == text
        is_bytes = tokenizer.vocab_size == 256
        assert all(len(one) <= 1 or "\ufffd" in one for one in texts if is_bytes)


def test_texts_in_context_include_leading_spaces() -> None:
    tokenizer = Tokenizer(WordLevel({"▁two": 0, "▁three": 1, "s": 2}, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False
    )
    assert token_texts(tokenizer)[1] == "three"
    assert texts_in_context(tokenizer, [0, 2, 1]) == ["two", "s", " three"]


def test_texts_in_context_replace_invalid_utf8() -> None:
    tokenizer = byte_tokenizer()
    half = tokenizer("é")["input_ids"][:1]
    a = tokenizer("a")["input_ids"]
    texts = texts_in_context(tokenizer, [*half * 9, *a])
    assert texts[-1].endswith("a")
    assert "".join(texts) == "\ufffd" * 9 + "a"


@pytest.mark.parametrize("text", ["<think>", "</think>"])
def test_think_tag_is_one_token(text: str) -> None:
    tokenizer = build_tokenizer()
    assert tokens_equal(tokenizer, text).nonzero().flatten().tolist() == [
        tokenizer.convert_tokens_to_ids(text)
    ]


def test_look_up_is_false_beyond_the_vocabulary() -> None:
    table = torch.tensor([False, True])
    assert look_up(table, torch.tensor([0, 1, 2, 900])).tolist() == [False, True, False, False]


def test_token_tables_are_cached_without_keeping_the_tokenizer_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    ("tokenizer", "message"),
    [
        (None, "Engine(model, tokenizer, plan)"),
        (byte_tokenizer(), "token"),
        (tiny_tokenizer(), "token"),
    ],
    ids=["none", "bytes", "characters"],
)
def test_missing_or_unsuitable_tokenizer_raises(tokenizer: object, message: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        tokens_containing(tokenizer, "\n\n")
    assert message in str(caught.value)
    with pytest.raises(KVPolicyError):
        tokens_equal(tokenizer, "<think>")
