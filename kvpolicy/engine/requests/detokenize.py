"""Text of tokens: decodes those of a generation incrementally."""

import re
from collections import abc
from typing import Any

from kvpolicy.engine.requests.stop_strings import StopStrings
from kvpolicy.errors import RequestError, error_summary

# Tokenizers decode an incomplete character to the replacement character.
_INCOMPLETE = "\ufffd"
# What tokenizers with byte fallback call the tokens of single bytes.
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
# Tokens that are decoded together: those before the new one give it its spaces.
_LONGEST_WINDOW, _CONTEXT = 16, 4
# Cleaning up looks so many characters back for a space or an apostrophe to remove.
_CLEANED_UP, _REMOVED = 3, " '"


def decode(tokenizer: Any, tokens: abc.Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """The text of tokens.

    Raises:
        RequestError: The tokenizer raises.
    """
    try:
        text: str = tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
    except Exception as error:
        msg = (
            f"the tokenizer cannot decode the generation: {error_summary(error)}; give the engine "
            "the tokenizer of load_model(NAME), or none"
        )
        raise RequestError(msg) from error
    return text


def decode_after(tokenizer: Any, before: abc.Sequence[int], tokens: abc.Sequence[int]) -> str:
    """The text that tokens add to the text of those before them, special tokens included.

    Args:
        tokenizer: Decodes them.
        before: The tokens before; only the last ones are looked at, bytes with all bytes before
            them: without the first, tokenizers with byte fallback take none of them for characters.
        tokens: The tokens.

    Raises:
        RequestError: The tokenizer raises.
    """
    start = max(len(before) - _CONTEXT, 0)
    while start and is_byte(tokenizer, before[start]):
        start -= 1
    context = list(before[start:])
    shown = decode(tokenizer, context, skip_special_tokens=False)
    whole = decode(tokenizer, [*context, *tokens], skip_special_tokens=False)
    return whole[num_equal(shown, whole) :]


def is_byte(tokenizer: Any, token: int) -> bool:
    """Whether a token is a single byte of a tokenizer with byte fallback."""
    name_of = getattr(tokenizer, "convert_ids_to_tokens", None)
    name = None if name_of is None else name_of(token)
    return isinstance(name, str) and BYTE_TOKEN.fullmatch(name) is not None


def num_equal(one: str, other: str) -> int:
    """Characters with which both texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


class TextDecoder:
    """The text of tokens that come one after another: at any time that of decoding all of them.

    Only a window of the last tokens is decoded, as what a token adds may depend on those before it:
    the first token of a text may lose a space, a word may get one. Special tokens, which are not
    part of the text, are no part of the window either.

    Attributes:
        final: The text that no later token changes.
        tail: The text after it. A character may be incomplete. The bytes of a tokenizer with byte
            fallback all become replacement characters if one of them fits no character.
        special: The special tokens so far: each with its place in the text, and its own text.
    """

    def __init__(self, tokenizer: Any, tokens: abc.Iterable[int] = ()) -> None:
        """Begin with some tokens.

        Args:
            tokenizer: Decodes them.
            tokens: The first tokens.

        Raises:
            RequestError: The tokenizer raises.
        """
        self.final, self.tail = "", ""
        self.special: list[tuple[int, str]] = []
        self._tokenizer = tokenizer
        self._cleans_up = _cleans_up(tokenizer)
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_final = 0  # characters of it that are final
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        """The length of the text."""
        return len(self.final) + len(self.tail)

    @property
    def num_complete(self) -> int:
        """Characters of the text, without an incomplete one at its end."""
        return len(self.final) + len(self.tail.rstrip(_INCOMPLETE))

    def add(self, token: int) -> None:
        """Add a token.

        Raises:
            RequestError: The tokenizer raises.
        """
        text, before = self._decode([*self._window, token]), self._text
        if text == before and (hidden := self._hidden_text(token)):
            self.special.append((len(self), hidden))
            return
        self._window.append(token)
        self._text = text
        if not is_byte(self._tokenizer, token):
            num_final = max(self._stable_length(text), self._num_final)
            self.final += text[self._num_final : num_final]
            self._num_final = num_final
        self.tail = text[self._num_final :]
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten(len(before))

    def _decode(self, tokens: abc.Sequence[int]) -> str:
        return decode(self._tokenizer, tokens)

    def _hidden_text(self, token: int) -> str:
        """The text of a special token; empty if it is none."""
        shown = decode(self._tokenizer, [token], skip_special_tokens=False)
        return shown if shown and not self._decode([token]) else ""

    def _stable_length(self, text: str) -> int:
        """The length of the part of the window's text that later tokens do not change."""
        end = len(text) - text.endswith(_INCOMPLETE)
        if self._cleans_up:
            while end and any(char in _REMOVED for char in text[max(end - _CLEANED_UP, 0) : end]):
                end -= 1
        return end

    def _shorten(self, len_before: int) -> None:
        """Drop the first tokens of the window, if its text is final up to one of the last two.

        Args:
            len_before: The length of the text without the last token.
        """
        if self._num_final == len(self._text):
            num_kept, after = len(self._window), 0
        elif self._num_final >= len_before:
            num_kept, after = len(self._window) - 1, self._num_final - len_before
        else:
            return
        first = num_kept - _CONTEXT
        context = self._decode(self._window[first:num_kept])
        if context:  # or else the next token would count as the first of a text
            self._window = self._window[first:]
            self._text = self._decode(self._window)
            self._num_final = len(context) + after


def _cleans_up(tokenizer: Any) -> bool:
    """Whether decoding removes spaces before punctuation, which may be spaces of another token."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    # transformers has this setting since it leaves the text of such models as it is.
    forced = getattr(
        tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", True
    )
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    return forced or type(model).__name__ != "BPE"


class TextPieces:
    """Decodes tokens to pieces of text that join to the text of the result.

    The end of the text that a later token may still change is held back, and so is what may be the
    beginning of a stop string.
    """

    def __init__(
        self, tokenizer: Any, stop: abc.Sequence[str], continued: abc.Iterable[int] = ()
    ) -> None:
        """Begin with the next token.

        Args:
            tokenizer: Decodes tokens.
            stop: The stop strings.
            continued: Tokens of the answer that goes on.
        """
        self._decoder = TextDecoder(tokenizer, continued)
        self._stop = StopStrings(stop)
        self._before = self._sent = self._decoder.num_complete

    def add(self, tokens: abc.Iterable[int]) -> str:
        """The text that becomes final with these tokens.

        Raises:
            RequestError: The tokenizer raises.
        """
        decoder = self._decoder
        for token in tokens:
            decoder.add(token)
        end = max(self._stop.held_from(decoder), self._sent)
        piece, self._sent = decoder.final[self._sent : end], end
        return piece

    def rest_of(self, text: str) -> str:
        """The part of the final text that was not returned yet."""
        return text[self._sent - self._before :]
