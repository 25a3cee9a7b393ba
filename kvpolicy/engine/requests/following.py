"""Tokens of a text that goes on from others.

Tokenizers take every text for the beginning of one: many put a first token before it, and some a
space. In the middle of a text both are wrong.
"""

from collections import abc
from typing import Any

from kvpolicy.engine.requests.detokenize import num_equal

# Texts that are put in front, and whose tokens are then left out.
_IN_FRONT = ("\n", "a", ".")
_CONTEXT = 8  # tokens before the text that are decoded with it


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
