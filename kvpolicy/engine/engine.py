"""The engine: continuous batching, with compactions between forwards.

`Engine.step` is the loop: schedule, prefill, decode, compact, finish. A `Run` holds the requests of
one call of `Engine.generate` and is what the caller iterates over.
"""

import time
from collections import abc, deque
from contextlib import contextmanager
from typing import Any, get_args

import attrs
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvpolicy.cache.slab import KVCache
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.engine.arrival import Arrivals
from kvpolicy.engine.batch import RunningBatch
from kvpolicy.engine.footprint import slots_within
from kvpolicy.engine.heads import check_heads
from kvpolicy.engine.isolation import ErrorScope, OnHookError
from kvpolicy.engine.logprobs import Measured, TokenLogprobs
from kvpolicy.engine.request import Request, Sampling, samplings_of
from kvpolicy.engine.request_queue import Clock, RequestQueue
from kvpolicy.engine.results import EngineStats, Events, HookFailure, Result, RunReport
from kvpolicy.engine.resuming import Resuming
from kvpolicy.engine.reuse.reusing import Reusing
from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.engine.sampler import Sampler, sample_next
from kvpolicy.engine.savings import nothing_evicted
from kvpolicy.engine.sequence import Sequence
from kvpolicy.engine.snapshot import SequenceSnapshot
from kvpolicy.engine.stream import TextPieces
from kvpolicy.errors import KVPolicyError, ModelError, RequestError, SnapshotError
from kvpolicy.hooks.discovery import policy_names
from kvpolicy.kernels.draw import NO_TOKEN
from kvpolicy.kernels.flash_attention import GpuAttention, flash_problem
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.model.packed import CpuWeights, packed_model, wants_packing
from kvpolicy.model.static_forward import Compiled, compile_problem
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import Bound

DEFAULT_SLOTS = 8
DEFAULT_CHUNK = 512
DEFAULT_MAX_TOKENS = 8192  # in one forward
DEFAULT_STEPS_PER_READ = 8  # on a GPU


class Engine:
    """Serves requests with a model, a plan, and a number of slots.

    Attributes:
        adapter: The model.
        tokenizer: Its tokenizer, if there is one.
        plan: The plan, resolved for this model.
        stacks: The policies of each layer.
        bound: What these have made of the weights of each layer.
        scheduling: The policies of `schedule`.
        errors: Isolates errors of hooks.
        resuming: Takes snapshots of sequences, and resumes them.
        prefix_store: Keeps parts of sequences, if there is one.
        reusing: Finds and stores them.
        num_slots: Sequences that are decoded together.
        chunk: The most prompt tokens of one sequence in one forward.
        eager_reason: Why decode steps take the eager path; ``None``: they are static.
        compiled: Runs static steps, if they are compiled.
        flash: Whether flash-attn attends where it can.
        max_tokens_per_forward: The most prompt tokens of all sequences in one forward.
        weights: The packed weights of the model, if it has any.
        steps_per_read: The most static decode steps whose tokens are read together.
    """

    def __init__(
        self,
        model: PreTrainedModel | ModelAdapter,
        tokenizer: Any = None,
        plan: Plan | ResolvedPlan | None = None,
        *,
        slots: int = DEFAULT_SLOTS,
        chunk: int = DEFAULT_CHUNK,
        max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
        on_hook_error: OnHookError = "raise",
        eager: bool = False,
        compile: bool = False,
        cpu_weights: CpuWeights = "plain",
        gpu_attention: GpuAttention = "triton",
        steps_per_read: int | None = None,
        prefix_store: PrefixStore | None = None,
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
                a CPU, with products that differ by rounding. The plain weights stay in memory
                beside the packed ones, since the model is left as it is; to release them, give
                ``packed_model(model, release=True)`` for the model instead.
            gpu_attention: What attends in decode steps on a GPU: ``"triton"``, our kernel, or
                ``"flash-attn"``, the package, in layers whose policies want no sums of attention
                and that have neither sinks nor a sliding window, and our kernel in the others.
                Tokens may differ by rounding; ``kvpolicy bench --gpu`` says which is faster.
            steps_per_read: The most static decode steps that follow each other before their
                tokens are read. Stop strings, cancelling and new requests take effect when they
                are; results are the same. ``None``: 8 on a GPU, where reading is a wait, and 1 on
                a CPU.
            prefix_store: Keeps rows of prompts and of conversations for requests that begin with
                the same tokens, which then compute the rest only. ``None``: nothing is reused.

        Raises:
            ModelError: If the engine cannot run the model, pack its weights, compile it, or have
                flash-attn attend.
            PlanError: If the plan does not fit the model.
        """
        sizes = {"slots": slots, "chunk": chunk, "max_tokens_per_forward": max_tokens_per_forward}
        if steps_per_read is not None:
            sizes["steps_per_read"] = steps_per_read
        for name, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                msg = f"the engine was given {name}={value!r}; expected an integer of at least 1"
                raise KVPolicyError(msg)
        if not isinstance(plan, (Plan, ResolvedPlan)):
            given = "no plan" if plan is None else f"{plan!r:.60} for a plan"
            msg = (
                f"the engine was given {given}; write Plan.load(FILE) or Plan.uniform(NAME, "
                f"budget=128), where NAME is one of {', '.join(policy_names())}"
            )
            raise KVPolicyError(msg)
        self.errors = ErrorScope(on_hook_error)
        if wants_packing(cpu_weights):
            if isinstance(model, ModelAdapter):
                msg = (
                    "the engine was given cpu_weights='packed' and an adapter, whose model is "
                    "chosen already; make the adapter of packed_model(model)"
                )
                raise KVPolicyError(msg)
            model = packed_model(model)
        self.adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
        self.weights = self.adapter.weights
        self.tokenizer = tokenizer
        self.plan = plan.resolve(self.adapter.num_layers)
        check_heads(self.plan, self.adapter)
        self.stacks = self.plan.stacks()
        self.scheduling = self.plan.scheduling_stack()
        self.resuming = Resuming(self.adapter, self.plan, self.stacks, tokenizer)
        self.num_slots = slots
        self.chunk = chunk
        self.max_tokens_per_forward = max_tokens_per_forward
        self.adapter.add_hooks(
            steered=[i for i, stack in enumerate(self.stacks) if stack.is_steered(i)],
            states=any("hidden_states" in stack.observes for stack in self.stacks),
            marked=[i for i, stack in enumerate(self.stacks) if stack.is_marked],
        )
        self.adapter.check_forward()
        self.bound = self._bind()
        self.eager_reason = "asked for" if eager else self.adapter.eager_reason
        self.compiled = self._compiled() if compile else None
        self.flash = self._wants_flash(gpu_attention)
        self.prefix_store = prefix_store
        self.reusing = None
        if prefix_store is not None:
            self.reusing = Reusing(
                prefix_store, self.resuming, self.adapter, self.plan, self.stacks, tokenizer
            )
        on_cpu = self.adapter.device.type == "cpu"
        self.steps_per_read = steps_per_read or (1 if on_cpu else DEFAULT_STEPS_PER_READ)

    def generate(
        self,
        prompts: abc.Iterable[str | abc.Sequence[int] | Request],
        *,
        max_new_tokens: int = 256,
        sampling: Sampling | abc.Sequence[Sampling] = Sampling(),  # noqa: B008 - frozen
        stop: str | abc.Iterable[str] = (),
        stop_ids: abc.Iterable[int] | None = None,
    ) -> "Run":
        """Continue prompts.

        Args:
            prompts: Texts, token ids, or requests, to which the other arguments do not apply.
            max_new_tokens: The most tokens to generate for each.
            sampling: How tokens are sampled, for all prompts or one for each.
            stop: Texts that end a generation.
            stop_ids: Tokens that end a generation; ``None`` means the model's own.

        Returns:
            A run: iterate over it for results as they finish. Nothing is computed before.
        """
        if isinstance(prompts, (str, Request)):
            msg = f"generate() was given one prompt, {prompts!r:.60}; give a list of prompts"
            raise KVPolicyError(msg)
        if isinstance(prompts, (bytes, abc.Mapping)) or not isinstance(prompts, abc.Iterable):
            msg = f"prompts were given as {prompts!r:.60}; give a list of prompts"
            raise KVPolicyError(msg)
        prompts = list(prompts)
        samplings = samplings_of(sampling, len(prompts))
        requests = [
            prompt
            if isinstance(prompt, Request)
            else Request(prompt, max_new_tokens, one, stop, stop_ids)
            for prompt, one in zip(prompts, samplings, strict=True)
        ]
        return Run(self, requests)

    def open_run(
        self,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
        on_hook_error: OnHookError | None = None,
    ) -> "OpenRun":
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
        return OpenRun(
            self,
            max_len=max_len,
            max_prompt_len=max_prompt_len,
            kv_memory=kv_memory,
            max_waiting=max_waiting,
            on_hook_error=on_hook_error,
        )

    def stream(self, prompt: str | abc.Sequence[int] | Request, **options: Any) -> "Stream":
        """Continue one prompt; iterate over the stream for its text, piece by piece.

        Args:
            prompt: Text, token ids, or a request.
            options: As for `generate`.
        """
        return Stream(self.generate([prompt], **options))

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

    def _bind(self) -> list[Bound]:
        """Show policies the weights of their layers."""
        binding = [i for i, stack in enumerate(self.stacks) if stack.implements("bind")]
        bound = [Bound() for _ in self.stacks]
        if binding:
            with torch.no_grad():
                for index, weights in zip(
                    binding, self.adapter.layer_weights(binding), strict=True
                ):
                    bound[index] = self.stacks[index].bind(index, weights)
        return bound

    def _wants_flash(self, gpu_attention: GpuAttention) -> bool:
        if gpu_attention not in get_args(GpuAttention):
            msg = (
                f"gpu_attention was given as {gpu_attention!r:.60}; choose 'triton' or 'flash-attn'"
            )
            raise KVPolicyError(msg)
        if gpu_attention == "triton":
            return False
        reason = flash_problem(self.adapter.device, self.adapter.model.dtype)
        if self.eager_reason is not None:
            reason = f"decode steps are not static: {self.eager_reason}"
        if reason is not None:
            msg = f"flash-attn cannot attend: {reason}; leave out gpu_attention"
            raise ModelError(msg)
        return True

    @torch.no_grad()
    def step(self, run: "Run") -> None:
        """One step of the loop: schedule, prefill, decode, compact, finish."""
        batch = run.batch
        run.begin_step()
        while (group := run.next_group()) is not None:
            with run.prefill_time(group):
                self._prefill(run, group)
                batch.compact()
            run.finish_ended()
            if run.takes_turns:
                break
        if batch.ready:
            with run.decode_time():
                self._decode(run)
                batch.compact()
                run.finish_ended()

    def _prefill(self, run: "Run", group: abc.Sequence[Sequence]) -> None:
        """A prefill forward: the next chunks of the prompts of a group."""
        chunk = run.batch.begin_prefill_chunk(group)
        if chunk is None:  # they wait for a prefix that another group computes, or have failed
            return
        run.batch.finish_prefill_chunk(*self.adapter.forward(chunk), run.append_tokens)

    def _decode(self, run: "Run") -> None:
        """A decode step, or several static ones whose tokens are read together."""
        batch, given = run.batch, run.batch.begin_decode()
        if not isinstance(step := given.step, StaticStep):
            batch.finish_decode(*self.adapter.forward(given), run.append_tokens)
            return
        given.draws = draws = not run.has_sampler
        num_done = 0
        for _ in range(batch.num_steps):
            logits, states = self.adapter.forward(given)
            if batch.has_failed:
                break
            if not draws:
                step.finish(logits, states, run.sampled(logits))
            run.measure(batch.served, logits, step.tokens[num_done])
            num_done += 1
        batch.finish_static(num_done, run.take_tokens)

    def new_batch(
        self,
        num_slots: int,
        longest: int,
        longest_prompt: int | None = None,
        *,
        max_steps: int = 0,
        errors: ErrorScope | None = None,
    ) -> RunningBatch:
        """An empty batch for so many sequences of at most ``longest`` tokens.

        A prompt may have all of them unless ``longest_prompt`` is given. ``max_steps`` is the most
        static decode steps whose tokens are read together; 0: decode steps are not static.
        ``errors`` isolates errors of hooks, if the engine's scope does not.
        """
        return RunningBatch(
            self.adapter,
            self.plan,
            self.stacks,
            self.bound,
            errors or self.errors,
            self.resuming,
            tokenizer=self.tokenizer,
            chunk=self.chunk,
            max_tokens_per_forward=self.max_tokens_per_forward,
            num_slots=num_slots,
            longest=longest,
            longest_prompt=longest_prompt,
            max_steps=max_steps,
            compiled=self.compiled if max_steps else None,
            flash=self.flash,
            reusing=self.reusing,
        )


class Run:
    """Requests being served; iterate over it for their results as they finish.

    Attributes:
        engine: Serves them.
        requests: The requests it was made with, in order of arrival.
        tokenizer: The engine's.
        batch: The sequences in their slots, with their cache.
        takes_turns: Whether a step has one prefill forward at most, so that sequences that are
            decoded wait no longer for their next token, and new requests no longer to be noticed.
            If not, the prompts of all free slots are prefilled first.
    """

    takes_turns = False

    def __init__(
        self,
        engine: Engine,
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
        engine: Engine,
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
            engine.adapter, engine.tokenizer, engine.resuming, self._clock, max_len, max_prompt_len
        )
        self._groups: deque[list[Sequence]] = deque()  # whose prompts are not all in
        self._num_prefills = 0
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
        so_far = self._report
        timings: dict[str, Any] = {**self.batch.timings.read()}
        return attrs.evolve(
            so_far,
            note=nothing_evicted(self.engine.plan, so_far.rows_evicted, so_far.peak_rows),
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
            self.engine.step(self)
        except BaseException as error:
            # Also if interrupted: some layers may have stored tokens that others have not.
            self._broken_by = error
            raise
        self._report.elapsed_s = time.perf_counter() - self._started

    # What `Engine.step` calls

    def begin_step(self) -> None:
        """Take over new requests, and end those that were cancelled or whose time is up."""
        queue = self._queue
        if not queue.take_in():
            return
        for seq in queue.pop_ended():
            self._finish(seq)
        for seq in self.batch.active:
            seq.finish_reason = queue.reason_to_end(seq)
        self.finish_ended()
        queue.forget_ends()

    def next_group(self) -> list[Sequence] | None:
        """Sequences whose prompts are to be prefilled; ``None`` if there are none.

        Waiting ones are admitted before. Groups follow one another, or take turns with each chunk.
        """
        if self._groups:
            self._drop_prefilled()
        while (self.takes_turns or not self._groups) and (admitted := self._schedule()):
            for group in admitted:
                with self.prefill_time(group):
                    self.batch.admit(group)
                self._report.prompt_tokens += sum(seq.num_prompt for seq in group)
            self._groups += admitted
            self.finish_ended()
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

    def append_tokens(self, sequences: abc.Sequence[Sequence], logits: Tensor) -> None:
        """Sample the next token of each sequence."""
        tokens = (self._sampler or sample_next)(sequences, logits)
        same = self.engine.adapter.processes.same_tokens(tokens)
        self.measure(sequences, logits, same)
        self.take_tokens(sequences, same.tolist())

    @property
    def has_sampler(self) -> bool:
        """Whether tokens are chosen by a sampler and not by the static step itself."""
        return self._sampler is not None

    def sampled(self, logits: Tensor) -> Tensor:
        """The next tokens after a static step, as the sampler chooses them."""
        assert self._sampler is not None
        return self._sampler(self.batch.served, logits)

    def measure(self, sequences: abc.Sequence[Sequence], logits: Tensor, tokens: Tensor) -> None:
        """Note the log-probabilities of tokens that `take_tokens` will get, if any are wanted."""
        wanted: dict[int, tuple[int, int]] = {}
        for row, seq in enumerate(sequences):
            if seq.request.logprobs is not None:
                wanted[seq.id] = row, seq.request.logprobs
        self._measured.append(Measured(wanted, logits, tokens) if wanted else None)

    def take_tokens(self, sequences: abc.Sequence[Sequence], tokens: abc.Sequence[int]) -> None:
        """Append the next token of each sequence; one without a token ends with an error."""
        now, measured = self._clock(), self._measured.popleft()
        for seq, token in zip(sequences, tokens, strict=True):
            if token == NO_TOKEN:
                seq.fail(_no_token(len(seq.tokens)))
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

    def finish_ended(self) -> None:
        """Release the slots of sequences that have ended, and emit their results."""
        for seq in self.batch.release():
            self._finish(seq)

    @contextmanager
    def prefill_time(self, group: abc.Sequence[Sequence]) -> abc.Iterator[None]:
        """Count the seconds of a block as prefill of a group."""
        start = self._clock()
        self._num_prefills += 1
        yield
        elapsed = self._clock() - start
        for seq in group:
            seq.prefill_s += elapsed
        self._report.prefill_s += elapsed

    @contextmanager
    def decode_time(self) -> abc.Iterator[None]:
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


def _no_token(num_tokens: int) -> str:
    return (
        f"the logits after {num_tokens} generated tokens hold NaN or infinity, so no token is the "
        "likeliest; load the model in another precision, such as float32, and check its weights "
        "and the policies that steer it"
    )


class OpenRun(Run):
    """A run to which requests may be submitted at any time; `Engine.open_run` makes one.

    `submit`, `cancel` and `close` may be called from any thread, while another runs the steps.
    Iterating over it serves what was submitted, and ends when nothing is left.

    Attributes:
        max_len: The most tokens of a sequence.
        max_prompt_len: The most tokens of a prompt.
    """

    takes_turns = True

    def __init__(
        self,
        engine: Engine,
        *,
        max_len: int | None = None,
        max_prompt_len: int | None = None,
        kv_memory: int | None = None,
        max_waiting: int | None = None,
        on_hook_error: OnHookError | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Allocate slabs; the arguments are those of `Engine.open_run`.

        Args:
            engine: Serves the requests.
            max_len: See there.
            max_prompt_len: See there.
            kv_memory: See there.
            max_waiting: See there.
            on_hook_error: See there.
            clock: Tells the time in seconds by which deadlines are checked.
        """
        positions = engine.adapter.max_positions
        self.max_len = _limit("max_len", max_len, 2, positions)
        self.max_prompt_len = _limit("max_prompt_len", max_prompt_len, 1, self.max_len)
        num_slots = engine.num_slots
        if kv_memory is not None:
            _limit("kv_memory", kv_memory, 1, None)
            num_slots = slots_within(
                kv_memory,
                engine.plan,
                engine.adapter,
                longest=self.max_len,
                longest_prompt=self.max_prompt_len,
            )
        most_open = None
        if max_waiting is not None:
            most_open = num_slots + _limit("max_waiting", max_waiting, 0, None)
        self.requests = ()
        self._set_up(
            engine,
            RequestQueue(clock, most_open),
            max_len=self.max_len,
            max_prompt_len=self.max_prompt_len,
            on_hook_error=on_hook_error,
        )
        self.batch = self._new_batch(num_slots, self.max_len, self.max_prompt_len)

    def submit(self, request: Request) -> int:
        """Have a request served; returns its number, counted from 0.

        It gets a result in any case, also if it is cancelled.

        Raises:
            RequestError: If it cannot be served.
            QueueFullError: If all slots are in use and ``max_waiting`` requests wait.
            EngineClosedError: If the run is closed.
        """
        return self._queue.put(self._arrivals.sequence_of(request))

    def close(self) -> None:
        """Accept no more requests; those that run or wait are served."""
        self._queue.close()

    @property
    def done(self) -> bool:
        """Whether the run is closed, and every request has its result, which was yielded."""
        return self._queue.is_closed and super().done

    @property
    def num_open(self) -> int:
        """Requests that run or wait."""
        return self._queue.num_open

    @property
    def stats(self) -> EngineStats:
        """What the run does, and what it has cost so far."""
        running, rows = len(self.batch.active), self.cache.rows.sum(axis=1)
        return EngineStats(
            waiting=self.num_open - running,
            running=running,
            slots=len(self.batch.slots),
            rows=tuple(rows.tolist()),
            held_bytes=int(rows @ self.cache.row_bytes),
            report=self.report,
        )

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
        for seq in self._queue.open_sequences():
            seq.fail(error)
            self._finish(seq)
        self._queue.take_in()
        self._queue.waiting.clear()
        return self._take_events()


def _limit(name: str, value: int | None, least: int, most: int | None) -> int:
    """A limit of an open run, checked; the most there can be if it is not given."""
    if value is None and most is not None:
        return most
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        msg = f"open_run() was given {name}={value!r:.60}; expected an integer of at least {least}"
        raise KVPolicyError(msg)
    return value if most is None else min(value, most)


class Stream:
    """The pieces of one generation: text, or token ids if the engine has no tokenizer.

    Attributes:
        result: The result; ``None`` until the generation ends.
    """

    def __init__(self, run: Run) -> None:
        self.result: Result | None = None
        self._run = run
        run.batch.max_steps = min(run.batch.max_steps, 1)  # pieces are wanted one by one

    @property
    def report(self) -> RunReport:
        """What the generation has cost so far."""
        return self._run.report

    def cancel(self) -> None:
        """End the generation before its next token."""
        self._run.cancel(0)

    def __iter__(self) -> abc.Iterator[Any]:
        """Yield what each token adds; the pieces together are the text of the result."""
        pieces = TextPieces(self._run.tokenizer, self._run.requests[0].stop)
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
