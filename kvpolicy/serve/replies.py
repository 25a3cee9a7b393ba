"""Answers in the forms of OpenAI's interface: whole, and as the chunks of a stream."""

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal

from kvpolicy.engine.async_engine import StreamChunk
from kvpolicy.engine.requests.detokenize import decode
from kvpolicy.engine.requests.results import Result, TokenLogprobs
from kvpolicy.serve.bodies import ChatBody, CompletionBody
from kvpolicy.serve.logprobs import CompletionLogprobs, chat_logprobs
from kvpolicy.serve.plans import ServedModel, ServedPlan


def cached_tokens(results: Mapping[int, Result], n: int) -> int:
    """Prompt tokens that were found in a prefix store.

    A prompt counts once, for all of its choices: with those tokens that none of them has computed.

    Args:
        results: Result of each choice.
        n: Choices for each prompt.
    """
    choices = _in_order(results)
    of_prompts = [choices[first : first + n] for first in range(0, len(choices), n)]
    return sum(min(result.reused_tokens for result in one) for one in of_prompts)


def token_counts(prompt_tokens: int, new_tokens: int) -> dict[str, Any]:
    """Tokens of an answer, whole or so far.

    Args:
        prompt_tokens: Tokens of the prompts.
        new_tokens: Tokens generated.
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
    }


def token_usage(prompt_tokens: int, results: Mapping[int, Result], n: int) -> dict[str, Any]:
    """What an answer has cost.

    A prompt counts once, for all of its choices.

    ``kvpolicy`` has what the rows of its choices took: the most that one layer held, the rows
    evicted, and the bytes of keys and values at their most, beside those of a full cache.

    Args:
        prompt_tokens: Tokens of the prompts.
        results: Result of each choice.
        n: Choices for each prompt.
    """
    choices = _in_order(results)
    new_tokens = sum(len(result.tokens) for result in choices)
    return {
        **token_counts(prompt_tokens, new_tokens),
        "prompt_tokens_details": {"cached_tokens": cached_tokens(results, n)},
        "kvpolicy": {
            "peak_rows": max(result.peak_rows for result in choices),
            "rows_evicted": sum(result.rows_evicted for result in choices),
            "compactions": sum(result.compactions for result in choices),
            "peak_bytes": sum(result.peak_bytes for result in choices),
            "full_bytes": sum(result.full_bytes for result in choices),
        },
    }


def _in_order(results: Mapping[int, Result]) -> list[Result]:
    return [result for _, result in sorted(results.items())]


class Reply(ABC):
    """The answer to one body.

    Attributes:
        id: Its id.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]  # of a whole answer
    chunk_kind: ClassVar[str]

    def __init__(
        self, body: CompletionBody | ChatBody, model: ServedModel, plan: ServedPlan
    ) -> None:
        """Begin an answer.

        Args:
            body: What was asked.
            model: The model that answers.
            plan: The plan that serves it.
        """
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._body, self._model = body, model
        self._head = {
            "id": self.id,
            "created": int(time.time()),
            "model": body.model,
            # Two answers with one fingerprint, seed and prompt are equal, unless the plan evicts
            # and one of them goes on with a conversation of a prefix store.
            "system_fingerprint": f"kvpolicy-{plan.engine.plan.digest()[:12]}",
        }

    @abstractmethod
    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        """What a whole choice has, beside its number and why it ended."""

    @abstractmethod
    def _piece(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        """What a chunk of a stream has of a choice."""

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """The chunk with which a choice of a stream begins, if it has one."""

    @abstractmethod
    def _last_part(self) -> dict[str, Any]:
        """What the last chunk of a choice has."""

    def whole(self, results: Mapping[int, Result], prompt_tokens: int) -> dict[str, Any]:
        """An answer in one piece.

        Args:
            results: Result of each choice.
            prompt_tokens: Tokens of the prompts.
        """
        choices = [
            {
                "index": index,
                **self._choice(index, result),
                **self._token_ids(result.tokens),
                "finish_reason": result.finish_reason,
            }
            for index, result in sorted(results.items())
        ]
        usage = token_usage(prompt_tokens, results, self._body.n)
        return {**self._head, "object": self.kind, "choices": choices, "usage": usage}

    def pieces(self, index: int, chunk: StreamChunk) -> Iterator[dict[str, Any]]:
        """The chunks of a stream that a chunk of the engine makes.

        Args:
            index: Number of the choice.
            chunk: What the engine has generated.
        """
        if chunk.text or (chunk.tokens and (self._body.kvpolicy.token_ids or chunk.logprobs)):
            piece = self._piece(index, chunk)
            yield self._chunk(index, {**piece, **self._token_ids(chunk.tokens)}, None)
        if chunk.result is not None:
            yield self._chunk(index, self._last_part(), chunk.result.finish_reason)

    def kept(self, event: dict[str, Any]) -> dict[str, Any]:
        """The chunk with what a stream tells of the rows that are held.

        Args:
            event: See `kvpolicy.serve.kept`.
        """
        return {**self._head, "object": self.chunk_kind, "choices": [], "kvpolicy": event}

    def last(self, results: Mapping[int, Result], prompt_tokens: int) -> dict[str, Any]:
        """The chunk with the usage of all choices, after their ends.

        Args:
            results: Result of each choice.
            prompt_tokens: Tokens of the prompts.
        """
        usage = token_usage(prompt_tokens, results, self._body.n)
        return {**self._head, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _chunk(
        self, index: int, piece: dict[str, Any], reason: Literal["stop", "length"] | str | None
    ) -> dict[str, Any]:
        choice = {"index": index, **piece, "finish_reason": reason}
        return {**self._head, "object": self.chunk_kind, "choices": [choice]}

    def _token_ids(self, tokens: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(tokens)} if self._body.kvpolicy.token_ids else {}


class CompletionReply(Reply):
    """An answer of ``/v1/completions``."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        body: CompletionBody,
        model: ServedModel,
        plan: ServedPlan,
        echoed: Sequence[tuple[int, ...]] | None,
    ) -> None:
        """Begin an answer.

        Args:
            body: What was asked.
            model: The model that answers.
            plan: The plan that serves it.
            echoed: Tokens of the prompts, if texts begin with them.
        """
        super().__init__(body, model, plan)
        self._echoed = echoed
        self._prompts = body.prompt
        self._logprobs_of: dict[int, CompletionLogprobs] = {}

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        text, logprobs = result.text or "", result.logprobs
        if self._echoed is None:
            return {"text": text, "logprobs": self._logprobs(index, logprobs)}
        number = index // self._body.n
        given, prompt = self._prompts[number], self._echoed[number]
        tokenizer = self._model.tokenizer
        before = given if isinstance(given, str) else decode(tokenizer, prompt)
        text = f"{before}{_space_between(prompt, result.tokens, tokenizer)}{text}"
        if logprobs is None or result.prompt_logprobs is None:
            return {"text": text, "logprobs": None}
        known = [*result.prompt_logprobs, *logprobs]
        return {"text": text, "logprobs": CompletionLogprobs(self._model).of(known, prompt[0])}

    def _piece(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {"text": chunk.text, "logprobs": self._logprobs(index, chunk.logprobs)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """There is none."""
        return None

    def _last_part(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(
        self, index: int, logprobs: Sequence[TokenLogprobs] | None
    ) -> dict[str, Any] | None:
        if logprobs is None:
            return None
        if index not in self._logprobs_of:
            self._logprobs_of[index] = CompletionLogprobs(self._model)
        return self._logprobs_of[index].of(logprobs)


class ChatReply(Reply):
    """An answer of ``/v1/chat/completions``."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        message = {"role": "assistant", "content": result.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(result.logprobs)}

    def _piece(self, index: int, chunk: StreamChunk) -> dict[str, Any]:
        return {"delta": {"content": chunk.text}, "logprobs": self._logprobs(chunk.logprobs)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk(index, {"delta": delta, "logprobs": None}, None)

    def _last_part(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if logprobs is None else chat_logprobs(self._model, logprobs)


def _space_between(prompt: Sequence[int], answer: Sequence[int], tokenizer: Any) -> str:
    """What an answer begins with after its prompt, and lacks alone."""
    before, alone = decode(tokenizer, prompt), decode(tokenizer, answer)
    both = decode(tokenizer, [*prompt, *answer])
    return both[len(before) : len(both) - len(alone)]
