"""One request while it is being served: its tokens, its slot, what it has cost so far."""

import operator
import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from kvpolicy.engine.request import Request
from kvpolicy.engine.results import FinishReason, Result
from kvpolicy.errors import RequestError, error_summary
from kvpolicy.state import SequenceMemory, WaitingRequest

# Tokens decoded beyond the length of the longest stop string, in case some decode to nothing.
_STOP_MARGIN = 8


@attrs.define(eq=False)
class LiveSequence:
    """A request with a valid prompt, from arrival to its result."""

    id: int
    request: Request
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    tokenizer: Any = None
    tokens: list[int] = attrs.field(factory=list)
    memory: SequenceMemory = attrs.field(factory=SequenceMemory)
    num_observed: int = 0
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0
    prefill_s: float = 0.0
    decode_from: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    _cut: int | None = None
    _generator: torch.Generator | None = None

    @property
    def generator(self) -> torch.Generator:
        """Where its randomness comes from; made when it is served, for it takes kilobytes."""
        if self._generator is None:
            self._generator = torch.Generator().manual_seed(self.request.sampling.seed)
        return self._generator

    @property
    def waiting(self) -> WaitingRequest:
        """What `schedule` may know of it."""
        return WaitingRequest(self.id, len(self.prompt), self.max_new_tokens)

    @property
    def longest(self) -> int:
        """Tokens it may have in all."""
        return len(self.prompt) + self.max_new_tokens

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at places ``[start, end)`` of the prompt and what was generated."""
        from_prompt = len(self.prompt)
        generated = self.tokens[max(start - from_prompt, 0) : max(end - from_prompt, 0)]
        return [*self.prompt[start:end], *generated]

    def take(self, token: int) -> None:
        """Add a generated token, and see whether it ends the generation."""
        if not self.tokens:
            self.decode_from = time.perf_counter()
        self.tokens.append(token)
        if token in self.stop_ids or self._meets_stop_string():
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_new_tokens:
            self.finish_reason = "length"

    def fail(self, error: str) -> None:
        """End it, because a policy has failed for it; what has ended already stays as it is."""
        if self.finish_reason is None:
            self.finish_reason, self.error = "error", error

    def _meets_stop_string(self) -> bool:
        if not self.request.stop or self.tokenizer is None:
            return False
        tail = max(map(len, self.request.stop)) + _STOP_MARGIN
        recent = self.tokenizer.decode(self.tokens[-tail:], skip_special_tokens=True)
        if not any(stop in recent for stop in self.request.stop):
            return False
        text = self.text()
        assert text is not None
        found = [text.find(stop) for stop in self.request.stop]
        self._cut = min((place for place in found if place >= 0), default=None)
        return self._cut is not None

    def text(self) -> str | None:
        """The text generated so far, without special tokens, cut before a stop string."""
        if self.tokenizer is None:
            return None
        text: str = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        return text[: self._cut]

    def result(self) -> Result:
        """How it ended."""
        assert self.finish_reason is not None
        return Result(
            id=self.id,
            prompt_len=len(self.prompt),
            tokens=tuple(self.tokens),
            text=self.text(),
            finish_reason=self.finish_reason,
            error=self.error,
            compactions=self.compactions,
            rows_evicted=self.rows_evicted,
            peak_rows=self.peak_rows,
            peak_bytes=self.peak_bytes,
            prefill_s=self.prefill_s,
            decode_s=time.perf_counter() - self.decode_from if self.tokens else 0.0,
        )


def encode(prompt: str | Sequence[int], tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """The token ids of a prompt.

    Raises:
        RequestError: If it is empty, is text without a tokenizer, or is no token id.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            msg = "the prompt is text, but the engine has no tokenizer; give token ids"
            raise RequestError(msg)
        ids = tuple(_tokens_of(prompt, tokenizer))
    elif isinstance(prompt, Iterable) and not isinstance(prompt, bytes):
        ids = tuple(_token_id(token) for token in prompt)
    else:
        msg = f"the prompt is {prompt!r:.60}; text or a list of token ids is wanted"
        raise RequestError(msg)
    if not ids:
        msg = "the prompt is empty; at least one token is needed"
        raise RequestError(msg)
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        msg = f"the prompt holds token id {outside[0]}; the model knows 0 to {vocab_size - 1}"
        raise RequestError(msg)
    return ids


def _tokens_of(text: str, tokenizer: Any) -> list[int]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        letter = text[error.start].encode("unicode_escape").decode()
        msg = f"the prompt holds {letter} at letter {error.start}, which is no text; give UTF-8"
        raise RequestError(msg) from error
    try:
        return list(tokenizer(text)["input_ids"])
    except Exception as error:
        msg = f"the tokenizer cannot take the prompt: {error_summary(error)}; give token ids"
        raise RequestError(msg) from error


def _token_id(token: object) -> int:
    try:
        return operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        msg = f"the prompt holds {token!r:.60}; text or whole token ids are wanted"
        raise RequestError(msg) from None
