"""The scheduler: requests in, steps out; what sequences have become, results out."""

from collections import abc, deque
from operator import attrgetter

from kvpolicy.engine.core import Core
from kvpolicy.engine.costs import Costs
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.request_queue import RequestQueue
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.sampler import Sampler
from kvpolicy.engine.slots import Slots
from kvpolicy.engine.step import Step
from kvpolicy.hooks.stack import Stack

# Pads that a forward may have in any case: computing them is faster than another forward. More
# must be a small part of it.
FEW_PADS = 256

_FINISH_REASON = attrgetter("finish_reason")


class Scheduler:
    """Queue, slots, chunks of prompts and turns.

    Attributes:
        queue: Requests without a slot.
        slots: The sequence in each slot.
        takes_turns: Whether chunks of prompts and decode steps take turns, so that first tokens
            leave before the next decode, sequences that are decoded wait for one chunk at most, and
            new requests are noticed after each. If not, the prompts of all free slots come first.
        num_prompt_tokens: Prompt tokens of the requests that were given a slot.
    """

    def __init__(
        self,
        core: Core,
        queue: RequestQueue,
        sampler: Sampler,
        policies: Stack,
        errors: ErrorScope,
        costs: Costs,
        *,
        chunk: int,
        max_tokens_per_forward: int,
        takes_turns: bool,
    ) -> None:
        """No request has a slot yet.

        Args:
            core: What steps are made for.
            queue: The requests.
            sampler: Draws the tokens.
            policies: The policies of `schedule`.
            errors: Isolates errors of hooks.
            costs: Counts the seconds in which slots are filled.
            chunk: The most prompt tokens of one sequence in one forward.
            max_tokens_per_forward: The most prompt tokens of all sequences in one forward, pads
                included.
            takes_turns: See the attribute.
        """
        self.queue, self.takes_turns = queue, takes_turns
        self._core, self._sampler, self._policies, self._errors = core, sampler, policies, errors
        self._costs = costs
        self.slots = Slots(core.cache)
        self._chunks = Chunks(core, chunk, max_tokens_per_forward)
        self._groups: deque[list[Sequence]] = deque()  # whose prompts are not all in
        self._group: list[Sequence] = []  # whose turn it is
        self._was_prompt = False
        self._ends = False  # whether any request may end now
        self._changed: list[Sequence] = []  # by the last step, or as they were given slots
        self.num_prompt_tokens = 0
        self._ended: list[Sequence] = []

    def take_in(self) -> None:
        """Take over what has come: requests, and cancellations."""
        self._ends = self.queue.take_in()

    @property
    def is_interrupted(self) -> bool:
        """Whether something has come that changes who is decoded next."""
        return self._ends or bool(self.queue.waiting and self.slots.num_free)

    def runs_ahead(self, step: Step) -> bool:
        """Whether the next step may be launched before the tokens of this one are read.

        The next one is for the same sequences then. If one of these turns out to have ended with
        this step, by its token or a stop string, what was launched for it does not count.
        """
        core, sequences = self._core, step.sequences
        if core.runner.max_steps < 2 or not step.draws or step.error is not None:
            return False
        if len(sequences) < len(self.slots.active):  # prompts of the others are to go on
            return False
        # The last token that a sequence may have ends it.
        if step.num_left < 2 or _have_ended(sequences):
            return False
        if core.evictor.asks_due or core.evictor.is_recorded:
            return False
        return core.extensions.repeats(sequences) > 1

    def admit(self) -> list[Sequence]:
        """End what was cancelled, and give free slots to waiting requests.

        Returns:
            The sequences that may be due: those of the last step, and those that go on from what
            was taken elsewhere.
        """
        self._end_requests()
        self._group = []
        if not (self.takes_turns and self._was_prompt and self.decodable):
            self._group = self._next_group()
            if self._group:
                with self._costs.of_admission():
                    for one in self._core.extensions:
                        one.advance(self._chunks.unfinished(self._group))
        changed, self._changed = self._changed, []
        return _going_on(dict.fromkeys([*changed, *self._group]) if self._group else changed)

    def schedule(self, unread: Step | None = None) -> Step | None:
        """The next step: a chunk of each prompt of a group, or a decode step; ``None``: neither.

        Args:
            unread: The step before, if its tokens are not read; see `runs_ahead`.
        """
        self._was_prompt = bool(self._group)
        step = None
        if self._group:
            step = self._chunks.step(self._group)
        elif unread is not None:
            step = following(unread)
        elif decodable := self.decodable:
            step = self._decode_step(decodable)
        self._changed = [] if step is None else [*step.sequences]
        return step

    def finish(self) -> list[Sequence]:
        """Take sequences that have ended out of their slots; all that have ended since."""
        self._release()
        return self.take_ended()

    def take_ended(self) -> list[Sequence]:
        """Sequences that have ended and hold no slot, which were not returned yet."""
        ended, self._ended = self._ended, []
        return ended

    def end(self) -> None:
        """Forget all requests; slots hold what they do, since the device may have failed."""
        self.queue.take_in()
        self.queue.waiting.clear()
        self.slots.fill(())
        self._groups.clear()
        self._group, self._changed = [], []

    @property
    def decodable(self) -> list[Sequence]:
        """The sequences whose prompts are in: they have a token that a decode step can bring in."""
        return [seq for seq in _going_on(self.slots.active) if seq.tokens]

    def _end_requests(self) -> None:
        """Take over new requests, and end those that were cancelled or whose time is up."""
        queue = self.queue
        if not self._ends:
            return
        self._ended += queue.pop_ended()
        for seq in _going_on(self.slots.active):
            seq.finish_reason = queue.reason_to_end(seq)
        self._release()
        queue.forget_ends()

    def _release(self) -> None:
        active = self.slots.active
        if not (_have_ended(active) or _have_ended(self._changed)):
            return
        for seq in active:
            if seq.finish_reason is not None:
                self._core.evictor.note_peak(seq)
                for one in self._core.extensions:
                    one.finish(seq)
                self.slots.clear(seq)
                self._ended.append(seq)
        # Nothing keeps a sequence that has ended, and with it what policies remember.
        self._changed = _going_on(self._changed)
        self._group = _going_on(self._group)
        self._groups = deque(_going_on(group) for group in self._groups)

    def _next_group(self) -> list[Sequence]:
        """Sequences whose prompts are to be brought in; none if there are none.

        Waiting ones are admitted before. Groups follow one another, or take turns with each chunk.
        """
        self._drop_finished()
        while (self.takes_turns or not self._groups) and (admitted := self._ask_schedule()):
            for group in admitted:
                with self._costs.of_admission():
                    for one in self._core.extensions:
                        one.admit(group)
                self.num_prompt_tokens += sum(seq.num_prompt for seq in group)
                self._changed += group
            self._groups += admitted
            self._release()
            self._drop_finished()
        if self.takes_turns:
            self._groups.rotate()
        return self._groups[0] if self._groups else []

    def _drop_finished(self) -> None:
        """Forget groups whose prompts are all in, or whose sequences have ended."""
        self._groups = deque(group for group in self._groups if self._chunks.unfinished(group))

    def _ask_schedule(self) -> list[list[Sequence]]:
        """Give slots to the sequences to admit next, in groups whose prompts enter together.

        Empty if no slot is free, no request waits, the cache has no place for another prompt, or
        the policies wait.
        """
        waiting, num_free = self.queue.waiting, self.slots.num_free
        if not waiting or not num_free:
            return []
        # Without a policy, only the first ones matter, of many that may wait.
        is_asked = self._policies.implements("schedule")
        in_order = self.queue.in_order(None if is_asked else num_free)
        groups: list[list[int]] = []
        with self._errors.covering(in_order):
            groups = self._policies.schedule(
                [seq.waiting for seq in in_order], num_free, len(self.slots.active)
            )
        self._ended += [waiting.pop(seq.id) for seq in in_order if seq.error is not None]
        admitted: list[list[Sequence]] = []
        for group in groups:
            admitted.append([])
            for number in group:
                if not self._core.cache.admits(len(waiting[number].prompt)):
                    return [one for one in admitted if one]
                admitted[-1].append(waiting.pop(number))
                self.slots.place(admitted[-1][-1])
        return admitted

    def _decode_step(self, decodable: list[Sequence]) -> Step:
        """The newest token of every sequence whose prompt is in."""
        sequences = self.slots.pack(decodable)
        step = decode_step(sequences)
        step.is_static = self._core.runner.takes_static(step.slots)
        step.draws = step.is_static and not self._sampler.reads_tokens(sequences)
        step.num_left = min(seq.max_new_tokens - len(seq.tokens) for seq in sequences)
        return step


class Chunks:
    """Cuts prompts into chunks."""

    def __init__(self, core: Core, chunk: int, max_tokens_per_forward: int) -> None:
        """Take the limits of a forward, see `Scheduler`."""
        self._cache, self._extensions = core.cache, core.extensions
        self._chunk = min(chunk, max_tokens_per_forward)
        self._most = max_tokens_per_forward

    def unfinished(self, group: abc.Iterable[Sequence]) -> list[Sequence]:
        """Those whose prompts are not all in, and that have not ended."""
        return [seq for seq in _going_on(group) if self._num_left(seq) > 0]

    def step(self, group: abc.Iterable[Sequence]) -> Step | None:
        """The next chunks of the prompts of a group; ``None`` if none is to be computed now."""
        waiting = self._extensions.ready(self.unfinished(group))
        if not waiting:
            return None
        served, lengths = self._together(waiting)
        starts = self._cache.seq_len[[seq.slot for seq in served]].tolist()
        of_each = list(zip(served, starts, lengths, strict=True))
        return Step(
            served,
            [list(seq.prompt[start : start + num]) for seq, start, num in of_each],
            is_decode=False,
            completes=[start + num == len(seq.prompt) for seq, start, num in of_each],
            totals=[len(seq.prompt) for seq in served],
        )

    def _num_left(self, seq: Sequence) -> int:
        """Prompt tokens that are not in yet."""
        return len(seq.prompt) - int(self._cache.seq_len[seq.slot])

    def _together(self, sequences: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[int]]:
        """Sequences whose next chunks are one forward, and the tokens of each.

        The shortest chunks are first, with as many of the next longer ones as it may have; the
        others wait for the next forwards.
        """
        slots = [seq.slot for seq in sequences]
        free = self._cache.most_new(slots).tolist()
        most = min(self._most, self._extensions.forward_limit(sequences))
        limit = min(self._chunk, most)
        lengths = [
            _length(min(self._num_left(seq), self._extensions.chunk_limit(seq)), num_free, limit)
            for seq, num_free in zip(sequences, free, strict=True)
        ]
        chosen: list[int] = []
        num_tokens = 0
        for number in sorted(range(len(sequences)), key=lengths.__getitem__):
            more, length = [*chosen, number], lengths[number]
            num_tokens += length
            num_columns = length * len(more)  # shorter chunks are padded
            few_pads = max(FEW_PADS, num_columns // 4)
            if num_columns > most or num_columns - num_tokens > few_pads:
                break
            if not self._cache.enter_together(
                [slots[one] for one in more], [lengths[one] for one in more]
            ):
                break
            chosen = more
        chosen.sort()  # as they were, so that their slots may be neighbours
        return [sequences[one] for one in chosen], [lengths[one] for one in chosen]


def _length(wanted: int, num_free: int, limit: int) -> int:
    """Tokens of the next chunk, of so many wanted; where rows allow it, none is left to be alone.

    Layers with states may compute a token that enters alone in another way than one of several.
    """
    leaves_one = limit == wanted - 1 and num_free >= wanted and limit > 2
    return limit - 1 if leaves_one else min(wanted, num_free, limit)


def _going_on(sequences: abc.Iterable[Sequence]) -> list[Sequence]:
    """Those that have not ended."""
    return [seq for seq in sequences if seq.finish_reason is None]


def _have_ended(sequences: abc.Iterable[Sequence]) -> bool:
    """Whether any of them has ended."""
    return any(map(_FINISH_REASON, sequences))


def decode_step(sequences: list[Sequence]) -> Step:
    """A step that brings in the newest token of each sequence."""
    return Step(
        sequences,
        [[seq.tokens[-1]] for seq in sequences],
        is_decode=True,
        completes=[True] * len(sequences),
        totals=[seq.num_tokens for seq in sequences],
    )


def following(unread: Step) -> Step:
    """A static step that brings in the tokens that another one has drawn."""
    return Step(
        unread.sequences,
        [],
        is_decode=True,
        completes=unread.completes,
        totals=[],
        is_static=True,
        draws=True,
        follows=True,
        num_left=unread.num_left - 1,
    )
