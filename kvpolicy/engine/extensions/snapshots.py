"""Snapshots: a sequence out of its slot, as a value; a request can go on from one."""

import weakref
from collections import abc

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.engine.extensions.base import ANY, CoreParts, Extension
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.resuming import Resuming
from kvpolicy.engine.snapshots.snapshot import SequenceSnapshot
from kvpolicy.errors import SnapshotError
from kvpolicy.state import RegisterFile


def must_see_end(cache: KVCache, sequences: abc.Sequence[Sequence]) -> bool:
    """Whether sequences that are copied at their end must not go on before it is known.

    The device knows tokens that end them, and changes nothing after one. Only the host finds stop
    strings, and only it knows that nothing is to be evicted.
    """
    if any(seq.request.stop for seq in sequences):
        return True
    return bool(sequences) and cache.num_free_rows([seq.slot for seq in sequences]).min() <= 1


class Snapshots(Extension):
    """Takes snapshots of sequences in their slots, and puts them into slots."""

    def __init__(self, resuming: Resuming, registers: RegisterFile) -> None:
        """Take what knows the plan and the model, and the registers of all slots."""
        self._resuming, self._registers = resuming, registers

    def attach(self, core: CoreParts) -> None:
        """Take the core."""
        # No reference back: a run that is dropped frees its slabs at once.
        self.cache, self._core = core.cache, weakref.proxy(core)

    def admit(self, group: abc.Sequence[Sequence]) -> None:
        """Bring sequences to where the snapshots were taken that their requests go on from."""
        for seq in group:
            if seq.request.resume is not None:
                self.resume(seq, seq.request.resume)

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """A snapshot at the end is of the slot as it was at the last token."""
        keeping = [seq for seq in sequences if seq.request.snapshot]
        return 1 if must_see_end(self.cache, keeping) else ANY

    def finish(self, seq: Sequence) -> None:
        """Take the snapshot that the request asks for."""
        if seq.request.snapshot and seq.error is None:
            try:
                seq.snapshot = self.snapshot(seq)
            except SnapshotError as error:
                seq.finish_reason, seq.error = "error", str(error)

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
        if seq.embedded is not None:  # what enters for its tokens is no part of a snapshot
            msg = (
                "no snapshot is taken while a prompt with images is brought in; take it once the "
                "request has its first token"
            )
            raise SnapshotError(msg)
        ended, seq.finish_reason = seq.finish_reason, None  # only what goes on can fail
        try:
            self._core.evictor.settle()
            states = self._core.extensions.pending_states(seq)
        finally:
            seq.finish_reason = seq.finish_reason or ended
        if seq.error is not None:
            raise SnapshotError(seq.error)
        if seen is None:  # else its rows were fewer: peaks are noted later
            self._core.evictor.note_peak(seq)
        return self._resuming.take(seq, self.cache, states, self._registers, newest, seen)

    def resume(self, seq: Sequence, snapshot: SequenceSnapshot) -> None:
        """Bring a sequence to where a snapshot was taken; it ends with an error if it cannot be.

        What is due there is compacted before the tokens that follow are seen, as it would have been
        had the sequence not been cut.
        """
        try:
            self._resuming.put(snapshot, seq, self.cache, self._registers)
        except SnapshotError as error:
            seq.fail(str(error))
            return
        for one in self._core.extensions:
            one.resumed(seq, snapshot.states)
        seq.began_at, seq.prompt_before = snapshot.seq_len, len(snapshot.prompt)
