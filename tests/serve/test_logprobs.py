"""Log-probabilities in OpenAI's forms, for tokenizers of several kinds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_kinds import KINDS, TURN

from kvpolicy.engine.requests.results import TokenLogprobs
from kvpolicy.serve.logprobs import CompletionLogprobs, chat_logprobs
from kvpolicy.serve.plans import ServedModel

MODELS = {
    kind: ServedModel("m", KINDS[kind](), ())
    for kind in ("byte-level", "Llama", "Llama, no space in front", "Gemma", "unigram")
}
kinds = pytest.mark.parametrize("kind", MODELS)
texts = st.text("abtheing .\n한국🦄🧿", min_size=1, max_size=10)


def tokens_of(model: ServedModel, text: str) -> list[TokenLogprobs]:
    ids = model.tokenizer(text, add_special_tokens=False)["input_ids"]
    return [TokenLogprobs(token, -1.0, ((token, -1.0),)) for token in ids]


def content_of(entries: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(entry["bytes"]) for entry in entries)


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "unigram"])
@given(text=texts)
def test_bytes_of_tokens_join_to_the_text(kind: str, text: str) -> None:
    model = MODELS[kind]
    found = chat_logprobs(model, tokens_of(model, text))["content"]
    # One in front, which the text of an answer lacks.
    in_front = " " if kind == "Llama" and text[0] != " " else ""
    assert content_of(found) == (in_front + text).encode()
    for entry in found:
        (top,) = entry["top_logprobs"]
        assert (top["token"], top["bytes"]) == (entry["token"], entry["bytes"])


@kinds
@given(text=texts, data=st.data())
def test_offsets_say_where_the_character_of_a_token_begins(
    kind: str, text: str, data: st.DataObject
) -> None:
    model = MODELS[kind]
    one, parts = tokens_of(model, text), CompletionLogprobs(model)
    offsets = CompletionLogprobs(model).of(one)["text_offset"]
    cut = data.draw(st.integers(0, len(one)))
    assert parts.of(one[:cut])["text_offset"] + parts.of(one[cut:])["text_offset"] == offsets
    ids = [token.token for token in one]
    before = [model.tokenizer.decode(ids[:n], skip_special_tokens=True) for n in range(len(ids))]
    for number, offset in enumerate(offsets):  # within a character: where its first token begins
        assert offset == max(len(text) for text in before[: number + 1] if "\ufffd" not in text)


def test_of_two_tokens_with_one_text_the_likeliest_counts() -> None:
    model = MODELS["Llama"]
    piece, byte = model.tokenizer.convert_tokens_to_ids(["a", "<0x61>"])
    for first, second in ((piece, byte), (byte, piece)):
        one = TokenLogprobs(second, -4.0, ((first, -0.2), (second, -4.0)))
        found = CompletionLogprobs(model).of([one])
        assert found["top_logprobs"] == [{"a": -0.2}]
        assert (found["tokens"], found["token_logprobs"]) == (["a"], [-4.0])


def test_words_with_and_without_a_space_are_two() -> None:
    model = MODELS["Llama"]
    with_space, without = model.tokenizer.convert_tokens_to_ids(["▁the", "the"])
    one = TokenLogprobs(without, -3.0, ((with_space, -0.1),))
    found = CompletionLogprobs(model).of([one])
    assert found["top_logprobs"] == [{" the": -0.1, "the": -3.0}]


@pytest.mark.parametrize("kind", ["byte-level", "Llama"])
def test_parts_of_a_character_are_told_by_their_bytes(kind: str) -> None:
    model = MODELS[kind]
    one = tokens_of(model, "🦄")[-4:]
    found = CompletionLogprobs(model).of(one)
    assert "".join(text.removeprefix("bytes:") for text in found["tokens"]) == r"\xf0\x9f\xa6\x84"
    assert len(found["top_logprobs"]) == len({*map(str, found["top_logprobs"])})
    in_chat = chat_logprobs(model, one)["content"]
    assert "".join(entry["token"] for entry in in_chat) == r"\xf0\x9f\xa6\x84"


def test_special_tokens_have_their_own_text_and_take_no_place() -> None:
    model = MODELS["byte-level"]
    found = CompletionLogprobs(model).of(tokens_of(model, f"ab{TURN}the"))
    assert found["tokens"] == ["ab", TURN, "the"]
    assert found["text_offset"] == [0, 2, 2]


def test_infinity_is_a_number_of_json() -> None:
    found = CompletionLogprobs(MODELS["unigram"]).of([TokenLogprobs(5, -float("inf"))])
    assert found["token_logprobs"] == [-9999.0]
