"""A stream: one generation, piece by piece."""

from collections import abc
from typing import Any

from kvpolicy.engine.requests.detokenize import TextPieces
from kvpolicy.engine.requests.results import Result, RunReport
from kvpolicy.engine.run import Run


class Stream:
    """The pieces of one generation: text, or token ids if the engine has no tokenizer.

    Attributes:
        result: The result; ``None`` until the generation ends.
    """

    def __init__(self, run: Run) -> None:
        self.result: Result | None = None
        self._run = run
        # Pieces are wanted one by one, and the first one as soon as it is there.
        run.batch.max_steps, run.takes_turns = min(run.batch.max_steps, 1), True

    @property
    def report(self) -> RunReport:
        """What the generation has cost so far."""
        return self._run.report

    def cancel(self) -> None:
        """End the generation before its next token."""
        self._run.cancel(0)

    def __iter__(self) -> abc.Iterator[Any]:
        """Yield what each token adds; the pieces together are the text of the result."""
        tokenizer, (request,) = self._run.tokenizer, self._run.requests
        pieces = None
        if tokenizer is not None:
            pieces = TextPieces(tokenizer, self._run.stop_strings_of(request), request.continued)
        while self.result is None:
            events = self._run.step()
            self.result = next(iter(events.results), None)
            tokens = [token for _, token in events.tokens]
            if pieces is None:
                yield from tokens
            else:
                text = "" if self.result is None else self.result.text or ""
                piece = pieces.add(tokens) if self.result is None else pieces.rest_of(text)
                if piece:
                    yield piece
