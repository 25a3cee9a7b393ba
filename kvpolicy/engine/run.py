"""A run: requests being served. `Run.step` is the loop of continuous batching.

Each step schedules, prefills, decodes, compacts, and finishes sequences.
"""

import time
from collections import abc, deque
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.draw import NO_TOKEN
from kvpolicy.cache.slab import KVCache
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.engine.arrival import Arrivals
from kvpolicy.engine.batch import RunningBatch
from kvpolicy.engine.core import EngineCore
from kvpolicy.engine.requests.isolation import OnHookError
from kvpolicy.engine.requests.logprobs import Measured, TokenLogprobs
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.request_queue import Clock, RequestQueue
from kvpolicy.engine.requests.results import Events, HookFailure, Result, RunReport
from kvpolicy.engine.requests.sampler import Sampler, has_processors, sample_next
from kvpolicy.engine.requests.savings import evicted_in_prompt, longest_kept, nothing_evicted
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import KVPolicyError, RequestError, SnapshotError


class Run:
    """Requests being served; iterate over it for their results as they finish.

    Attributes:
        engine: Serves them.
        requests: The requests it was made with, in order of arrival.
        tokenizer: The engine's.
        batch: The sequences in their slots, with their cache.
        takes_turns: Whether a step is one prefill forward or one decode, in turns, so that first
            tokens leave before the next decode, sequences that are decoded wait for one prefill
            forward at most, and new requests are noticed after each. If not, the prompts of all
            free slots are prefilled first, and a decode follows in the same step.
    """

    takes_turns = False

    def __init__(
        self,
        engine: EngineCore,
        requests: abc.Sequence[Request],
        sampler: Sampler | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        """Validate and enqueue requests; `Engine.generate` is the usual way to make a run.

        Args:
            engine: Serves them.
            requests: The requests.
            sampler: Chooses the next tokens in place of the sampling of the requests; it can
                force sequences along given tokens, to measure the model there.
            clock: Tells the time in seconds by which deadlines are checked.
        """
        self.requests = tuple(requests)
        self._set_up(engine, RequestQueue(clock), sampler)
        for request in self.requests:
            try:
                self._queue.put(self._arrivals.sequence_of(request))
            except RequestError as error:
                number = self._queue.refuse()
                self._emit(Result(number, finish_reason="error", error=str(error)))
        self._queue.take_in()
        sequences = self.waiting
        self.batch = self._new_batch(
            min(engine.num_slots, max(len(sequences), 1)),
            max((seq.max_len for seq in sequences), default=1),
            max((seq.num_staying for seq in sequences), default=1),
        )

    def _set_up(
        self,
        engine: EngineCore,
        queue: RequestQueue,
        sampler: Sampler | None = None,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        on_hook_error: OnHookError | None = None,
    ) -> None:
        """Everything but the batch."""
        self.engine, self.tokenizer = engine, engine.tokenizer
        self._queue, self._sampler = queue, sampler
        self._failures: list[HookFailure] = []
        self._errors = engine.errors.of_run(on_hook_error, self._failures.append)
        self._clock = engine.clock
        self._arrivals = Arrivals(
            engine.adapter,
            engine.rules,
            engine.tokenizer,
            engine.resuming,
            self._clock,
            max_len,
            max_prompt_len,
            longest_kept(engine.plan),
        )
        self._groups: deque[list[Sequence]] = deque()  # whose prompts are not all in
        self._num_prefills = 0
        self._has_prefilled = False  # in the step before, if prefills and decodes take turns
        self._measured: deque[Measured | None] = deque()
        self._new_tokens: list[tuple[int, int]] = []
        self._new_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._results: list[Result] = []
        self._report = RunReport()
        self._broken_by: BaseException | None = None
        self._started: float | None = None
        self._compiled_before = engine.compile_s

    def _new_batch(self, num_slots: int, longest: int, longest_prompt: int) -> RunningBatch:
        engine = self.engine
        max_steps = engine.steps_per_read if self._sampler is None else 1
        return engine.new_batch(
            num_slots,
            longest,
            longest_prompt,
            max_steps=0 if engine.eager_reason else max_steps,
            errors=self._errors,
        )

    def __iter__(self) -> abc.Iterator[Result]:
        """Yield results as requests finish, in no particular order.

        Raises:
            HookError: A policy has failed, and the engine raises errors. The run is over then:
                results that were ready before are still yielded if it is iterated over again,
                followed by a `KVPolicyError`.
        """
        while self._queue.num_open or self._results:
            if not self._results:
                self._step()
            # One at a time: the rest is kept if the caller stops iterating and comes back.
            while self._results:
                yield self._results.pop(0)

    @property
    def done(self) -> bool:
        """Whether every request has its result, and every result was yielded."""
        return not (self._queue.num_open or self._results)

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait for a slot, in order of arrival."""
        return list(self._queue.waiting.values())

    @property
    def cache(self) -> KVCache:
        """The KV cache: what each slot holds, and in how many bytes."""
        return self.batch.cache

    @property
    def report(self) -> RunReport:
        """What the run has cost so far."""
        so_far, plan = self._report, self.engine.plan
        note = nothing_evicted(plan, so_far.rows_evicted, so_far.peak_rows)
        timings: dict[str, Any] = {**self.batch.timings.read()}
        return attrs.evolve(
            so_far,
            note=note or evicted_in_prompt(plan, so_far.longest_prompt),
            peak_kv_bytes=self.batch.cache.peak_bytes,
            num_processes=self.engine.adapter.processes.num_processes,
            packed_bytes=self.engine.weights.packed_bytes,
            released_bytes=self.engine.weights.released_bytes,
            path=f"eager: {reason}" if (reason := self.engine.eager_reason) else self.batch.path,
            compile_s=self.engine.compile_s - self._compiled_before,
            compactions=self.batch.compactor.num_compactions,
            reused_tokens=self.batch.num_reused,
            **timings,
        )

    def stop_strings_of(self, request: Request) -> tuple[str, ...]:
        """The stop strings of a request: its own, or those of the model's generation config."""
        return self._arrivals.stop_strings_of(request)

    def results(self) -> list[Result]:
        """Serve all remaining requests; results in the order of the prompts."""
        return sorted(self, key=lambda result: result.id)

    def cancel(self, request_id: int) -> None:
        """End a request before its next token; no effect if it has ended already.

        It may be called from any thread.

        Raises:
            KVPolicyError: If the run has no such request.
        """
        num_requests = self._queue.num_submitted
        if request_id not in range(num_requests):
            msg = (
                f"there is no request {request_id!r} to cancel; the run has "
                f"{num_requests}, counted from 0"
            )
            raise KVPolicyError(msg)
        self._queue.cancel(request_id)

    def snapshot(self, request_id: int) -> SequenceSnapshot:
        """The sequence of a request as it is now; the request goes on.

        ``Request(resume=...)`` continues it from here, with tokens equal to those of the request if
        its ``max_new_tokens`` is what is left, and the other options are equal.

        Raises:
            SnapshotError: If the request has not begun or has ended, or sequences of this engine
                cannot be copied.
        """
        found = [seq for seq in self.batch.active if seq.id == request_id]
        if not found:
            is_waiting = request_id in self._queue.waiting
            has_begun = "has not begun" if is_waiting else "is not being served"
            msg = (
                f"no snapshot can be taken: request {request_id!r:.20} {has_begun}; for its end, "
                "ask for Request(snapshot=True)"
            )
            raise SnapshotError(msg)
        return self.batch.snapshot(found[0])

    def step(self) -> Events:
        """Do one step; return its tokens and all results that were not returned before.

        Raises:
            HookError: As for iterating.
        """
        self._step()
        return self._take_events()

    def _take_events(self) -> Events:
        """What was not returned before."""
        failures, self._failures[:] = [*self._failures], []
        events = Events(self._new_tokens, self._results, self._new_logprobs, failures)
        self._new_tokens, self._results, self._new_logprobs = [], [], {}
        return events

    def _step(self) -> None:
        if self._broken_by is not None:
            msg = (
                f"this run ended in the middle of a step with {type(self._broken_by).__name__} "
                "and cannot go on; start another with engine.generate()"
            )
            raise KVPolicyError(msg) from self._broken_by
        start = time.perf_counter()
        self._started = start if self._started is None else self._started
        self._new_tokens, self._new_logprobs = [], {}
        try:
            self._advance()
        except BaseException as error:
            # Also if interrupted: some layers may have stored tokens that others have not.
            self._broken_by = error
            raise
        self._report.elapsed_s = time.perf_counter() - self._started

    # The loop

    @torch.no_grad()
    def _advance(self) -> None:
        """One step of the loop: schedule, prefill, decode, compact, finish."""
        batch = self.batch
        self._begin_step()
        is_decode_due = self._has_prefilled and bool(batch.ready)
        self._has_prefilled = False
        while not is_decode_due and (group := self._next_group()) is not None:
            with self._prefill_time(group):
                self._prefill(group)
                batch.compact()
            self._finish_ended()
            if self.takes_turns:
                self._has_prefilled = True
                return
        if batch.ready:
            with self._decode_time():
                self._decode()
                batch.compact()
                self._finish_ended()

    def _prefill(self, group: abc.Sequence[Sequence]) -> None:
        """A prefill forward: the next chunks of the prompts of a group."""
        chunk = self.batch.begin_prefill_chunk(group)
        if chunk is None:  # they wait for a prefix that another group computes, or have failed
            return
        outputs = self.engine.adapter.forward(chunk)
        self.batch.finish_prefill_chunk(*outputs, self._append_tokens)

    def _decode(self) -> None:
        """A decode step, or several static ones whose tokens are read together."""
        batch, adapter, given = self.batch, self.engine.adapter, self.batch.begin_decode()
        if not isinstance(step := given.step, StaticStep):
            batch.finish_decode(*adapter.forward(given), self._append_tokens)
            return
        sampler = self._sampler
        if sampler is None and has_processors(batch.served):
            sampler = sample_next  # outside of a graph, as processors read tokens
        given.draws = sampler is None
        num_done = 0
        for _ in range(batch.num_steps):
            logits, states = adapter.forward(given)
            if batch.has_failed:
                break
            if sampler is not None:
                step.finish(logits, states, sampler(batch.served, logits))
            self._measure(batch.served, logits, step.tokens[num_done])
            num_done += 1
        batch.finish_static(num_done, self._take_tokens)

    def _begin_step(self) -> None:
        """Take over new requests, and end those that were cancelled or whose time is up."""
        queue = self._queue
        if not queue.take_in():
            return
        for seq in queue.pop_ended():
            self._finish(seq)
        for seq in self.batch.active:
            seq.finish_reason = queue.reason_to_end(seq)
        self._finish_ended()
        queue.forget_ends()

    def _next_group(self) -> list[Sequence] | None:
        """Sequences whose prompts are to be prefilled; ``None`` if there are none.

        Waiting ones are admitted before. Groups follow one another, or take turns with each chunk.
        """
        if self._groups:
            self._drop_prefilled()
        while (self.takes_turns or not self._groups) and (admitted := self._schedule()):
            for group in admitted:
                with self._prefill_time(group):
                    self.batch.admit(group)
                self._report.prompt_tokens += sum(seq.num_prompt for seq in group)
            self._groups += admitted
            self._finish_ended()
            self._drop_prefilled()
        if self.takes_turns:
            self._groups.rotate()
        return self._groups[0] if self._groups else None

    def _drop_prefilled(self) -> None:
        """Forget groups whose prompts are all in, or whose sequences have ended."""
        self._groups = deque(group for group in self._groups if self.batch.prefills(group))

    def _schedule(self) -> list[list[Sequence]]:
        """Take the sequences to admit next from the queue, in groups that are prefilled together.

        Empty if no slot is free, no request waits, or the policies wait.
        """
        batch, waiting = self.batch, self._queue.waiting
        if not waiting or not batch.num_free:
            return []
        # Without a policy, only the first ones matter, of many that may wait.
        is_asked = self.engine.scheduling.implements("schedule")
        in_order = self._queue.in_order(None if is_asked else batch.num_free)
        groups: list[list[int]] = []
        with self._errors.covering(in_order):
            groups = self.engine.scheduling.schedule(
                [seq.waiting for seq in in_order], batch.num_free, len(batch.active)
            )
        for seq in in_order:
            if seq.error is not None:
                self._finish(waiting.pop(seq.id))
        return [[waiting.pop(number) for number in group] for group in groups]

    def _append_tokens(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> None:
        """Sample the next token of each sequence."""
        tokens = (self._sampler or sample_next)(sequences, logits)
        same = self.engine.adapter.processes.same_tokens(tokens)
        self._measure(sequences, logits, same)
        self._take_tokens(sequences, same.tolist())

    def _measure(self, sequences: abc.Sequence[Sequence], logits: Tensor, tokens: Tensor) -> None:
        """Note the log-probabilities of tokens that `_take_tokens` will get, if any are wanted."""
        wanted: dict[int, tuple[int, int]] = {}
        for row, seq in enumerate(sequences):
            if seq.request.logprobs is not None:
                wanted[seq.id] = row, seq.request.logprobs
        self._measured.append(Measured(wanted, logits, tokens) if wanted else None)

    def _take_tokens(self, sequences: abc.Sequence[Sequence], tokens: abc.Sequence[int]) -> None:
        """Append the next token of each sequence; one without a token ends with an error."""
        now, measured = self._clock(), self._measured.popleft()
        for seq, token in zip(sequences, tokens, strict=True):
            if token == NO_TOKEN:
                seq.fail_without_token()
            elif seq.error is None:
                seq.append(token)
                self._new_tokens.append((seq.id, token))
                self._report.new_tokens += 1
                if seq.newest_after < self._num_prefills:
                    self._note_gap(seq, now)
                seq.newest_at = now
                if measured is not None and (found := measured.by_number.get(seq.id)):
                    seq.logprobs.append(found)
                    self._new_logprobs.setdefault(seq.id, []).append(found)

    def _finish_ended(self) -> None:
        """Release the slots of sequences that have ended, and emit their results."""
        for seq in self.batch.release():
            self._finish(seq)

    @contextmanager
    def _prefill_time(self, group: abc.Sequence[Sequence]) -> abc.Iterator[None]:
        """Count the seconds of a block as prefill of a group."""
        start = self._clock()
        self._num_prefills += 1
        yield
        elapsed = self._clock() - start
        for seq in group:
            seq.prefill_s += elapsed
        self._report.prefill_s += elapsed

    @contextmanager
    def _decode_time(self) -> abc.Iterator[None]:
        """Count the seconds of a block as decode."""
        start = self._clock()
        with self.batch.timings.decoding():
            yield
        self._report.decode_s += self._clock() - start

    def _note_gap(self, seq: Sequence, now: float) -> None:
        """Note how long a sequence has waited for a token, as prompts were prefilled meanwhile."""
        if seq.newest_at:
            gap = now - seq.newest_at
            self._report.longest_gap_s = max(self._report.longest_gap_s, gap)
        seq.newest_after = self._num_prefills

    # Results

    def _finish(self, seq: Sequence) -> None:
        self._emit(seq.result())

    def _emit(self, result: Result) -> None:
        self._queue.finish(result.id)
        self._results.append(result)
        self._report.add(result)
