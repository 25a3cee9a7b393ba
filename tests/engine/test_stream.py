"""Streaming: pieces join to the result and never contain a partial character."""

import re
from typing import Any

import pytest
from forwards import shapes_of_forwards
from hypothesis import given
from hypothesis import strategies as st
from strategies import prompts, seeds
from tiny import byte_tokenizer, greedy_tokens, shared_model, tiny_model, tiny_tokenizer

from kvpolicy import Engine, Plan, Sampling
from kvpolicy.engine.requests.detokenize import TextPieces

TOKENIZER = tiny_tokenizer()
BYTES = byte_tokenizer()


def engine(**options: Any) -> Engine:
    return Engine(shared_model(), plan=Plan.uniform("full"), **options)


@given(prompts(count=1), st.integers(1, 12))
def test_stream_pieces_equal_result_tokens(prompts: list[list[int]], length: int) -> None:
    stream = engine().stream(prompts[0], max_new_tokens=length)
    pieces = list(stream)
    assert pieces == greedy_tokens(shared_model(), prompts[0], length)
    assert stream.result.tokens == tuple(pieces)


def test_first_piece_needs_the_forward_of_the_prompt_only() -> None:
    model = tiny_model()
    shapes = shapes_of_forwards(model)
    stream = Engine(model, plan=Plan.uniform("full")).stream([1, 2, 3], max_new_tokens=5)
    before = len(shapes)
    next(iter(stream))
    assert shapes[before:] == [(1, 3)]


@pytest.mark.parametrize("length", [1, 5, 16])
def test_text_stream_pieces_join_to_result_text(length: int) -> None:
    stream = engine(tokenizer=TOKENIZER).stream("what is 2+2?", max_new_tokens=length)
    assert "".join(stream) == stream.result.text


@pytest.mark.parametrize("start", [1, 4, 9])
def test_stream_never_yields_a_prefix_of_a_stop_string(start: int) -> None:
    text_engine = engine(tokenizer=TOKENIZER)
    (plain,) = text_engine.generate(["what is 2+2?"], max_new_tokens=16).results()
    stop = plain.text[start : start + 4]
    stream = text_engine.stream("what is 2+2?", max_new_tokens=16, stop=[stop])
    streamed = ""
    for piece in stream:
        streamed += piece
        assert plain.text[: plain.text.index(stop)].startswith(streamed)
    assert streamed == stream.result.text == plain.text[: plain.text.index(stop)]


def test_held_back_prefix_is_yielded_if_the_stop_string_does_not_follow() -> None:
    text_engine = engine(tokenizer=TOKENIZER)
    (plain,) = text_engine.generate(["what is 2+2?"], max_new_tokens=16).results()
    never = plain.text[3:5] + "\n\n\n"
    stream = text_engine.stream("what is 2+2?", max_new_tokens=16, stop=[never])
    assert "".join(stream) == plain.text


def test_cancelled_stream_ends() -> None:
    stream = engine().stream([1, 2], max_new_tokens=50)
    streamed = []
    for piece in stream:
        streamed.append(piece)
        if len(streamed) == 3:
            stream.cancel()
    assert stream.result.finish_reason == "cancelled"
    assert stream.result.tokens == tuple(streamed)


def test_stream_of_a_bad_prompt_ends_with_an_error_result() -> None:
    stream = engine().stream([])
    assert list(stream) == []
    assert stream.result.finish_reason == "error"


# --- characters in pieces -------------------------------------------------------------------


@given(st.text(max_size=12))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    pieces, streamed = TextPieces(BYTES, []), []
    for token in BYTES(text)["input_ids"]:
        streamed.append(pieces.add([token]))
        assert text.startswith("".join(streamed))
    assert "".join(streamed) + pieces.rest_of(text) == text


@given(st.text(min_size=1, max_size=12), st.data())
def test_pieces_join_to_the_text_for_any_token_grouping(text: str, data: st.DataObject) -> None:
    pieces, streamed = TextPieces(BYTES, [text[-1] + "never"]), ""
    tokens = BYTES(text)["input_ids"]
    while tokens:
        num = data.draw(st.integers(1, len(tokens)))
        streamed += pieces.add(tokens[:num])
        tokens = tokens[num:]
    assert streamed + pieces.rest_of(text) == text


@given(seeds)
def test_invalid_utf8_streams_as_in_the_result(seed: int) -> None:
    text_engine = Engine(tiny_model(vocab=256, num_layers=1), BYTES, Plan.uniform("full"))
    sampling = Sampling(temperature=2.0, seed=seed)
    stream = text_engine.stream("na\u00efve", max_new_tokens=24, sampling=sampling)
    assert "".join(stream) == stream.result.text == BYTES.decode(stream.result.tokens)


def test_text_ends_before_the_first_of_two_stop_strings_in_one_token() -> None:
    (plain,) = engine(tokenizer=TOKENIZER).generate(["a=1"], max_new_tokens=40).results()
    token = re.search(r"<\d\d>", plain.text).group()
    cut = plain.text.index(token)
    for stop in ([token[2:], token[:2]], [token[:2], token[2:]]):
        stream = engine(tokenizer=TOKENIZER).stream("a=1", max_new_tokens=40, stop=stop)
        assert "".join(stream) == stream.result.text == plain.text[:cut]
