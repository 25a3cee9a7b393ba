"""Texts, pieces of streams and stop strings are those of decoding all tokens at once."""

from functools import cache
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiny import tiny_model
from tokenizer_kinds import BEGIN, END, KINDS, TOOL, TURN

from kvpolicy import Engine, Plan, Request
from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.detokenize import TextDecoder, TextPieces, decode_after
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.sampler import teacher_forced

ALPHABET = "abdeginostw .,'\né한국日본🦄🧿\ufffd"
BROKEN = "\ufffd"
kinds = pytest.mark.parametrize("kind", KINDS)
texts = st.lists(
    st.one_of(
        st.text(ALPHABET, min_size=1, max_size=8),
        st.sampled_from([" the ", "one two", " ing", " don't", " ' ", TURN, BEGIN, END, TOOL]),
    ),
    max_size=6,
).map("".join)


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


@st.composite
def token_lists(draw: st.DrawFn, kind: str) -> list[int]:
    """Tokens of a text, some in another order or of no text at all."""
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(draw(texts), add_special_tokens=False)["input_ids"]
    others = draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=12))
    where = draw(st.integers(0, len(tokens)))
    return [*tokens[:where], *others, *tokens[where:]]


def decoded(tokenizer: Any, tokens: list[int], **options: Any) -> str:
    return tokenizer.decode(tokens, **{"skip_special_tokens": True, **options})


def served(tokenizer: Any, tokens: list[int], **options: Any) -> Sequence:
    """A sequence that is given tokens until it stops."""
    request = Request("x", len(tokens) + 1, stop_ids=(), **options)
    one = Sequence(0, request, (1,), len(tokens) + 1, frozenset(), tokenizer)
    for token in tokens:
        if one.finish_reason is None:
            one.take([token])
    return one


def first_stop(text: str, stops: list[str]) -> tuple[str, str] | None:
    """The stop string that ends first, after the text before it; letter by letter."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return None


@kinds
@given(data=st.data())
def test_text_is_that_of_all_tokens_at_any_time(kind: str, data: st.DataObject) -> None:
    tokenizer, tokens = tokenizer_of(kind), data.draw(token_lists(kind))
    decoder, final = TextDecoder(tokenizer), []
    for number, token in enumerate(tokens):
        decoder.add(token)
        assert decoder.final + decoder.tail == decoded(tokenizer, tokens[: number + 1])
        final.append(decoder.final)
    whole = decoded(tokenizer, tokens)
    assert all(whole.startswith(one) for one in final)


@kinds
@given(data=st.data())
def test_text_after_other_tokens_is_what_they_add(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(data.draw(texts), add_special_tokens=False)["input_ids"]
    number = data.draw(st.integers(0, len(tokens)))
    before = decoded(tokenizer, tokens[:number], skip_special_tokens=False)
    whole = decoded(tokenizer, tokens, skip_special_tokens=False)
    if whole.startswith(before):  # no part of a character, and nothing that is cleaned up
        added = decode_after(tokenizer, tokens[:number], tokens[number:])
        assert before + added == whole


def test_text_after_bytes_of_many_characters_is_what_tokens_add() -> None:
    tokenizer = tokenizer_of("Llama")
    tokens = tokenizer("본본본본", add_special_tokens=False)["input_ids"]
    assert len(tokens) >= 12
    assert decode_after(tokenizer, tokens[:-3], tokens[-3:]) == "본"


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "WordPiece", "BPE with suffixes"])
@given(data=st.data())
def test_text_of_many_tokens_needs_a_few_of_them_at_a_time(kind: str, data: st.DataObject) -> None:
    class Watched:
        def __init__(self) -> None:
            self.most = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        def decode(self, tokens: list[int], **options: Any) -> str:
            self.most = max(self.most, len(tokens))
            return tokenizer.decode(tokens, **options)

    tokenizer, watched = tokenizer_of(kind), Watched()
    words = data.draw(st.lists(st.sampled_from(["the", " one", "\n", ", ", BROKEN]), min_size=1))
    tokens = (tokenizer("".join(words), add_special_tokens=False)["input_ids"] * 80)[:80]
    decoder = TextDecoder(watched, tokens)
    assert decoder.final + decoder.tail == decoded(tokenizer, tokens)
    assert watched.most < 32


@kinds
@given(data=st.data())
def test_pieces_join_to_the_text_before_the_first_stop_string(
    kind: str, data: st.DataObject
) -> None:
    tokenizer, tokens = tokenizer_of(kind), data.draw(token_lists(kind))
    whole = decoded(tokenizer, tokens)
    begin = data.draw(st.integers(0, len(whole)))
    stops = [whole[begin : begin + data.draw(st.integers(1, 6))] or "#", "the", BROKEN + "never"]
    includes = data.draw(st.booleans())
    one = served(tokenizer, tokens, stop=stops, include_stop=includes)
    prefixes = (decoded(tokenizer, tokens[:n]) for n in range(len(tokens) + 1))
    cuts = (cut for cut in (first_stop(text, stops) for text in prefixes) if cut is not None)
    expected = next(cuts, None)
    assert (one.finish_reason == "stop") == (expected is not None)
    cut, stop = expected or (whole, "")
    assert one.text() == cut + stop * includes
    pieces, sent, rest = TextPieces(tokenizer, stops), "", [*one.tokens]
    last = [rest.pop()] if expected is not None else []  # comes with the result
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        sent, rest = sent + pieces.add(rest[:size]), rest[size:]
    assert sent + pieces.rest_of(one.text() or "") == one.text()
    assert last == one.tokens[len(one.tokens) - len(last) :]


@kinds
@given(data=st.data())
def test_stop_string_is_found_with_the_token_that_completes_it(
    kind: str, data: st.DataObject
) -> None:
    tokenizer, tokens = tokenizer_of(kind), data.draw(token_lists(kind))
    whole = decoded(tokenizer, tokens)
    begin = data.draw(st.integers(0, max(len(whole) - 1, 0)))
    stop = whole[begin : begin + data.draw(st.integers(1, 12))]
    if not stop:
        return
    texts = [decoded(tokenizer, tokens[:n]) for n in range(len(tokens) + 1)]
    completing = next(n for n, text in enumerate(texts) if stop in text)
    one = served(tokenizer, tokens, stop=stop)
    assert (one.finish_reason, len(one.tokens)) == ("stop", completing)


@given(data=st.data())
def test_stop_string_may_have_special_tokens(data: st.DataObject) -> None:
    tokenizer, tokens = tokenizer_of("byte-level"), data.draw(token_lists("byte-level"))
    spelled = decoded(tokenizer, tokens, skip_special_tokens=False)
    special = data.draw(st.sampled_from([TURN, BEGIN, END]))
    if special not in spelled or BROKEN in spelled:
        return
    begin = spelled.index(special)
    before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    stop = spelled[max(begin - before, 0) : begin + len(special) + after]
    texts = (decoded(tokenizer, tokens[:n], skip_special_tokens=False) for n in range(999))
    completing = next(n for n, text in enumerate(texts) if stop in text)
    one = served(tokenizer, tokens, stop=stop)
    assert (one.finish_reason, len(one.tokens)) == ("stop", completing)
    cut = tokenizer(spelled[: spelled.index(stop)], add_special_tokens=False)["input_ids"]
    assert one.text() == decoded(tokenizer, cut)


@kinds
def test_special_token_stops_a_generation(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    tokens = tokenizer(f"one two{TURN}", add_special_tokens=False)["input_ids"]
    one = served(tokenizer, [*tokens, 5], stop=TURN)
    assert (one.finish_reason, one.tokens) == ("stop", tokens)
    assert one.text() == decoded(tokenizer, tokens)
    assert served(tokenizer, tokens, stop=TURN, include_stop=True).text() == f"{one.text()}{TURN}"
    within = TURN.strip("<|>")  # a part of its name is no text
    assert served(tokenizer, [*tokens, 5], stop=within).finish_reason is None


@pytest.mark.parametrize("kind", ["byte-level", "Llama", "Llama, no space in front", "Gemma"])
@given(data=st.data())
def test_text_that_goes_on_has_all_letters(kind: str, data: st.DataObject) -> None:
    tokenizer, text = tokenizer_of(kind), data.draw(texts)
    assume(BROKEN not in text)  # it could not be told from a part of a letter below
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    cut = data.draw(st.integers(0, len(tokens)))
    pieces = TextPieces(tokenizer, (), tokens[:cut])
    rest = Sequence(0, Request(), (1,), 99, frozenset(), tokenizer, num_before=cut)
    rest.tokens = tokens
    before = decoded(tokenizer, tokens[:cut]).rstrip(BROKEN)
    assert before + (rest.text() or "") == decoded(tokenizer, tokens)
    assert pieces.add(tokens[cut:]) + pieces.rest_of(rest.text() or "") == rest.text()


@pytest.mark.parametrize("kind", ["byte-level", "unigram", "WordPiece", "BPE with suffixes"])
@given(data=st.data())
def test_a_letter_leaves_with_its_last_token(kind: str, data: st.DataObject) -> None:
    tokenizer, text = tokenizer_of(kind), data.draw(texts)
    decoder = TextDecoder(tokenizer)
    for token in tokenizer(text)["input_ids"]:
        decoder.add(token)
        assert decoder.tail in ("", BROKEN)


@pytest.mark.parametrize("kind", ["byte-level", "Llama"])
def test_engine_streams_what_it_answers(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = f"one two{TURN} the ing 한국 🦄{END} the"
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    model = tiny_model(num_layers=1, vocab=len(tokenizer))
    engine = Engine(model, tokenizer, Plan.uniform("full"))

    def sampler(sequences: Any, logits: Any) -> Any:
        return teacher_forced([tokens[len(seq.tokens)] for seq in sequences], logits)

    requests = [Request([5], len(tokens), stop_ids=()), Request([5], 99, stop=("🦄", TURN + "#"))]
    plain, stopped = Run(engine, requests, sampler).results()
    assert plain.text == decoded(tokenizer, tokens) == "one two the ing 한국 🦄 the"
    assert (stopped.text, stopped.finish_reason) == ("one two the ing 한국 ", "stop")
