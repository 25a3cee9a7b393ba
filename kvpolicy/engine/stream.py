"""One generation, piece by piece."""

from collections.abc import Iterator, Sequence
from typing import Any

from kvpolicy.engine.results import Result, RunReport
from kvpolicy.engine.run import Run

# What a tokenizer shows for a character whose bytes are not all there yet.
_UNFINISHED = "\ufffd"


class Stream:
    """The pieces of one generation: text, or token ids if the engine has no tokenizer.

    Attributes:
        result: How it ended; ``None`` until then.
    """

    def __init__(self, run: Run) -> None:
        self.result: Result | None = None
        self._run = run

    @property
    def report(self) -> RunReport:
        """What the generation has cost so far."""
        return self._run.report

    def cancel(self) -> None:
        """End the generation before its next token."""
        self._run.cancel(0)

    def __iter__(self) -> Iterator[Any]:
        """Yield what each token adds; the pieces together are the text of the result."""
        pieces = Pieces(self._run.tokenizer, self._run.requests[0].stop)
        while self.result is None:
            events = self._run.step()
            self.result = next(iter(events.results), None)
            tokens = [token for _, token in events.tokens]
            if self._run.tokenizer is None:
                yield from tokens
            else:
                text = "" if self.result is None else self.result.text or ""
                piece = pieces.add(tokens) if self.result is None else pieces.rest_of(text)
                if piece:
                    yield piece


class Pieces:
    """Turns tokens into text, holding back what a later token may still change.

    Decodes only the last few tokens: the tokenizer sees each token with those before it, as
    some put spaces by context.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._context = 0  # where the context of the undecoded tokens begins
        self._decoded = 0  # tokens whose text is known
        self._held = ""  # known text that may be the start of a stop string
        self._sent = 0

    def add(self, tokens: Sequence[int]) -> str:
        """The text that these tokens settle."""
        self._tokens.extend(tokens)
        known = self._decode(self._tokens[self._context : self._decoded])
        text = self._decode(self._tokens[self._context :])
        if text.endswith(_UNFINISHED):
            return ""
        self._context, self._decoded = self._decoded, len(self._tokens)
        self._held += text[len(known) :]
        cut = len(self._held) - self._stop_prefix(self._held)
        piece, self._held = self._held[:cut], self._held[cut:]
        self._sent += len(piece)
        return piece

    def rest_of(self, text: str) -> str:
        """What is missing of the final text."""
        return text[self._sent :]

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def _stop_prefix(self, text: str) -> int:
        """Length of the longest end of the text with which a stop string begins."""
        longest = max(map(len, self._stop), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        ends = (size for size in lengths if any(s.startswith(text[-size:]) for s in self._stop))
        return next(ends, 0)
