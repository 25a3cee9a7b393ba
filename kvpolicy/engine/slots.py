"""The slots of a cache: which sequence has which."""

from collections import abc

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.requests.sequence import Sequence


class Slots:
    """The sequence in each slot.

    A decode step serves the first slots. When a sequence ends, the next that is admitted takes its
    slot; only where none waits, or where its prompt is not all in when others are decoded, do
    sequences move, so that a step computes nothing for slots that take no part.
    """

    def __init__(self, cache: KVCache) -> None:
        """All slots are free."""
        self._cache = cache
        self._held: list[Sequence | None] = [None] * cache.num_slots

    def __len__(self) -> int:
        return len(self._held)

    @property
    def active(self) -> list[Sequence]:
        """The sequences with slots, in the order of these."""
        return [seq for seq in self._held if seq is not None]

    @property
    def num_free(self) -> int:
        """Free slots."""
        return self._held.count(None)

    def place(self, seq: Sequence) -> None:
        """Give a sequence the first free slot."""
        self._assign(seq, self._held.index(None))
        self._cache.prompt_len[seq.slot] = seq.num_staying
        self._cache.num_prompt[seq.slot] = len(seq.prompt)

    def fill(self, sequences: abc.Iterable[Sequence]) -> None:
        """Note that sequences own the first slots, whose rows are there already."""
        self._held = [None] * self._cache.num_slots
        for slot, seq in enumerate(sequences):
            self._assign(seq, slot)

    def clear(self, seq: Sequence) -> None:
        """Empty the slot of a sequence."""
        self._cache.clear(seq.slot)
        self._held[seq.slot] = None

    def pack(self, sequences: list[Sequence]) -> list[Sequence]:
        """Move sequences, given in the order of their slots, to the first slots, without gaps."""
        if sequences[-1].slot < len(sequences):
            return sequences
        taken = {seq.slot for seq in sequences}
        places = (slot for slot in range(len(sequences)) if slot not in taken)
        for seq in [seq for seq in sequences if seq.slot >= len(sequences)]:
            source, target = seq.slot, next(places)
            other = self._held[target]
            if other is None:
                self._cache.move(source, target)
                self._held[source] = None
            else:
                self._cache.swap(source, target)
                self._assign(other, source)
            self._assign(seq, target)
        return sorted(sequences, key=lambda seq: seq.slot)

    def _assign(self, seq: Sequence, slot: int) -> None:
        seq.slot = slot
        self._held[slot] = seq
