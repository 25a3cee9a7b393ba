"""The interface of an extension: methods that are called at fixed places of a step.

In the order of their calls: `attach` once; `admit` for sequences with slots of their own;
`advance` and `ready` before chunks of prompts are cut, `chunk_limit` for each of them; `before` and
`after` around a step, and `repeats` between them for decode steps; `room_needed` before an
eviction, `before_eviction`, `together`, `arguments` and `selected` in it; `finish` at the end of a
sequence, and `report` at any time.

What an extension remembers of a sequence on the device is in ``cache.slot_tensors``: it moves and
ends with its slot. On the host it is in a dictionary by ``seq.id``, until `finish`. Where a
sequence is copied out of its slot, and put into one, `pending_states` and `resumed` are called.
"""

import sys
from collections import abc
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from torch import Tensor

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rings import StateRing
from kvpolicy.engine.compaction import Compaction, DueSlot
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step

#: As many as there may be.
ANY = sys.maxsize


class Evicts(Protocol):
    """The evictor, as far as extensions need it."""

    def evict(self, sequences: abc.Sequence[Sequence]) -> None:
        """Compact what is due."""

    def settle(self) -> None:
        """Check answers of policies that were not checked at once."""

    def note_peak(self, seq: Sequence) -> None:
        """Update the peaks of a sequence."""


class CoreParts(Protocol):
    """What an extension is attached to."""

    @property
    def cache(self) -> KVCache:
        """The KV cache."""

    @property
    def evictor(self) -> Evicts:
        """Evicts its rows."""

    @property
    def extensions(self) -> "Extensions":
        """All extensions."""


class Extension:
    """Does nothing; an extension overrides what it needs.

    Attributes:
        graph_problem: Why decode steps with it are not replayed from graphs; ``None``: they may be.
        cache: The KV cache, once it is attached.
        ring: Keeps states of decoded tokens for it; ``None``: it reads none.
    """

    graph_problem: ClassVar[str | None] = None
    cache: KVCache
    ring: StateRing | None = None

    def num_taken(self, seq: Sequence) -> int:
        """Tokens of a sequence whose states it has taken from its ring."""
        return 0

    def attach(self, core: CoreParts) -> None:
        """Take the cache; tensors that belong to slots are added to ``cache.slot_tensors``."""
        self.cache = core.cache

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Sequences that enter together have been given empty slots; these may be filled."""

    def pending_states(self, seq: Sequence) -> Tensor | None:
        """A sequence is copied out of its slot next: a copy of its states that wait for policies.

        They are ``[N, M]``; ``None``: there are none. What waits may be given to policies instead.
        """
        return None

    def resumed(self, seq: Sequence, states: Tensor | None) -> None:
        """A sequence holds in its slot what was taken elsewhere.

        Args:
            seq: The sequence.
            states: What `pending_states` had given there.
        """

    def advance(self, sequences: abc.Sequence[Sequence]) -> None:
        """Bring sequences forward whose prompts are not all in, without computing anything."""

    def ready(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        """Those of these sequences whose next chunk is to be computed now; others wait."""
        return sequences

    def chunk_limit(self, seq: Sequence) -> int:
        """Tokens of the prompt of a sequence that its next chunk has at most."""
        return ANY

    def room_needed(self, seq: Sequence) -> int:
        """Tokens for which a slot must have room, so that it is due before it is full."""
        return 1

    def forward_limit(self, sequences: abc.Sequence[Sequence]) -> int:
        """Tokens that chunks of these sequences have together at most, pads included."""
        return ANY

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """Decode steps of these sequences that may follow each other before tokens are read.

        With 2 or more, `before` may be called for the next step before `after` is called for the
        last, and rows may leave between the two. By default it is 1 for an extension that
        implements `after` or `selected`.
        """
        kind = type(self)
        is_told = kind.after is not Extension.after or kind.selected is not Extension.selected
        return 1 if is_told else ANY

    def before(self, step: Step) -> None:
        """A step is about to run: ask it for states or logits, or give it functions to call."""

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """A step is committed: its rows and tokens are facts, and nothing was evicted yet.

        Where the next step is launched before, see `repeats`, that may have overwritten the logits
        and states of ``output``, and the sequences are those that have not ended before the step.
        Under a `PolicyCache`, transformers draws the tokens, and ``drawn`` has none. It is not
        called where a policy has failed before anything was drawn.
        """

    def before_eviction(self, sequences: abc.Sequence[Sequence], due: np.ndarray) -> None:
        """Some sequences are compacted next.

        Args:
            sequences: Sequences, ``B`` of them.
            due: Which of them are compacted in which layers, bool ``[layers, B]``.
        """

    def together(self, due: DueSlot) -> abc.Hashable:
        """What slots must have in common to be asked about together."""
        return None

    def arguments(self, due: abc.Sequence[DueSlot]) -> abc.Mapping[str, Any]:
        """Arguments of `score` that it supplies for the slots of a call, by name."""
        return {}

    def selected(self, compaction: Compaction) -> None:
        """A selection was made; its rows leave next.

        Where a hook then fails for other sequences of the call, the selection of those that go on
        is made, and told, again.
        """

    def finish(self, seq: Sequence) -> None:
        """A sequence has ended and still has its slot."""

    def report(self) -> abc.Mapping[str, Any]:
        """Fields of `RunReport` that it knows."""
        return {}


Found = TypeVar("Found", bound=Extension)


class Extensions:
    """The extensions of a core, called in their order."""

    def __init__(self, extensions: abc.Iterable[Extension] = ()) -> None:
        self.all: list[Extension] = []
        self._spacious: list[Extension] = []
        self._dividing: list[Extension] = []
        for one in extensions:
            self.add(one)

    def add(self, one: Extension) -> None:
        """Call one more, after the others."""
        self.all.append(one)
        if type(one).room_needed is not Extension.room_needed:
            self._spacious.append(one)
        if type(one).together is not Extension.together:
            self._dividing.append(one)

    def remove(self, one: Extension) -> None:
        """Do not call one any more."""
        for some in (self.all, self._spacious, self._dividing):
            if one in some:
                some.remove(one)

    def __iter__(self) -> abc.Iterator[Extension]:
        return iter(self.all)

    def find(self, kind: type[Found]) -> Found | None:
        """The extension of a class; ``None``: there is none."""
        return next((one for one in self.all if isinstance(one, kind)), None)

    def pending_states(self, seq: Sequence) -> Tensor | None:
        """See `Extension.pending_states`; of the first that keeps any."""
        taken = [one.pending_states(seq) for one in self.all]
        return next((states for states in taken if states is not None), None)

    def ready(self, sequences: abc.Sequence[Sequence]) -> abc.Sequence[Sequence]:
        """See `Extension.ready`; all of them agree."""
        for one in self.all:
            sequences = one.ready(sequences)
        return sequences

    def chunk_limit(self, seq: Sequence) -> int:
        """See `Extension.chunk_limit`."""
        return min((one.chunk_limit(seq) for one in self.all), default=ANY)

    def room_needed(self, seq: Sequence) -> int:
        """See `Extension.room_needed`; the most that one needs."""
        return max((one.room_needed(seq) for one in self._spacious), default=1)

    def forward_limit(self, sequences: abc.Sequence[Sequence]) -> int:
        """See `Extension.forward_limit`."""
        return min((one.forward_limit(sequences) for one in self.all), default=ANY)

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """See `Extension.repeats`."""
        return min((one.repeats(sequences) for one in self.all), default=ANY)

    def together(self, due: DueSlot) -> abc.Hashable:
        """See `Extension.together`."""
        return tuple([one.together(due) for one in self._dividing])

    def arguments(self, due: abc.Sequence[DueSlot]) -> dict[str, Any]:
        """See `Extension.arguments`."""
        return {name: one for ext in self.all for name, one in ext.arguments(due).items()}
