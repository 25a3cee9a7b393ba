"""A run: requests going through the slots of an engine until each has its result."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from kvpolicy.cache.slab import Cache
from kvpolicy.engine.batch import RunningBatch
from kvpolicy.engine.request import Request
from kvpolicy.engine.results import Events, FinishReason, Result, RunReport
from kvpolicy.engine.sampler import sample
from kvpolicy.engine.sequence import LiveSequence, encode
from kvpolicy.errors import KVPolicyError, RequestError

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine

# Chooses the next token of each sequence from its logits ``[B, V]``.
Sampler = Callable[[Sequence[LiveSequence], Tensor], Sequence[int]]


def sample_next(sequences: Sequence[LiveSequence], logits: Tensor) -> list[int]:
    """Draw the next token of each sequence as its request says."""
    samplings = [served.request.sampling for served in sequences]
    return sample(logits, samplings, [served.generator for served in sequences]).tolist()


class Run:
    """Requests being served; iterate for their results as they finish.

    Attributes:
        engine: Serves them.
        requests: What was asked for, in order of arrival.
        tokenizer: The engine's.
    """

    def __init__(
        self, engine: "Engine", requests: Sequence[Request], draw: Sampler = sample_next
    ) -> None:
        """Take requests in; `Engine.generate` is the usual way here.

        Args:
            engine: Serves them.
            requests: What is asked for.
            draw: Chooses tokens: another one makes sequences go where they would not go by
                themselves, to be measured there.
        """
        self._draw = draw
        self.tokenizer = engine.tokenizer
        self.engine = engine
        self.requests = tuple(requests)
        self._waiting: dict[int, LiveSequence] = {}  # in the order of their arrival
        self._cancelled: set[int] = set()
        self._new_tokens: list[tuple[int, int]] = []
        self._results: list[Result] = []
        self._report = RunReport()
        self._broken_by: BaseException | None = None
        for number, request in enumerate(requests):
            self._arrive(number, request)
        self._slots = self._allocate()
        self._started: float | None = None

    def __iter__(self) -> Iterator[Result]:
        """Yield results as requests finish, in no particular order.

        Raises:
            HookError: A policy has failed, and the engine is to raise that. The run is over
                then: results that were ready before are still yielded if it is iterated over
                again, and after them comes a `KVPolicyError` that says so.
        """
        while not self.done:
            if not self._results:
                self._go_round()
            # One at a time: whoever stops iterating finds the others when they come back.
            while self._results:
                yield self._results.pop(0)

    @property
    def done(self) -> bool:
        """Whether every request has its result, and every result was handed out."""
        return not (self._slots.active or self._waiting or self._results)

    @property
    def cache(self) -> Cache:
        """The slabs, to be looked at: what each slot holds, and in how many bytes."""
        return self._slots.cache

    @property
    def report(self) -> RunReport:
        """What the run has cost so far."""
        return attrs.evolve(
            self._report,
            peak_kv_bytes=self._slots.cache.peak_bytes,
            num_processes=self.engine.adapter.peers.size,
            compactions=self._slots.compactor.num_compactions,
            **attrs.asdict(self._slots.clock),
        )

    def results(self) -> list[Result]:
        """Serve all that is left; results in the order of the prompts."""
        return sorted(self, key=lambda result: result.id)

    def cancel(self, request_id: int) -> None:
        """End a request before its next token; no effect on one that has ended already.

        Raises:
            KVPolicyError: If the run has no such request.
        """
        if request_id not in range(len(self.requests)):
            msg = (
                f"there is no request {request_id!r} to cancel; the run has "
                f"{len(self.requests)}, counted from 0"
            )
            raise KVPolicyError(msg)
        self._cancelled.add(request_id)

    def step(self) -> Events:
        """Go round once, and hand out its tokens and all results not handed out yet.

        Raises:
            HookError: As for iterating.
        """
        self._go_round()
        events = Events(self._new_tokens, self._results)
        self._results = []
        return events

    def _go_round(self) -> None:
        """Admit and prefill, decode one token each, see what is done."""
        if self._broken_by is not None:
            msg = (
                f"this run ended in the middle of a round with {type(self._broken_by).__name__} "
                "and cannot go on; start another with engine.generate()"
            )
            raise KVPolicyError(msg) from self._broken_by
        try:
            self._round()
        except BaseException as error:
            # Also when interrupted: some layers may hold tokens that others do not.
            self._broken_by = error
            raise

    def _round(self) -> None:
        start = time.perf_counter()
        self._started = start if self._started is None else self._started
        self._new_tokens = []
        self._drop_cancelled()
        self._admit()
        if self._slots.active:
            self._decode()
        self._report.elapsed_s = time.perf_counter() - self._started

    # Arrival and departure

    def _arrive(self, number: int, request: Request) -> None:
        adapter = self.engine.adapter
        try:
            prompt = encode(request.prompt, self.tokenizer, adapter.vocab_size)
            if len(prompt) >= adapter.max_positions:
                has = f"the model has positions for {adapter.max_positions}"
                msg = f"the prompt has {len(prompt)} tokens; {has}, the generation included"
                raise RequestError(msg)
            if request.stop and self.tokenizer is None:
                msg = "stop strings need a tokenizer, and the engine has none; use stop_ids"
                raise RequestError(msg)
        except RequestError as error:
            self._answer(Result(number, finish_reason="error", error=str(error)))
            return
        stop_ids = adapter.stop_ids if request.stop_ids is None else request.stop_ids
        most = min(request.max_new_tokens, adapter.max_positions - len(prompt))
        self._waiting[number] = LiveSequence(
            number, request, prompt, most, frozenset(stop_ids), self.tokenizer
        )

    def _allocate(self) -> RunningBatch:
        longest = max((served.longest for served in self._waiting.values()), default=1)
        num_slots = min(self.engine.num_slots, max(len(self._waiting), 1))
        return RunningBatch(self.engine, num_slots, longest)

    def _drop_cancelled(self) -> None:
        for number in sorted(self._cancelled & self._waiting.keys()):
            self._depart(self._waiting.pop(number), "cancelled")
        for served in self._slots.active:
            if served.id in self._cancelled:
                served.finish_reason = "cancelled"
        self._cancelled.clear()
        self._release()

    def _release(self) -> None:
        for served in self._slots.release():
            self._depart(served)

    def _depart(self, served: LiveSequence, reason: FinishReason | None = None) -> None:
        served.finish_reason = reason or served.finish_reason
        self._answer(served.result())

    def _answer(self, result: Result) -> None:
        self._results.append(result)
        self._report.num_requests += 1
        self._report.num_errors += result.finish_reason == "error"

    # Prefill and decode

    def _admit(self) -> None:
        slots = self._slots
        while self._waiting and slots.num_free:
            groups = self._schedule()
            if not groups:
                return
            for group in groups:
                self._prefill([self._waiting.pop(number) for number in group])
            self._release()

    def _schedule(self) -> list[list[int]]:
        """Ask who is admitted; nobody, if a policy has failed for all who wait."""
        slots, everybody = self._slots, list(self._waiting.values())
        groups: list[list[int]] = []
        with self.engine.asking.about(everybody):
            waiting = [served.waiting for served in everybody]
            groups = self.engine.scheduling.schedule(waiting, slots.num_free, len(slots.active))
        for served in everybody:
            if served.error is not None:
                self._depart(self._waiting.pop(served.id))
        return groups

    def _prefill(self, group: Sequence[LiveSequence]) -> None:
        start = time.perf_counter()
        self._slots.prefill(group, self._take)
        elapsed = time.perf_counter() - start
        for served in group:
            served.prefill_s = elapsed
        self._report.prompt_tokens += sum(len(served.prompt) for served in group)
        self._report.prefill_s += elapsed

    def _decode(self) -> None:
        start = time.perf_counter()
        self._slots.decode(self._take)
        self._release()
        self._report.decode_s += time.perf_counter() - start

    def _take(self, sequences: Sequence[LiveSequence], logits: Tensor) -> None:
        """Draw and add the next token of each sequence."""
        drawn = self.engine.adapter.peers.broadcast(self._draw(sequences, logits))
        for served, token in zip(sequences, drawn, strict=True):
            served.take(token)
            self._new_tokens.append((served.id, token))
        self._report.new_tokens += len(sequences)
