"""Token ids of a prompt: one that begins a text, and one that goes on from other tokens.

Tokenizers take every text for the beginning of one: many put a first token before it, and some a
space. In the middle of a text both are wrong.
"""

import operator
from collections import abc
from typing import Any

import numpy as np

from kvpolicy.engine.requests.detokenize import num_equal
from kvpolicy.errors import RequestError, error_summary

# Texts that are put in front, and whose tokens are then left out.
_IN_FRONT = ("\n", "a", ".")
_CONTEXT = 8  # tokens before the text that are decoded with it


def encode(
    prompt: str | abc.Sequence[int],
    tokenizer: Any,
    vocab_size: int,
    before: abc.Sequence[int] = (),
) -> tuple[int, ...]:
    """The token ids of a prompt.

    Args:
        prompt: Text or token ids.
        tokenizer: Encodes text; there may be none.
        vocab_size: Token ids are below this.
        before: Tokens that a text goes on from; none: it begins one.

    Raises:
        RequestError: If it is empty, is text and there is no tokenizer, or has no valid token ids.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            msg = "the prompt is text, but the engine has no tokenizer; give token ids"
            raise RequestError(msg)
        ids = tuple(_tokens_of(prompt, tokenizer, before))
    elif isinstance(prompt, abc.Iterable) and not isinstance(prompt, bytes):
        ids = _token_ids(prompt)
    else:
        msg = f"the prompt is {prompt!r:.60}; expected text or a list of token ids"
        raise RequestError(msg)
    if not ids:
        is_unknown = isinstance(prompt, str) and prompt
        what = "has no text that the tokenizer knows" if is_unknown else "is empty"
        msg = f"the prompt {what}; at least one token is needed"
        raise RequestError(msg)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        msg = f"the prompt holds token id {outside[0]}; expected 0 to {vocab_size - 1}"
        if isinstance(prompt, str):
            msg = (
                f"the tokenizer gives token id {outside[0]}, and the model has 0 to "
                f"{vocab_size - 1}; give the engine the tokenizer of this model, or call "
                "model.resize_token_embeddings(len(tokenizer)), with packed weights before they "
                "are packed"
            )
        raise RequestError(msg)
    return ids


def following(tokenizer: Any, before: abc.Sequence[int], text: str) -> list[int]:
    """The tokens of a text that follows other tokens.

    Decoded after them, they give the text, unless it has letters that the tokenizer does not know.

    Args:
        tokenizer: The tokenizer.
        before: The tokens that it follows; only the last ones are looked at.
        text: The text.
    """
    context = list(before[-_CONTEXT:])
    wanted = tokenizer.decode(context, skip_special_tokens=False) + text
    best, most = [], -1
    for ids in _ways(tokenizer, text):
        joined = tokenizer.decode([*context, *ids], skip_special_tokens=False)
        if joined == wanted:
            return ids
        num_right = num_equal(joined, wanted)
        if num_right > most:
            best, most = ids, num_right
    return best


def _ways(tokenizer: Any, text: str) -> abc.Iterator[list[int]]:
    """Tokens of the text by itself, and those of it in the middle of another text."""
    yield _plain(tokenizer, text)
    for front in _IN_FRONT:
        first, both = _plain(tokenizer, front), _plain(tokenizer, front + text)
        if both[: len(first)] == first:  # not grown together
            yield both[len(first) :]


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _tokens_of(text: str, tokenizer: Any, before: abc.Sequence[int]) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        letter = text[error.start].encode("unicode_escape").decode()
        msg = (
            f"the prompt holds {letter} at character {error.start}, which is not valid text; "
            "give UTF-8"
        )
        raise RequestError(msg) from error
    try:
        return following(tokenizer, before, text) if before else list(tokenizer(text)["input_ids"])
    except Exception as error:
        msg = f"the tokenizer cannot encode the prompt: {error_summary(error)}; give token ids"
        raise RequestError(msg) from error


def _token_ids(prompt: abc.Iterable[object]) -> tuple[int, ...]:
    try:
        return tuple(_token_id(token) for token in prompt)
    except RequestError:
        raise
    except Exception as error:  # a tensor without dimensions or values, a generator that fails
        msg = f"the prompt cannot be read: {error_summary(error)}; give a list of token ids"
        raise RequestError(msg) from error


def _token_id(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        msg = f"the prompt holds {token!r:.60}; expected text or integer token ids"
        if np.ndim(token) > 0:  # type: ignore[arg-type]
            msg = (
                "the prompt is a batch of rows, and one row of token ids was expected; give one, "
                "such as input_ids[0]"
            )
        raise RequestError(msg) from None
