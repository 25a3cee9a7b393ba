"""The running batch: sequences in their slots, prefilled, decoded and compacted together.

A decode step serves the first slots. When a sequence ends, the next that is admitted takes its
slot; only where none waits, or where its prompt is not all in when others are decoded, do sequences
move, so that a step computes nothing for slots that take no part.

A batch runs no forward itself. ``begin_prefill_chunk`` and ``begin_decode`` give the input of one;
``finish_prefill_chunk`` and ``finish_decode`` take its output; ``compact`` evicts what is due. The
engine calls them in a loop, and so does `kvpolicy.hf.PolicyCache` within ``model.generate``.
"""

from collections import abc
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvpolicy.cache.layout import StepLayout
from kvpolicy.cache.slab import Slab
from kvpolicy.cache.static_step import StaticStep
from kvpolicy.engine.eviction.compaction import Compactor
from kvpolicy.engine.eviction.marker import Marker
from kvpolicy.engine.eviction.observer import Observer
from kvpolicy.engine.eviction.probing import Prober
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.logprobs import Measured
from kvpolicy.engine.requests.sampler import has_processors
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.reuse.resuming import Resuming
from kvpolicy.engine.reuse.reusing import PromptReuse, Reusing
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import SnapshotError
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.adapter import ForwardInput, ModelAdapter
from kvpolicy.model.graphs import GraphRunner
from kvpolicy.model.static_forward import Compiled, StaticForward, static_forward
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.state import Bound, Memory, RegisterFile

# Logits that a prefill forward has at most, if those after all of its tokens are wanted.
_MOST_LOGITS = 2**26

# Receives the logits after the newest token of some sequences, ``[B, V]``.
OnLogits = abc.Callable[[abc.Sequence[Sequence], Tensor], None]

# Receives the next token of some sequences.
OnTokens = abc.Callable[[abc.Sequence[Sequence], abc.Sequence[int]], None]


class RunningBatch:
    """Sequences in their slots, with the cache and what policies keep of them.

    Attributes:
        slots: The sequence in each slot; ``None``: it is free.
        cache: Their rows.
        longest_prompt: Tokens of the longest prompt, if they are known.
        timings: Seconds that policies took.
        compactor: Evicts rows.
        max_steps: The most static decode steps whose tokens are read together; 0: decode steps are
            not static.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        plan: ResolvedPlan,
        stacks: abc.Sequence[Stack],
        bound: abc.Sequence[Bound],
        errors: ErrorScope,
        resuming: Resuming,
        *,
        tokenizer: Any,
        chunk: int,
        max_tokens_per_forward: int,
        num_slots: int,
        longest: int,
        longest_prompt: int | None,
        compiled: Compiled | None,
        max_steps: int,
        reusing: Reusing | None = None,
    ) -> None:
        """Allocate everything for sequences of at most ``longest`` tokens.

        Args:
            adapter: The model.
            plan: The plan.
            stacks: The policies of each layer.
            bound: What these have made of the weights of each layer.
            errors: Isolates errors of hooks.
            resuming: Takes snapshots, and resumes them.
            tokenizer: The model's, if there is one.
            chunk: The most prompt tokens of one sequence in one forward.
            max_tokens_per_forward: The most prompt tokens of all sequences in one forward, pads
                included.
            num_slots: The most sequences.
            longest: Tokens of the longest sequence.
            longest_prompt: Tokens of the longest prompt, if they are known to be fewer.
            compiled: Runs static steps instead of the model as it is.
            max_steps: The most static decode steps whose tokens are read together; 0: decode
                steps are not static.
            reusing: Finds and stores parts of sequences; ``None``: nothing is reused.
        """
        self.slots: list[Sequence | None] = [None] * num_slots
        self.timings = PolicyTimings()
        self._plan, self._stacks, self._errors = plan, stacks, errors
        self._resuming = resuming
        self._tokenizer = tokenizer
        self._chunk = min(chunk, max_tokens_per_forward)
        self._max_tokens_per_forward = max_tokens_per_forward
        self._max_tokens_measured = max(_MOST_LOGITS // adapter.vocab_size, 1)
        self._steers = any(stack.is_steered(i) for i, stack in enumerate(stacks))
        self._forward: ForwardInput  # the last one begun, and its sequences
        self._served: list[Sequence] = []
        self.longest_prompt = longest_prompt
        self.cache = adapter.new_cache(self._slabs(longest), num_slots)
        policies = [policy for stack in stacks for policy in stack.policies]
        self._registers = RegisterFile(policies, num_slots, adapter.device)
        self.cache.slot_tensors += self._registers.all
        self._observer = Observer(
            plan.layers, stacks, self._registers, tokenizer, self.timings, errors
        )
        self._observer.attach(
            self.cache, adapter.hidden_size, adapter.model.dtype, adapter.last_device
        )
        self._marker = Marker(plan.layers, stacks, bound, self.timings, errors, adapter.processes)
        self._marker.attach(self.cache, adapter.hidden_size, adapter.model.dtype)
        # Each with what is known of a sequence: how many of its tokens were taken from the ring.
        self._rings = {
            name: ring
            for name, ring in (
                ("num_observed", self._observer.ring),
                ("num_marked", self._marker.ring),
            )
            if ring is not None
        }
        self.max_steps = max_steps
        # Policies that steer run in Python, which a graph would leave out.
        self._on_gpu = adapter.device.type == "cuda"
        replays = self._on_gpu and not self._steers
        self._static: StaticStep | None = None
        if max_steps:
            self._static = StaticStep(
                self.cache,
                max_steps,
                self._rings.values(),
                in_graph=compiled is not None,
                padded=replays,
            )
        self._compiled = compiled
        self._run: StaticForward = compiled or static_forward
        self._without_graphs = self._run
        self._graphs: GraphRunner | None = None
        if replays:
            self._graphs = self._run = GraphRunner(self._run)
        self._prober = Prober(
            adapter,
            self.cache,
            stacks,
            tokenizer,
            self.timings,
            errors,
            chunk=self._chunk,
            max_tokens_per_forward=max_tokens_per_forward,
        )
        self.compactor = Compactor(
            self.cache,
            plan.layers,
            stacks,
            self._observer,
            self._marker,
            self._prober,
            self.timings,
            errors,
            adapter.processes.layer_rows,
            bound,
        )
        self._reuse: PromptReuse | None = None
        if reusing is not None:
            self._reuse = PromptReuse(reusing, self.cache, self.snapshot, self._resume)

    @property
    def path(self) -> str:
        """How static steps are run, see `RunReport`."""
        path = "static, compiled" if self._compiled else "static"
        if self._graphs is None:
            return f"{path}, without graphs: policies steer" if self._on_gpu else path
        problem = self._graphs.problem
        return f"{path}, in graphs" if problem is None else f"{path}, without graphs: {problem}"

    @property
    def active(self) -> list[Sequence]:
        """The sequences being served, in the order of their slots."""
        return [seq for seq in self.slots if seq is not None]

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self.slots.count(None)

    @property
    def served(self) -> abc.Sequence[Sequence]:
        """The sequences of the last forward, without those that have ended and left."""
        return self._served

    @property
    def ready(self) -> list[Sequence]:
        """The sequences whose prompts are in: they have a token that a decode step can bring in."""
        return [seq for seq in self.slots if seq is not None and seq.tokens]

    @property
    def num_reused(self) -> int:
        """Prompt tokens so far whose rows were copied from a prefix store."""
        return 0 if self._reuse is None else self._reuse.num_reused

    def prefills(self, group: abc.Iterable[Sequence]) -> bool:
        """Whether the prompt of any sequence of a group is not all in."""
        return any(seq.finish_reason is None and self._num_left(seq) for seq in group)

    def grow(self, longest: int) -> None:
        """Enlarge the slabs for sequences of ``longest`` tokens; stored rows are kept."""
        self.cache.grow(self._slabs(longest))

    def take(self, source: "RunningBatch", numbers: abc.Sequence[int]) -> None:
        """Fill all slots with copies of sequences of another batch, or of this one.

        Slots, memory and registers are copied; the model, the plan and the policies are shared.

        Args:
            source: The other batch; it has the same engine, and slabs of the same size.
            numbers: Numbers of its sequences, one for each slot here. They are renumbered.

        Raises:
            SnapshotError: If a policy remembers something that cannot be copied.
        """
        by_number = {seq.id: seq for seq in source.active}
        chosen = [by_number[number] for number in numbers]
        copy = self._resuming.memories.copy
        copies = [seq.copied(number, copy(seq.memory)) for number, seq in enumerate(chosen)]
        self.cache.take(source.cache, [seq.slot for seq in chosen])
        self.slots = [None] * len(copies)
        for seq in copies:
            self._place(seq, seq.id)
        self.timings.take(source.timings)
        self.compactor.num_compactions = source.compactor.num_compactions

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Give the sequences of a group free slots."""
        free = (slot for slot, seq in enumerate(self.slots) if seq is None)
        for seq, slot in zip(group, list(free), strict=False):
            self._place(seq, slot)
            self.cache.prompt_len[slot] = seq.num_staying
            if seq.request.resume is not None:
                self._resume(seq, seq.request.resume)
            if self._reuse is not None:
                self._reuse.begin(seq)
        if self._plan.padding == "stored":
            self._count_pads(group)

    def snapshot(
        self,
        seq: Sequence,
        newest: abc.Sequence[int | None] | None = None,
        seen: int | None = None,
    ) -> SequenceSnapshot:
        """A copy of a sequence in its slot, as it is now.

        Args:
            seq: The sequence.
            newest: How many of its newest rows to copy in each layer, see `copy_slot`.
            seen: Leave out the tokens from this one on, see there.

        Raises:
            SnapshotError: If sequences cannot be copied.
        """
        self.compactor.settle()
        ended, seq.finish_reason = seq.finish_reason, None
        self._marker.flush(seq)  # so that no states wait, of which a snapshot knows nothing
        if seq.error is not None:
            raise SnapshotError(seq.error)
        seq.finish_reason = ended
        if seen is None:  # else its rows were fewer: peaks are noted later
            self.compactor.note_peak(seq)
        cache, observer = self.cache, self._observer
        return self._resuming.take(seq, cache, observer, self._registers, newest, seen)

    def put(self, snapshot: SequenceSnapshot, seq: Sequence) -> None:
        """Have a sequence hold in its slot what a snapshot holds.

        Raises:
            SnapshotError: If a policy remembers something that cannot be copied.
        """
        self._resuming.put(snapshot, seq, self.cache, self._observer, self._registers)
        self._marker.note_all([seq])

    def begin_prefill_chunk(
        self, group: abc.Iterable[Sequence] | None = None
    ) -> ForwardInput | None:
        """The next chunks of prompts that are not all in; ``None`` if all are.

        Args:
            group: The sequences to consider; ``None``: all.
        """
        among = self.active if group is None else [s for s in group if s.finish_reason is None]
        waiting = [seq for seq in among if self._num_left(seq)]
        if self._reuse is not None:
            waiting = self._reuse.ready(waiting)
        if not waiting:
            self._served = []
            return None
        lengths = self._chunk_lengths(waiting)
        self._served = served = waiting[: len(lengths)]
        slots = [seq.slot for seq in served]
        totals = [len(seq.prompt) for seq in served]
        step = StepLayout(self.cache, slots, lengths, totals)
        token_ids = torch.zeros(len(served), step.width, dtype=torch.int64)
        for row, (seq, length) in enumerate(zip(served, lengths, strict=True)):
            # Tokens generated before another turn may not all have been observed.
            self._observer.flush(seq)
            self._marker.flush(seq)
            start = int(self.cache.seq_len[seq.slot])
            token_ids[row, step.width - length :] = torch.tensor(seq.prompt[start : start + length])
        self._forward = ForwardInput(
            token_ids,
            step,
            None,
            self._observer.wants_states,
            wants_logits=_is_measured(served),
            marking=self._marker.in_prefill(served),
        )
        return self._forward

    def finish_prefill_chunk(
        self, logits: Tensor, states: Tensor | None, on_logits: OnLogits
    ) -> None:
        """Take the output of a prefill chunk.

        Args:
            logits: Logits after the newest token of each sequence, ``[B, V]``.
            states: Last hidden states, ``[B, L, M]``, if wanted.
            on_logits: Receives the logits of the sequences whose whole prompt is in.
        """
        served = self._served
        if self.has_failed:
            return
        self._marker.note_all(served)
        for seq, largest in zip(served, logits.amax(dim=1), strict=True):
            seq.largest = largest
        complete = [row for row, seq in enumerate(served) if not self._num_left(seq)]
        if self._forward.logits is not None:
            self._measure_prompts(self._forward.logits)
            self._forward.logits = None
        self.compactor.settle()
        if complete:
            on_logits([served[row] for row in complete], logits[complete])
        self._prober.note(served, logits)
        self._observer.show_prompt(served, states)
        if self._reuse is not None:
            self._reuse.note(served)

    def begin_decode(self) -> ForwardInput:
        """The forward of the newest token of every sequence whose prompt is in."""
        self._served = active = self._pack()
        newest = [seq.tokens[-1] for seq in active]
        step: StaticStep | StepLayout
        if self._static is None:
            token_ids = torch.tensor(newest)
            step = StepLayout(self.cache, range(len(active)), [1] * len(active))
        else:
            step = self._static
            taken = [[getattr(seq, name) for seq in active] for name in self._rings]
            step.begin(newest, [seq.continuation for seq in active], taken)
            token_ids = step.token_ids[: step.num_served]
        steer = partial(self._steer, token_ids) if self._steers else None
        self._forward = ForwardInput(
            token_ids[:, None],
            step,
            steer,
            self._observer.wants_states,
            run=self._without_graphs if self._graphs and self._is_recorded else self._run,
            marking=self._marker.in_decode(active, keeps=self._static is None),
        )
        return self._forward

    def finish_decode(self, logits: Tensor, states: Tensor | None, on_logits: OnLogits) -> None:
        """Take the output of a decode step that is not static.

        Args:
            logits: Logits after the newest token of each sequence, ``[B, V]``.
            states: Last hidden states, ``[B, 1, M]``, if wanted.
            on_logits: Receives the logits.
        """
        if self.has_failed:
            return
        self.compactor.settle()
        on_logits(self._served, logits)
        self._prober.note(self._served, logits)
        if states is not None:
            self._observer.note(self._served, states[:, -1])
        self._observer.flush_full(self._served)
        self._marker.flush_full(self._served)

    @property
    def num_steps(self) -> int:
        """Static steps that can follow each other before their tokens are read.

        Until then nothing is compacted or observed, and no policy is asked what is due.
        """
        served, most = self._served, self.max_steps
        if most == 1 or self.compactor.asks_due or has_processors(served):
            return 1
        if len(served) < len(self.slots) - self.num_free:  # prompts of the others are to go on
            return 1
        # Only the host finds stop strings: later steps would change tracks of the snapshot.
        keeps_all = self._reuse is not None and self._reuse.keeps_ends
        if any((seq.request.snapshot or keeps_all) and seq.request.stop for seq in served):
            return 1
        free = int(self.cache.num_free_rows([seq.slot for seq in served]).min())
        needed = max(seq.max_len - seq.num_tokens for seq in served)
        return min(
            most, free, needed, self._observer.num_free(served), self._marker.num_free(served)
        )

    @property
    def has_failed(self) -> bool:
        """Whether a policy failed in the last forward: it affects all of its sequences."""
        return self._served[0].error is not None

    def finish_static(self, num_steps: int, on_tokens: OnTokens) -> None:
        """Take the tokens of static decode steps.

        Args:
            num_steps: Steps since `begin_decode` that have drawn tokens.
            on_tokens: Receives the tokens of each step, without those of sequences that have
                ended in a step before.
        """
        assert self._static is not None
        served, failure = self._served, self._served[0].error
        if failure is not None:  # it came after these steps
            for seq in served:
                seq.finish_reason = seq.error = None
            if self._graphs is not None:
                self._graphs.forget()
        num_new = [0] * len(served)
        read = self._static.read(num_steps)
        self.compactor.settle()
        for tokens in read:
            going = [index for index, seq in enumerate(served) if seq.finish_reason is None]
            on_tokens([served[index] for index in going], [tokens[index] for index in going])
            for index in going:
                num_new[index] += 1
        if failure is not None:
            for seq in served:
                seq.fail(failure)
        newest = [seq.tokens[-1] for seq in served]
        self._static.count(num_new, newest, [seq.finish_reason is None for seq in served])
        going_on = [seq for seq in served if seq.error is None]
        self._observer.flush_full(going_on)
        self._marker.flush_full(going_on)

    def compact(self) -> None:
        """Evict rows of the sequences of the last forward, where that is due."""
        if self._served:
            self.compactor.compact(self._served)

    def release(self) -> list[Sequence]:
        """Take ended sequences out of their slots."""
        ended = [seq for seq in self.active if seq.finish_reason is not None]
        for seq in ended:
            self.compactor.note_peak(seq)
            if seq.request.snapshot and seq.error is None:
                try:
                    seq.snapshot = self.snapshot(seq)
                except SnapshotError as error:
                    seq.finish_reason, seq.error = "error", str(error)
            if self._reuse is not None:
                self._reuse.end(seq)
            self.cache.clear(seq.slot)
            self.slots[seq.slot] = None
        self._served = [seq for seq in self._served if seq.finish_reason is None]
        return ended

    @property
    def _is_recorded(self) -> bool:
        """Whether a listener receives hook calls of decode steps, which a replay leaves out."""
        return any(stack.marked_in_step and stack.is_recorded for stack in self._stacks)

    def _slabs(self, longest: int) -> list[Slab]:
        pairs = zip(self._plan.layers, self._stacks, strict=True)
        return [layer.slab(stack, longest, self.longest_prompt) for layer, stack in pairs]

    def _place(self, seq: Sequence, slot: int) -> None:
        seq.slot = slot
        self.slots[slot] = seq

    def _resume(self, seq: Sequence, snapshot: SequenceSnapshot) -> None:
        """Bring a sequence to where its snapshot was taken."""
        try:
            self.put(snapshot, seq)
        except SnapshotError as error:
            seq.fail(str(error))
            return
        # The last step of a request compacts nothing of it: that is done now, and before the
        # prompt of another turn is known, as it would have been had the sequence not been cut.
        going_on = seq.prompt, seq.tokens
        seq.prompt, seq.tokens = snapshot.prompt, [*snapshot.tokens]
        self.compactor.compact([seq])
        seq.prompt, seq.tokens = going_on

    def _pack(self) -> list[Sequence]:
        """Bring the sequences whose prompts are in to the first slots; returns them."""
        ready = self.ready
        if ready[-1].slot < len(ready):
            return ready
        taken = {seq.slot for seq in ready}
        places = (slot for slot in range(len(ready)) if slot not in taken)
        for seq in [seq for seq in ready if seq.slot >= len(ready)]:
            source, target = seq.slot, next(places)
            other = self.slots[target]
            if other is None:
                self.cache.move(source, target)
                self.slots[source] = None
            else:
                self.cache.swap(source, target)
                self._place(other, source)
            self._place(seq, target)
        return self.ready

    def _num_left(self, seq: Sequence) -> int:
        """Prompt tokens that are not in yet."""
        if seq.error is not None:
            return 0
        return max(len(seq.prompt) - int(self.cache.seq_len[seq.slot]), 0)

    def _chunk_lengths(self, sequences: abc.Sequence[Sequence]) -> list[int]:
        """Prompt tokens of the next forward, of as many of the first sequences as it may have.

        The others wait until the prompts before theirs are in.
        """
        free = self.cache.num_free_rows([seq.slot for seq in sequences]).tolist()
        lengths: list[int] = []
        most = self._max_tokens_per_forward
        if _is_measured(sequences):
            most = min(most, self._max_tokens_measured)
        width = 0  # of the forward: shorter chunks are padded
        for seq, num_free in zip(sequences, free, strict=True):
            length = min(self._num_left(seq), num_free, self._chunk, most)
            until_end = None if self._reuse is None else self._reuse.num_until_end(seq)
            length = length if until_end is None else min(length, until_end)
            width = max(width, length)
            if width * (len(lengths) + 1) > most:
                break
            lengths.append(length)
        return lengths

    def _measure_prompts(self, logits: Tensor) -> None:
        """Note the log-probabilities of prompts, of logits ``[B, L, V]`` after a chunk."""
        step = self._forward.step
        assert isinstance(step, StepLayout), "prompts have no static steps"
        for row, seq in enumerate(self._served):
            if (num_top := seq.request.prompt_logprobs) is None:
                continue
            end = int(self.cache.seq_len[seq.slot])
            known = logits[row, -int(step.lengths[row]) :]
            tokens = torch.tensor(seq.prompt[end - len(known) + 1 : end + 1], device=logits.device)
            if len(tokens):
                wanted = {place: (place, num_top) for place in range(len(tokens))}
                seq.prompt_logprobs += Measured(wanted, known, tokens).by_number.values()

    def _steer(self, token_ids: Tensor, layer_idx: int, states: Tensor) -> Tensor | None:
        """Ask the policies of a layer for a change to the states entering it, ``[B, M]``."""
        change, active = None, self._served
        if active[0].error is not None or not self._stacks[layer_idx].is_steered(layer_idx):
            return None
        registers = self._registers.of_slots(0, len(active))
        # A copy that torch counts changes of: the states themselves are made in inference mode.
        with torch.inference_mode(False), torch.no_grad():
            states = states.clone()
        with (
            self._errors.covering(active),
            self.timings.time("steer_s", None),
            registers.on(states.device) as registers,
        ):
            change = self._stacks[layer_idx].steer(
                layer_idx,
                states,
                token_ids.to(states.device),
                tokenizer=self._tokenizer,
                registers=registers,
                memory=Memory([seq.memory for seq in active]),
            )
        return change

    def _count_pads(self, group: abc.Sequence[Sequence]) -> None:
        """Subtract rows for the pads of a group, for plans that study stored padding."""
        longest = max(len(seq.prompt) for seq in group)
        spare = [layer.num_spare_rows for layer in self._plan.layers]
        for seq in group:
            num_pads = longest - len(seq.prompt)
            self.cache.num_pads[:, seq.slot] = [min(num_pads, most) for most in spare]


def _is_measured(sequences: abc.Iterable[Sequence]) -> bool:
    """Whether the log-probabilities of any of their prompts are wanted."""
    return any(seq.request.prompt_logprobs is not None for seq in sequences)
