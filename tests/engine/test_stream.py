"""Streaming: the pieces are the text, none is taken back, and none shows half a character."""

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts, seeds
from tiny import byte_tokenizer, greedy_tokens, shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Sampling
from kvpolicy.engine.stream import TextPieces

TOKENIZER = tiny_tokenizer()
BYTES = byte_tokenizer()


def engine(**options: Any) -> Engine:
    return Engine(shared_model(), plan=Plan.uniform("full"), **options)


@given(prompts(count=1), st.integers(1, 12))
def test_the_pieces_of_a_stream_are_the_tokens_of_its_result(
    prompts: list[list[int]], length: int
) -> None:
    stream = engine().stream(prompts[0], max_new_tokens=length)
    pieces = list(stream)
    assert pieces == greedy_tokens(shared_model(), prompts[0], length)
    assert stream.result.tokens == tuple(pieces)


@pytest.mark.parametrize("length", [1, 5, 16])
def test_the_pieces_of_a_text_stream_are_its_text(length: int) -> None:
    stream = engine(tokenizer=TOKENIZER).stream("what is 2+2?", max_new_tokens=length)
    assert "".join(stream) == stream.result.text


@pytest.mark.parametrize("start", [1, 4, 9])
def test_a_stream_never_shows_the_start_of_a_stop_string_that_comes(start: int) -> None:
    bound = engine(tokenizer=TOKENIZER)
    (plain,) = bound.generate(["what is 2+2?"], max_new_tokens=16).results()
    stop = plain.text[start : start + 4]
    stream = bound.stream("what is 2+2?", max_new_tokens=16, stop=[stop])
    shown = ""
    for piece in stream:
        shown += piece
        assert plain.text[: plain.text.index(stop)].startswith(shown)
    assert shown == stream.result.text == plain.text[: plain.text.index(stop)]


def test_a_held_back_start_of_a_stop_string_is_shown_if_it_does_not_come() -> None:
    bound = engine(tokenizer=TOKENIZER)
    (plain,) = bound.generate(["what is 2+2?"], max_new_tokens=16).results()
    never = plain.text[3:5] + "\n\n\n"
    stream = bound.stream("what is 2+2?", max_new_tokens=16, stop=[never])
    assert "".join(stream) == plain.text


def test_a_cancelled_stream_ends() -> None:
    stream = engine().stream([1, 2], max_new_tokens=50)
    shown = []
    for piece in stream:
        shown.append(piece)
        if len(shown) == 3:
            stream.cancel()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == tuple(shown)


def test_a_stream_of_a_bad_prompt_ends_with_its_error() -> None:
    stream = engine().stream([])
    assert list(stream) == []
    assert stream.result.finish_reason == "error"


# --- characters in pieces -------------------------------------------------------------------


@given(st.text(max_size=12))
def test_no_piece_shows_half_a_character(text: str) -> None:
    pieces, shown = TextPieces(BYTES, []), []
    for token in BYTES(text)["input_ids"]:
        shown.append(pieces.add([token]))
        assert text.startswith("".join(shown))
    assert "".join(shown) + pieces.rest_of(text) == text


@given(st.text(min_size=1, max_size=12), st.data())
def test_whatever_comes_at_once_the_pieces_are_the_text(text: str, data: st.DataObject) -> None:
    pieces, shown = TextPieces(BYTES, [text[-1] + "never"]), ""
    tokens = BYTES(text)["input_ids"]
    while tokens:
        num = data.draw(st.integers(1, len(tokens)))
        shown += pieces.add(tokens[:num])
        tokens = tokens[num:]
    assert shown + pieces.rest_of(text) == text


@given(seeds)
def test_bytes_that_are_no_text_come_out_as_in_the_result(seed: int) -> None:
    bound = Engine(tiny_model(vocab=256, num_layers=1), BYTES, Plan.uniform("full"))
    how = Sampling(temperature=2.0, seed=seed)
    stream = bound.stream("na\u00efve", max_new_tokens=24, sampling=how)
    assert "".join(stream) == stream.result.text == BYTES.decode(stream.result.tokens)


def test_of_two_stop_strings_in_one_token_the_text_ends_before_the_first() -> None:
    (plain,) = engine(tokenizer=TOKENIZER).generate(["a=1"], max_new_tokens=40).results()
    token = re.search(r"<\d\d>", plain.text).group()
    cut = plain.text.index(token)
    for stop in ([token[2:], token[:2]], [token[:2], token[2:]]):
        stream = engine(tokenizer=TOKENIZER).stream("a=1", max_new_tokens=40, stop=stop)
        assert "".join(stream) == stream.result.text == plain.text[:cut]
