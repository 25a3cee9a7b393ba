"""One request while it is served: its tokens, the notes of policies, what it has cost so far."""

import time
from collections import abc
from typing import Any

import attrs
from torch import Tensor

from kvpolicy.attention.draw import NO_TOKEN
from kvpolicy.cache.static_step import Continuation
from kvpolicy.engine.requests.detokenize import TextDecoder, decode
from kvpolicy.engine.requests.logits_processors import SequenceProcessors
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.engine.requests.results import FinishReason, Result, TokenLogprobs
from kvpolicy.engine.requests.stop_strings import Judged, Stop, StopStrings
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import RequestError
from kvpolicy.model.embedded import EmbeddedPrompt
from kvpolicy.state import SequenceMemory, WaitingRequest


@attrs.define(eq=False)
class Sequence:
    """A request with a valid prompt, from arrival to its result.

    Attributes:
        id: Number of the request in its run.
        request: The request.
        prompt: Token ids of the prompt, with those of earlier turns before it.
        max_new_tokens: The most tokens of the answer, within the model's positions.
        stop_ids: Tokens that end the generation.
        tokenizer: The engine's, if there is one.
        clock: Tells the time in seconds: the engine's, which leaves out compiling.
        slot: Its slot in the cache, while it is served.
        tokens: Tokens of the answer so far.
        num_before: Tokens of the answer that are those of a resumed snapshot.
        num_earlier: Tokens of the prompt that are.
        began_at: Tokens that it had seen when it went on from what another has left; 0: it began.
        prompt_before: Of these tokens, how many came before their last answer.
        memory: What policies remember of it.
        num_observed: Tokens that policies were shown by `observe`.
        num_annotated: Tokens whose rows were annotated, in layers that are annotated after decode
            steps.
        num_reused: Tokens of the prompt whose rows were copied from a prefix store.
        compactions: Times at which at least one layer was compacted.
        rows_evicted: Rows evicted, summed over layers and counted per KV head.
        peak_rows: The most rows any layer held.
        peak_bytes: Bytes of keys and values in its rows at most, summed over layers, and of its
            states.
        full_bytes: Those of a full cache of the same tokens, when it was last looked at.
        prefill_s: Seconds in the prefill of its group.
        decode_from: Time of its first token, by `clock`.
        finish_reason: Why it has ended; ``None`` while it is served.
        error: What was wrong, if it has ended with an error.
        snapshot: The sequence at its end, if it is wanted.
        deadline: When it ends at the latest, by the clock of its run; ``None``: at any time.
        logprobs: Log-probabilities of its own tokens, if the request asks for them.
        prompt_logprobs: Those of its prompt.
        newest_at: Time of its newest token, by `clock`.
        newest_after: Prefill forwards of the run before its newest token.
        num_told: Tokens of the answer that events have told of.
        looked_at: Tokens that it had seen when it was last looked at whether it is due.
        processors: Change its logits before a token is chosen; ``None``: nothing does.
        sampling: How its tokens are drawn from the logits.
        largest: The largest logit after its newest prompt tokens, on the device.
        continuation: How decode steps continue it.
        embedded: What enters the decoder for its newest prompt, as long as that is not all in;
            ``None``: what the model makes of token ids.
    """

    id: int
    request: Request
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]
    tokenizer: Any = None
    clock: abc.Callable[[], float] = time.perf_counter
    slot: int = -1
    tokens: list[int] = attrs.field(factory=list)
    num_before: int = 0
    num_earlier: int = 0
    began_at: int = 0
    prompt_before: int = 0
    memory: SequenceMemory = attrs.field(factory=SequenceMemory)
    num_observed: int = 0
    num_annotated: int = 0
    num_reused: int = 0
    compactions: int = 0
    rows_evicted: int = 0
    peak_rows: int = 0
    peak_bytes: int = 0
    full_bytes: int = 0
    prefill_s: float = 0.0
    decode_from: float = 0.0
    finish_reason: FinishReason | None = None
    error: str | None = None
    snapshot: SequenceSnapshot | None = None
    deadline: float | None = None
    logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    prompt_logprobs: list[TokenLogprobs] = attrs.field(factory=list)
    newest_at: float = 0.0
    newest_after: int = 0
    num_told: int = attrs.field(init=False)
    looked_at: int = 0
    processors: SequenceProcessors | None = None
    sampling: Sampling = attrs.field()
    largest: Tensor | None = None
    continuation: Continuation = attrs.field(init=False)
    embedded: EmbeddedPrompt | None = None
    _stop: Stop | None = None
    _decoder: TextDecoder | None = attrs.field(default=None, init=False)
    _judged: Judged = attrs.field(default=Judged(), init=False)

    @property
    def waiting(self) -> WaitingRequest:
        """What `schedule` receives about it."""
        return WaitingRequest(
            self.id,
            self.num_prompt,
            self.max_new_tokens - self.num_before,
            self.request.priority,
        )

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt that are its own."""
        return len(self.prompt) - self.num_earlier

    @property
    def own_tokens(self) -> list[int]:
        """Tokens generated for this request."""
        return self.tokens[self.num_before :]

    @property
    def num_staying(self) -> int:
        """Tokens whose rows stay where prompts do: of a conversation, those of the first prompt."""
        snapshot = self.request.resume
        return len(self.prompt) if snapshot is None else snapshot.contents.prompt_len

    @property
    def max_len(self) -> int:
        """The most tokens it may have, prompt and generation together."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and the generation, which is the position of the next one."""
        return len(self.prompt) + len(self.tokens)

    @num_told.default
    def _num_told(self) -> int:
        return self.num_before

    @sampling.default
    def _sampling(self) -> Sampling:
        return self.request.sampling

    @continuation.default
    def _continuation(self) -> Continuation:
        return Continuation(self.max_len, self.stop_ids, self.sampling)

    def copied(self, number: int, memory: SequenceMemory) -> "Sequence":
        """A copy with another number and a copied memory, for a sequence that goes on by itself."""
        return attrs.evolve(
            self,
            id=number,
            tokens=[*self.tokens],
            logprobs=[*self.logprobs],
            memory=memory,
            processors=self.processors and self.processors.copied(),
        )

    def token_ids(self, start: int, end: int) -> list[int]:
        """The tokens at positions ``[start, end)``, of the prompt and the generation."""
        num_prompt = len(self.prompt)
        generated = self.tokens[max(start - num_prompt, 0) : max(end - num_prompt, 0)]
        return [*self.prompt[start:end], *generated]

    def prompt_len(self, seen: int) -> int:
        """Tokens of the prompt that an answer follows, as of some tokens seen.

        Until it sees a token of its own, a sequence is what it goes on from.
        """
        return self.prompt_before if seen <= self.began_at else len(self.prompt)

    @property
    def is_within_prompt(self) -> bool:
        """Whether it was cut within a prompt, of which it holds the beginning."""
        return self.prompt_len(self.num_tokens) > self.num_tokens

    def begin_turn(self, tokens: abc.Iterable[int]) -> None:
        """Go on with a prompt behind all tokens so far, each of which it has seen."""
        seen = self.num_tokens
        self.began_at, self.prompt_before = seen, self.prompt_len(seen)
        self.prompt, self.tokens = (*self.prompt, *self.tokens, *tokens), []

    def take(self, tokens: abc.Iterable[int]) -> int:
        """Append drawn tokens until it ends; returns how many of them it has taken."""
        num_taken, own = 0, self.tokens
        for token in tokens:
            if self.finish_reason is not None:
                break
            num_taken += 1
            if token == NO_TOKEN:
                self.fail_without_token()
                break
            if len(own) == self.num_before:
                self.decode_from = self.clock()
            own.append(token)
            if token in self.stop_ids or (self.request.stop and self._has_stop_string()):
                self.finish_reason = "stop"
            elif len(own) >= self.max_new_tokens and self.finish_reason is None:
                self.finish_reason = "length"
        return num_taken

    @property
    def is_lost(self) -> bool:
        """Whether the model's own numbers are NaN or infinity, as its logits show; reads one."""
        return self.largest is not None and not bool(self.largest.isfinite())

    def fail_without_token(self) -> None:
        """End it with an error, since its logits name no likeliest token."""
        begin = f"the logits after {len(self.tokens)} generated tokens"
        error = (
            f"{begin} hold NaN or infinity, so no token is the likeliest; load the model in "
            "another precision, such as float32, and check its weights and the policies that "
            "steer it"
        )
        if self.processors is not None and not self.is_lost:
            error = (
                f"{begin} leave no token: they hold NaN or infinity, or the generation config of "
                "the model, such as its suppress_tokens, rules out every token"
            )
        self.fail(error)

    def fail(self, error: str) -> None:
        """End it with an error; no effect if it has ended already."""
        if self.finish_reason is None:
            self.finish_reason, self.error = "error", error

    def _has_stop_string(self) -> bool:
        if self.tokenizer is None:
            return False
        try:
            decoder = self._decoder
            if decoder is None:
                decoder = self._decoder = TextDecoder(self.tokenizer, self.tokens[:-1])
                # One that ends within a resumed part has been passed already.
                self._judged = Judged(decoder.num_complete, len(decoder.special))
            decoder.add(self.tokens[-1])
        except RequestError as error:
            self._fail_to_decode(error)
            return False
        self._stop = StopStrings(self.request.stop).first_in(decoder, self._judged)
        self._judged = Judged(len(decoder.final), len(decoder.special))
        return self._stop is not None

    def text(self) -> str | None:
        """The text generated for this request, without special tokens, up to a stop string."""
        if self.tokenizer is None:
            return None
        before = 0
        try:
            if self.num_before:
                resumed = TextDecoder(self.tokenizer, self.tokens[: self.num_before])
                before = resumed.num_complete
            text = decode(self.tokenizer, self.tokens)[before:]
        except RequestError as error:
            self._fail_to_decode(error)
            return ""
        if self._stop is None:
            return text
        begin = self._stop.place - before  # it may be in the resumed part
        stop = self._stop.string[max(-begin, 0) :] if self.request.include_stop else ""
        return text[: max(begin, 0)] + stop

    def _fail_to_decode(self, error: RequestError) -> None:
        self.finish_reason, self.error = "error", str(error)

    def result(self) -> Result:
        """The result of a sequence that has ended."""
        text = self.text()  # decoding may fail, and that is the reason then
        assert self.finish_reason is not None
        return Result(
            id=self.id,
            prompt_len=self.num_prompt,
            reused_tokens=self.num_reused,
            tokens=tuple(self.own_tokens),
            text=text,
            finish_reason=self.finish_reason,
            error=self.error,
            compactions=self.compactions,
            rows_evicted=self.rows_evicted,
            peak_rows=self.peak_rows,
            peak_bytes=self.peak_bytes,
            full_bytes=self.full_bytes,
            prefill_s=self.prefill_s,
            decode_s=self.clock() - self.decode_from if self.own_tokens else 0.0,
            snapshot=self.snapshot,
            logprobs=None if self.request.logprobs is None else tuple(self.logprobs),
            prompt_logprobs=(
                None if self.request.prompt_logprobs is None else tuple(self.prompt_logprobs)
            ),
        )
