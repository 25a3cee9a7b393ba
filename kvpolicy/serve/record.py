"""What happens to one HTTP request, for its line in the log and for metrics.

It holds numbers and names only: never a prompt, an answer or a key.
"""

from time import monotonic
from typing import Any, Literal

import attrs

from kvpolicy.engine.requests.results import Result

Outcome = Literal[
    "completed", "cancelled", "invalid", "refused", "timeout", "failed", "shutting_down"
]


@attrs.define
class Record:
    """One HTTP request.

    Attributes:
        id: Its id, which the client is told.
        arrived: When it arrived, by `time.monotonic`.
        plan: The plan that the client has chosen; empty before that.
        stream: Whether the answer is a stream.
        outcome: How it ended; ``None`` for a request that generates nothing.
        choices: Choices that it asks for.
        prompt_tokens: Tokens of its prompts.
        cached_tokens: Of these, those that were found in a prefix store, if there is one and the
            request is completed.
        new_tokens: Tokens generated.
        rows_evicted: Evicted rows, as `Result` counts them.
        first_token_s: Seconds from arrival to the first token; ``None`` before it.
        per_token_s: Seconds for each further token, of each choice that has ended and has any.
    """

    id: str
    arrived: float = attrs.field(factory=monotonic)
    plan: str = ""
    stream: bool = False
    outcome: Outcome | None = None
    choices: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    new_tokens: int = 0
    rows_evicted: int = 0
    first_token_s: float | None = None
    per_token_s: list[float] = attrs.field(factory=list)

    @property
    def elapsed_s(self) -> float:
        """Seconds since it arrived."""
        return monotonic() - self.arrived

    def note_tokens(self, num: int) -> None:
        """Count tokens that have just come.

        Args:
            num: How many tokens.
        """
        if self.first_token_s is None:
            self.first_token_s = self.elapsed_s
        self.new_tokens += num

    def note_result(self, result: Result) -> None:
        """Add what a choice has cost.

        Args:
            result: Its result.
        """
        self.rows_evicted += result.rows_evicted
        if len(result.tokens) > 1:
            self.per_token_s.append(result.decode_s / (len(result.tokens) - 1))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for the log; numbers of a generation only if it is one."""
        if self.outcome is None:
            return {}
        per_token = self.per_token_s
        return {
            "plan": self.plan,
            "stream": self.stream,
            "outcome": self.outcome,
            "choices": self.choices,
            "prompt_tokens": self.prompt_tokens,
            **({} if self.cached_tokens is None else {"cached_tokens": self.cached_tokens}),
            "new_tokens": self.new_tokens,
            "rows_evicted": self.rows_evicted,
            "first_token_s": _rounded(self.first_token_s),
            "per_token_s": _rounded(sum(per_token) / len(per_token) if per_token else None),
        }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
