"""The engine: continuous batching of sequences whose caches are evicted under a plan.

An `Engine` is a model and a plan; a `Run` has a cache, and the loop over its requests.
"""

import time
from collections import abc
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.arrival import Arrivals
from kvpolicy.engine.bound_plan import DEFAULT_MAX_TOKENS, BoundPlan, check_sizes
from kvpolicy.engine.compose import bind_prefixes, core_of, snapshots_of
from kvpolicy.engine.costs import Costs
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.extensions.base import Extension, Found
from kvpolicy.engine.limits import Limits
from kvpolicy.engine.requests.detokenize import TextPieces
from kvpolicy.engine.requests.isolation import OnHookError
from kvpolicy.engine.requests.request import Request, Sampling, samplings_of
from kvpolicy.engine.requests.request_queue import Clock, RequestQueue
from kvpolicy.engine.requests.results import (
    EngineStats,
    Events,
    HookFailure,
    Result,
    RunReport,
    TokenLogprobs,
)
from kvpolicy.engine.requests.savings import evicted_in_prompt, longest_kept, nothing_evicted
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.sampler import ChooseTokens, Sampler
from kvpolicy.engine.scheduler import Scheduler
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.engine.step import Output, Step
from kvpolicy.errors import KVPolicyError, ModelError, RequestError, SnapshotError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.generation_config import GenerationRules
from kvpolicy.model.packed import packed_model, wants_packing
from kvpolicy.model.static_forward import Compiled, compile_problem
from kvpolicy.model.weight_forms import CpuWeights
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan

DEFAULT_SLOTS = 8
MOST_STEPS_PER_READ = 2  # so many on a GPU
DEFAULT_NEW_TOKENS = 256


class Engine(BoundPlan):
    """Serves requests with a model, a plan, and a number of slots.

    `BoundPlan` has what the plan is bound to.

    Attributes:
        rules: The model's generation config, as it was when the engine was made.
        num_slots: Sequences that are decoded together.
        compiled: Runs static steps, if they are compiled.
        weights: The packed weights of the model, if it has any.
        steps_per_read: The most static decode steps that are launched before the tokens of the
            first of them are read.
        prefix_store: Keeps parts of sequences, if there is one.
        prefixes: What finds and stores them, bound to this engine.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelAdapter,
        tokenizer: Any = None,
        plan: Plan | ResolvedPlan | None = None,
        *,
        slots: int = DEFAULT_SLOTS,
        chunk: int | None = None,
        max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
        on_hook_error: OnHookError = "raise",
        eager: bool = False,
        compile: bool = False,
        cpu_weights: CpuWeights = "plain",
        steps_per_read: int | None = None,
        prefix_store: Any = None,
        extensions: abc.Iterable[abc.Callable[[], Extension]] = (),
    ) -> None:
        """Bind a plan to a model, which is left as it is.

        Args:
            model: A decoder-only transformers model, or an adapter.
            tokenizer: Its tokenizer; without one, prompts are token ids.
            plan: The plan: policies, budgets and buffers of each layer.
            slots: Sequences that are decoded together.
            chunk: The most prompt tokens of one sequence in one forward. A forward never has
                more tokens than the slabs can take, and slabs are compacted when they are full:
                another chunk takes other time and memory, and changes results by rounding only.
                ``None``: 1,024 on a CPU, and 8,192 on other devices.
            max_tokens_per_forward: The most prompt tokens of all sequences together in one
                forward, pads included; the other sequences of a group wait for the next forwards.
                It bounds the memory of activations in prefill.
            on_hook_error: What happens if a policy raises or its answer breaks the contract.
                ``"raise"``: the run ends with a `HookError`. ``"answer"``: the requests of the
                failing call end with the error, and the others go on as if these had been
                cancelled. Errors of the whole run, such as a lack of memory, are always raised.
            eager: Whether decode steps take the eager path, which is slower, although they could
                be static. Results are the same.
            compile: Whether `torch.compile` compiles the model's forward of a decode step, when
                the first one runs. It needs a C++ compiler, or Triton on a GPU, and takes a
                minute or more for a large model; tokens may differ by rounding.
            cpu_weights: ``"packed"`` runs `kvpolicy.packed_model` of the model: faster steps on
                a CPU, with products that differ by rounding; ``"bf16"`` and ``"int8"`` round the
                weights, too. The plain weights stay in memory beside the packed ones, since the
                model is left as it is; to release them, give ``packed_model(model,
                release=True)`` for the model instead.
            steps_per_read: The most static decode steps that are launched before the tokens of the
                first of them are read, 1 or 2. With 2, the next step is launched before the tokens
                of the last are looked at, so that a GPU does not wait for the host. Stop strings,
                cancelling and new requests take effect when tokens are read; results are the
                same. ``None``: 2 on a GPU, and 1 on a CPU.
            prefix_store: A `PrefixStore`, which keeps rows of prompts and of conversations for
                requests that begin with the same tokens; these compute the rest only. ``None``:
                nothing is reused.
            extensions: Make extensions for each run, which are called at fixed places of its steps:
                classes without arguments, for example.

        Raises:
            ModelError: If the engine cannot run the model, follow its generation config, pack its
                weights, or compile it.
            PlanError: If the plan does not fit the model.
        """
        check_sizes(slots=slots)
        if steps_per_read is not None:
            check_sizes(steps_per_read=steps_per_read)
            if steps_per_read > MOST_STEPS_PER_READ:
                msg = (
                    f"the engine was given steps_per_read={steps_per_read}; give 1 or 2: it "
                    "launches one step more, and no others, before it reads the tokens of one"
                )
                raise KVPolicyError(msg)
        if wants_packing(cpu_weights):
            if isinstance(model, ModelAdapter):
                msg = (
                    f"the engine was given cpu_weights={cpu_weights!r} and an adapter, whose "
                    "model is chosen already; make the adapter of packed_model(model)"
                )
                raise KVPolicyError(msg)
            model = packed_model(model, cpu_weights=cpu_weights)
        super().__init__(
            model,
            tokenizer,
            plan,
            chunk=chunk,
            max_tokens_per_forward=max_tokens_per_forward,
            on_hook_error=on_hook_error,
            eager=eager,
            extensions=extensions,
        )
        self.rules = GenerationRules(self.adapter.model, self.adapter.vocab_size)
        self.weights = self.adapter.weights
        self.num_slots = slots
        self.compiled = self._compiled() if compile else None
        self.prefix_store, self.prefixes = prefix_store, None
        if prefix_store is not None:
            self.prefixes = bind_prefixes(prefix_store, self)
        on_cpu = self.adapter.device.type == "cpu"
        self.steps_per_read = steps_per_read or (1 if on_cpu else MOST_STEPS_PER_READ)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse copies and pickles, which would share slots, threads and files.

        Raises:
            KVPolicyError: Always.
        """
        msg = (
            "an engine cannot be copied or pickled; make another one with Engine(model, tokenizer, "
            "plan), which may have the same model"
        )
        raise KVPolicyError(msg)

    @property
    def compile_s(self) -> float:
        """Seconds in which decode steps were compiled so far."""
        return 0.0 if self.compiled is None else self.compiled.seconds

    @property
    def clock(self) -> abc.Callable[[], float]:
        """Tells the time in seconds; it stands still while decode steps are compiled."""
        return time.perf_counter if self.compiled is None else self.compiled.clock

    def _compiled(self) -> Compiled:
        reason = compile_problem(self.adapter.device, packed=self.weights.packed_bytes > 0)
        if self.eager_reason is not None:
            reason = f"its decode steps are not static: {self.eager_reason}"
        if reason is not None:
            name = type(self.adapter.model).__name__
            msg = f"the forward of {name} cannot be compiled: {reason}; leave out compile"
            raise ModelError(msg)
        return Compiled()

    def generate(
        self,
        prompts: abc.Iterable[str | abc.Sequence[int] | Request],
        *,
        max_new_tokens: int = DEFAULT_NEW_TOKENS,
        sampling: Sampling | abc.Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        stop: str | abc.Iterable[str] = (),
        stop_ids: abc.Iterable[int] | None = None,
        min_new_tokens: int | None = None,
    ) -> "Run":
        """Continue prompts.

        Args:
            prompts: Texts, token ids, or requests, to which the other arguments do not apply.
            max_new_tokens: The most tokens to generate for each.
            sampling: How tokens are sampled, for all prompts or one for each.
            stop: Texts that end a generation.
            stop_ids: Tokens that end a generation; ``None`` means the model's own.
            min_new_tokens: Tokens before which ``stop_ids`` are not drawn; ``None``: as the
                model's generation config says.

        Returns:
            A run: iterate over it for results as they finish. Nothing is computed before.
        """
        return Run(
            self,
            _requests(
                prompts,
                max_new_tokens=max_new_tokens,
                sampling=sampling,
                stop=stop,
                stop_ids=stop_ids,
                min_new_tokens=min_new_tokens,
            ),
        )

    def open_run(
        self,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
        on_hook_error: OnHookError | None = None,
    ) -> "Run":
        """A run to which requests may be submitted at any time; slabs are allocated now.

        Args:
            max_len: The most tokens of a sequence, prompt and generation together; ``None``: the
                model's positions. Slabs of layers without a budget have so many rows.
            max_prompt_len: The most tokens of a prompt, which matters where a plan keeps the rows
                of prompts; ``None``: ``max_len``.
            kv_memory: The most bytes of the slabs of all slots, of all else that belongs to slots,
                and of the copy of a layer that a compaction makes. It says how many slots there
                are; ``None``: as many as the engine has. Attention in prefill takes more for a
                moment in layers with a sliding window, and where heads share rows; see
                `RunReport.peak_kv_bytes`.
            max_waiting: Requests that may wait while all slots are in use; ``None``: any number.
            on_hook_error: What happens if a policy fails, see `Engine`; ``None``: as there.

        Raises:
            KVPolicyError: If a limit is invalid, or ``kv_memory`` has no room for one sequence.
        """
        limits = Limits.of(
            self,
            max_len=max_len,
            max_prompt_len=max_prompt_len,
            kv_memory=kv_memory,
            max_waiting=max_waiting,
        )
        return Run(self, limits=limits, on_hook_error=on_hook_error)

    def stream(self, prompt: str | abc.Sequence[int] | Request, **options: Any) -> "Stream":
        """Continue one prompt; iterate over the stream for its text, piece by piece.

        Args:
            prompt: Text, token ids, or a request.
            options: As for `generate`.
        """
        # Pieces are wanted one by one, and the first one as soon as it is there.
        return Stream(Run(self, _requests([prompt], **options), takes_turns=True, steps_per_read=1))


def _requests(
    prompts: abc.Iterable[str | abc.Sequence[int] | Request],
    *,
    max_new_tokens: int = DEFAULT_NEW_TOKENS,
    sampling: Sampling | abc.Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
    stop: str | abc.Iterable[str] = (),
    stop_ids: abc.Iterable[int] | None = None,
    min_new_tokens: int | None = None,
) -> list[Request]:
    """The requests of prompts; the arguments are those of `Engine.generate`."""
    if isinstance(prompts, (str, Request)):
        msg = f"generate() was given one prompt, {prompts!r:.60}; give a list of prompts"
        raise KVPolicyError(msg)
    if isinstance(prompts, (bytes, abc.Mapping)) or not isinstance(prompts, abc.Iterable):
        msg = f"prompts were given as {prompts!r:.60}; give a list of prompts"
        raise KVPolicyError(msg)
    prompts = list(prompts)
    samplings = samplings_of(sampling, len(prompts))
    return [
        prompt
        if isinstance(prompt, Request)
        else Request(prompt, max_new_tokens, one, stop, stop_ids, min_new_tokens=min_new_tokens)
        for prompt, one in zip(prompts, samplings, strict=True)
    ]


class Run:
    """Requests being served; iterate over it for their results as they finish.

    `Engine.generate` makes a run of a list of requests, which accepts no others, and
    `Engine.open_run` one to which requests may be submitted at any time: `submit`, `cancel` and
    `close` may be called from any thread, while another runs the steps. Iterating serves what was
    submitted, and ends when nothing is left.

    Attributes:
        engine: Serves them.
        requests: The requests it was made with, in order of arrival.
        limits: What it accepts later; ``None``: nothing.
        tokenizer: The engine's.
        core: The cache, with what computes, evicts and extends.
        scheduler: Which sequence has which slot, and what is done next.
    """

    def __init__(
        self,
        engine: Engine,
        requests: abc.Sequence[Request] = (),
        choose: ChooseTokens | None = None,
        *,
        limits: Limits | None = None,
        takes_turns: bool = False,
        steps_per_read: int | None = None,
        on_hook_error: OnHookError | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Validate and enqueue requests, and allocate slabs.

        Args:
            engine: Serves them.
            requests: The requests.
            choose: Chooses the next tokens in place of the sampling of the requests; it can
                force sequences along given tokens, to measure the model there.
            limits: What is accepted later; ``None``: nothing.
            takes_turns: See `Scheduler`; always so if requests may come later.
            steps_per_read: See `Engine`; ``None``: as the engine says.
            on_hook_error: What happens if a policy fails, see `Engine`; ``None``: as there.
            clock: Tells the time in seconds by which deadlines are checked.
        """
        self.engine, self.tokenizer = engine, engine.tokenizer
        self.requests, self.limits = tuple(requests), limits
        self._failures: list[HookFailure] = []
        self._new_tokens: list[tuple[int, int]] = []
        self._new_logprobs: dict[int, list[TokenLogprobs]] = {}
        self._results: list[Result] = []
        self._unread: tuple[Step, Output] | None = None  # launched, and its tokens were not read
        self._broken_by: BaseException | None = None
        self._started: float | None = None
        self._compiled_before = engine.compile_s
        errors = engine.errors.of_run(on_hook_error, self._failures.append)
        self._arrivals = Arrivals(
            engine.adapter,
            engine.rules,
            engine.tokenizer,
            engine.resuming,
            engine.clock,
            None if limits is None else limits.max_len,
            None if limits is None else limits.max_prompt_len,
            longest_kept(engine.plan),
            engine.plan.padding == "stored",
        )
        self._queue = RequestQueue(clock, None if limits is None else limits.most_open)
        refused = self._enqueue()
        num_slots, longest, staying, entering = self._size()
        max_steps = 1 if choose is not None else steps_per_read or engine.steps_per_read
        self.core = core_of(
            engine,
            num_slots,
            longest,
            staying,
            entering,
            max_steps=0 if engine.eager_reason else max_steps,
            compiled=engine.compiled,
            errors=errors,
            prefixes=engine.prefixes,
        )
        self._costs = Costs(engine.clock, self.core.timings)
        self._sampler = Sampler(engine.adapter.processes, choose)
        self.scheduler = Scheduler(
            self.core,
            self._queue,
            self._sampler,
            engine.scheduling,
            errors,
            self._costs,
            chunk=engine.chunk,
            max_tokens_per_forward=engine.max_tokens_per_forward,
            takes_turns=takes_turns or limits is not None,
        )
        for result in refused:
            self._emit(result)

    def _enqueue(self) -> list[Result]:
        """Enqueue the requests; the results of those that cannot be served."""
        refused: list[Result] = []
        for request in self.requests:
            try:
                self._queue.put(self._arrivals.sequence_of(request))
            except RequestError as error:
                number = self._queue.refuse()
                refused.append(Result(number, finish_reason="error", error=str(error)))
        self._queue.take_in()
        if self.limits is None:
            self._queue.close("this run was made of a list; open one with engine.open_run()")
        return refused

    def _size(self) -> tuple[int, int, int, int | None]:
        """Slots, and tokens of the longest sequence and prompts, as `core_of` takes them."""
        if self.limits is not None:
            return self.limits.num_slots, self.limits.max_len, self.limits.max_prompt_len, None
        sequences = self.waiting
        num_slots = min(self.engine.num_slots, max(len(sequences), 1))
        longest = max((seq.max_len for seq in sequences), default=1)
        staying = max((seq.num_staying for seq in sequences), default=1)
        return num_slots, longest, staying, max((len(seq.prompt) for seq in sequences), default=1)

    # The loop

    @torch.no_grad()
    def _advance(self) -> None:
        """Admit, evict, schedule, run, sample, commit, finish.

        Where a step may run ahead, it is the step before it that the last three words are about.
        """
        core, scheduler, costs = self.core, self.scheduler, self._costs
        scheduler.take_in()
        if scheduler.is_interrupted:
            self.catch_up()
        changed = scheduler.admit()
        with costs.of_eviction():
            core.evictor.evict(changed)
        before = self._unread
        step = scheduler.schedule(None if before is None else before[0])
        if step is not None:
            with costs.of_step(step):
                output = core.run(step)
        self._read()
        if step is not None:
            self._unread = step, output
            if scheduler.runs_ahead(step):
                core.runner.count(step)
            else:
                self._read()
        self._finish_ended()

    @torch.no_grad()
    def catch_up(self) -> None:
        """Read the tokens of a step that was launched, if they were not read."""
        self._read()
        self._finish_ended()

    def _read(self) -> None:
        if self._unread is not None:
            (step, output), self._unread = self._unread, None
            with self._costs.of_reading(step):
                drawn = self._sampler.sample(step, output)
                self.core.commit(step, output, drawn)

    def _finish_ended(self) -> None:
        for seq in self.scheduler.finish():
            self._finish(seq)

    def step(self) -> Events:
        """Do one step; return its tokens and all results that were not returned before.

        Raises:
            HookError: As for iterating.
            KVPolicyError: The run has ended in the middle of a step before.
        """
        if self._broken_by is not None:
            msg = (
                f"this run ended in the middle of a step with {type(self._broken_by).__name__} "
                "and cannot go on; start another with engine.generate()"
            )
            raise KVPolicyError(msg) from self._broken_by
        start = time.perf_counter()
        self._started = start if self._started is None else self._started
        try:
            self._advance()
        except BaseException as error:
            # Also if interrupted: some layers may have stored tokens that others have not.
            self._broken_by = error
            for seq in self.scheduler.take_ended():
                self._finish(seq)
            raise
        self._tell(self.active)
        self._costs.report.elapsed_s = time.perf_counter() - self._started
        return self._take_events()

    def _take_events(self) -> Events:
        """What was not returned before."""
        failures, self._failures[:] = [*self._failures], []
        events = Events(self._new_tokens, self._results, self._new_logprobs, failures)
        self._new_tokens, self._results, self._new_logprobs = [], [], {}
        return events

    def _tell(self, sequences: abc.Iterable[Sequence]) -> None:
        """Note the tokens of sequences that were not told of."""
        told_of, num_before = self._new_tokens, len(self._new_tokens)
        new = [seq for seq in sequences if len(seq.tokens) > seq.num_told]
        for seq in new:
            for token in seq.tokens[seq.num_told :]:
                told_of.append((seq.id, token))
            if seq.logprobs and (own := seq.logprobs[seq.num_told - seq.num_before :]):
                self._new_logprobs[seq.id] = own
            seq.num_told = len(seq.tokens)
        self._costs.note_tokens(new, len(told_of) - num_before)

    def _finish(self, seq: Sequence) -> None:
        self._tell([seq])
        self._emit(seq.result())

    def _emit(self, result: Result) -> None:
        self._queue.finish(result.id)
        self._results.append(result)
        self._costs.report.add(result)

    # Results

    def __iter__(self) -> abc.Iterator[Result]:
        """Yield results as requests finish, in no particular order.

        Raises:
            HookError: A policy has failed, and the engine raises errors. The run is over then:
                results that were ready before are still yielded if it is iterated over again,
                followed by a `KVPolicyError`.
        """
        while self._queue.num_open or self._results:
            if not self._results:
                self._results = self.step().results
            # One at a time: the rest is kept if the caller stops iterating and comes back.
            while self._results:
                yield self._results.pop(0)

    def results(self) -> list[Result]:
        """Serve all remaining requests; results in the order of the prompts."""
        return sorted(self, key=lambda result: result.id)

    @property
    def done(self) -> bool:
        """Whether it accepts no request, and every request has its result, which was yielded."""
        return self._queue.is_closed and not (self._queue.num_open or self._results)

    @property
    def active(self) -> list[Sequence]:
        """The sequences being served, in the order of their slots."""
        return self.scheduler.slots.active

    @property
    def waiting(self) -> list[Sequence]:
        """The sequences that wait for a slot, in order of arrival."""
        return list(self._queue.waiting.values())

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return self._queue.num_open

    @property
    def cache(self) -> KVCache:
        """The KV cache: what each slot holds, and in how many bytes."""
        return self.core.cache

    @property
    def evictor(self) -> Evictor:
        """What evicts its rows."""
        return self.core.evictor

    @property
    def report(self) -> RunReport:
        """What the run has cost so far."""
        so_far, engine, core = self._costs.report, self.engine, self.core
        note = nothing_evicted(engine.plan, so_far.rows_evicted, so_far.peak_rows)
        fields: dict[str, Any] = {**core.timings.read()}
        for one in core.extensions:
            fields |= one.report()
        return attrs.evolve(
            so_far,
            note=note or evicted_in_prompt(engine.plan, so_far.longest_prompt),
            prompt_tokens=self.scheduler.num_prompt_tokens,
            peak_kv_bytes=core.cache.peak_bytes,
            num_processes=engine.adapter.processes.num_processes,
            packed_bytes=engine.weights.packed_bytes,
            released_bytes=engine.weights.released_bytes,
            path=f"eager: {reason}" if (reason := engine.eager_reason) else core.runner.path,
            compile_s=engine.compile_s - self._compiled_before,
            compactions=core.evictor.num_compactions,
            **fields,
        )

    @property
    def stats(self) -> EngineStats:
        """What the run does, and what it has cost so far."""
        running = len(self.active)
        rows = self.cache.rows[:, [seq.slot for seq in self.active]].sum(axis=1)
        return EngineStats(
            waiting=self.num_open - running,
            running=running,
            slots=len(self.scheduler.slots),
            rows=tuple(rows.tolist()),
            held_bytes=int(rows @ self.cache.row_bytes),
            report=self.report,
        )

    def extension(self, kind: type[Found]) -> Found:
        """The extension of a class, see ``extensions`` of `Engine`.

        Raises:
            KVPolicyError: The run has none.
        """
        found = self.core.extensions.find(kind)
        if found is None:
            msg = f"this run has no extension {kind.__name__}; give Engine(extensions=[...]) one"
            raise KVPolicyError(msg)
        return found

    def stop_strings_of(self, request: Request) -> tuple[str, ...]:
        """The stop strings of a request: its own, or those of the model's generation config."""
        return self._arrivals.stop_strings_of(request)

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
        self.catch_up()
        found = [seq for seq in self.active if seq.id == request_id]
        has_slot = bool(found)
        if not has_slot or not self.cache.seq_len[found[0].slot]:
            is_waiting = has_slot or request_id in self._queue.waiting
            has_begun = "has not begun" if is_waiting else "is not being served"
            msg = (
                f"no snapshot can be taken: request {request_id!r:.20} {has_begun}; for its end, "
                "ask for Request(snapshot=True)"
            )
            raise SnapshotError(msg)
        snapshot: SequenceSnapshot = snapshots_of(self.core).snapshot(found[0])
        return snapshot

    # Requests that come while it goes on

    def submit(self, request: Request) -> int:
        """Have a request served; returns its number, counted from 0.

        It gets a result in any case, also if it is cancelled.

        Raises:
            RequestError: If it cannot be served.
            QueueFullError: If all slots are in use and ``max_waiting`` requests wait.
            EngineClosedError: If the run is closed, as one of a list of requests always is.
        """
        return self._queue.put(self._arrivals.sequence_of(request))

    def close(self) -> None:
        """Accept no more requests; those that run or wait are served."""
        self._queue.close()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until there is something to do: a request runs or waits, or the run is closed.

        Args:
            timeout_s: Wait no longer than so many seconds.
        """
        if not self.num_open and not self._queue.is_closed:
            self._queue.wait(timeout_s)

    def wake(self) -> None:
        """Have `wait` return."""
        self._queue.wake()

    def end(self, error: str) -> Events:
        """End all requests with an error; nothing can be served afterwards.

        For a run that broke in the middle of a step: what the step had brought is returned, too.
        """
        self._queue.close(error)
        # Wherever the step has left them: a request may have left the queue and have no slot yet.
        self._unread = None
        for seq in self._queue.open_sequences():
            seq.fail(error)
            self._finish(seq)
        self.scheduler.end()
        return self._take_events()


class Stream:
    """The pieces of one generation: text, or token ids if the engine has no tokenizer.

    Attributes:
        result: The result; ``None`` until the generation ends.
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
