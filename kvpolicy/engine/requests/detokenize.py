"""Text of tokens: decodes those of a generation incrementally."""

from collections import abc
from typing import Any

from kvpolicy.errors import RequestError, error_summary

# Tokenizers decode an incomplete character to the replacement character.
_INCOMPLETE = "\ufffd"


def decode(tokenizer: Any, tokens: abc.Sequence[int]) -> str:
    """The text of tokens, without special tokens.

    Raises:
        RequestError: The tokenizer raises.
    """
    try:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    except Exception as error:
        msg = (
            f"the tokenizer cannot decode the generation: {error_summary(error)}; give the engine "
            "the tokenizer of load_model(NAME), or none"
        )
        raise RequestError(msg) from error
    return text


class TextPieces:
    """Decodes tokens to text, without the end that a later token may still change.

    Only the last few tokens are decoded, together with those before them, because in some
    tokenizers spaces depend on the context.
    """

    def __init__(self, tokenizer: Any, stop: abc.Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # start of the context of undecoded tokens
        self._num_decoded = 0  # tokens whose text is known
        self._held = ""  # known text that may be the start of a stop string
        self._num_sent = 0

    def add(self, tokens: abc.Sequence[int]) -> str:
        """The text that becomes final with these tokens."""
        self._tokens.extend(tokens)
        known = self._decode(self._tokens[self._context : self._num_decoded])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_INCOMPLETE):
            return ""
        self._context, self._num_decoded = self._num_decoded, len(self._tokens)
        self._held += text[len(known) :]
        end = len(self._held) - self._stop_prefix(self._held)
        piece, self._held = self._held[:end], self._held[end:]
        self._num_sent += len(piece)
        return piece

    def rest_of(self, text: str) -> str:
        """The part of the final text that was not returned yet."""
        return text[self._num_sent :]

    def _decode(self, tokens: abc.Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)

    def _stop_prefix(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop string."""
        longest = max(map(len, self._stop), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        ends = (size for size in lengths if any(s.startswith(text[-size:]) for s in self._stop))
        return next(ends, 0)
