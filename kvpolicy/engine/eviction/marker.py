"""Calls `mark` for new rows: in the forward, or for several tokens of a sequence at a time.

In prefill, all policies that mark are called within the forward, for the tokens of its sequences.
In decode, those that declare ``marks_in_step`` are called within every step. For the others, what
enters the attention of their layers is kept in a ring of each slot, which has room for as many
tokens as the smallest buffer of these layers, but at most `MOST_KEPT`. They are called when it is
full, and before a compaction in such a layer, with the keys and values that the slabs hold by then.
"""

import sys
from collections import abc
from functools import partial

import torch
from torch import Tensor

from kvpolicy.cache.rings import StateRing
from kvpolicy.cache.slab import KVCache
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.marking import Marking
from kvpolicy.model.tensor_parallel import SingleProcess
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Bound

#: The most tokens of a sequence that a ring keeps.
MOST_KEPT = 128


class Marker:
    """Asks for marks and writes them.

    Attributes:
        ring: What enters the attention of layers that are marked after decode steps, as far as it
            is not marked, if there are such layers.
    """

    def __init__(
        self,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        bound: abc.Sequence[Bound],
        timings: PolicyTimings,
        errors: ErrorScope,
        processes: SingleProcess,
    ) -> None:
        """Bind what all forwards share.

        Args:
            layers: What each layer does.
            stacks: The policies of each layer.
            bound: What these have made of the weights of each layer.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
            processes: The processes that hold the model.
        """
        self._stacks, self._timings, self._errors = stacks, timings, errors
        self._bound, self._processes = bound, processes
        self._later = [index for index, stack in enumerate(stacks) if stack.marked_later]
        self._interval = min([MOST_KEPT, *(layers[index].buffer for index in self._later)])
        self._in_step = {
            index: stack.marked_in_step for index, stack in enumerate(stacks) if stack.is_marked
        }
        self._cache: KVCache
        self.ring: StateRing | None = None

    def attach(
        self,
        cache: KVCache,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Use a cache, and allocate the ring of its slots.

        It is on the devices of its layers, unless one is given.
        """
        self._cache = cache
        if self._later:
            devices = {i: device or cache.layers[i].shape.device for i in self._later}
            self.ring = StateRing(cache, self._interval, hidden_size, dtype, devices)

    def in_prefill(self, sequences: abc.Sequence[Sequence]) -> Marking | None:
        """Marks the rows of a forward of prompts; ``None`` if no policy marks."""
        return Marking(partial(self._ask_in_prefill, sequences)) if self._in_step else None

    def in_decode(
        self, sequences: abc.Sequence[Sequence], *, keeps: bool = False
    ) -> Marking | None:
        """Marks the rows of a decode step; ``None`` if no policy marks.

        Args:
            sequences: The sequences of the step.
            keeps: Whether to put states into the ring, because the step does not do so itself.
        """
        if not self._in_step:
            return None
        return Marking(partial(self._ask_in_decode, sequences, keeps), self._in_step)

    def note_all(self, sequences: abc.Sequence[Sequence]) -> None:
        """Note that all rows of some sequences are marked."""
        for seq in sequences:
            seq.num_marked = int(self._cache.seq_len[seq.slot])

    def num_free(self, sequences: abc.Sequence[Sequence]) -> int:
        """Tokens that each of these sequences can still take before a ring is full."""
        if self.ring is None:
            return sys.maxsize
        return self._interval - max(map(self._num_pending, sequences))

    def flush_full(self, sequences: abc.Sequence[Sequence]) -> None:
        """Mark the rows of the sequences whose rings are full."""
        for seq in sequences if self.ring else ():
            if self._num_pending(seq) >= self._interval:
                self.flush(seq)

    def flush(self, seq: Sequence, layers: abc.Collection[int] | None = None) -> None:
        """Mark all rows of a sequence that are not marked yet.

        Args:
            seq: The sequence.
            layers: Do so only if one of these is marked after decode steps; ``None``: always.
        """
        ring = self.ring
        if ring is None or (layers is not None and set(ring.layers).isdisjoint(layers)):
            return
        num_new = self._num_pending(seq)
        if num_new:
            with self._errors.covering([seq]):
                for layer_idx in ring.layers:
                    states = ring.take(seq.slot, num_new, layer_idx)
                    self._mark_kept(seq, layer_idx, states)
            seq.num_marked += num_new

    def _num_pending(self, seq: Sequence) -> int:
        return int(self._cache.seq_len[seq.slot]) - seq.num_marked

    def _mark_kept(self, seq: Sequence, layer_idx: int, states: Tensor) -> None:
        """Mark the newest rows of a slot in a layer from the states in its ring, ``[N, M]``."""
        cache, slot = self._cache, seq.slot
        layer, num_rows = cache.layers[layer_idx], int(cache.rows[layer_idx, slot])
        # A slab that is shorter than the ring has dropped the first of these rows.
        num_held = min(len(states), num_rows)
        seq_len = int(cache.seq_len[slot])
        device = layer.shape.device
        with self._timings.time("mark_s", device):
            marks = self._asked(
                layer_idx,
                False,
                states[len(states) - num_held :],
                layer.newest(layer.keys, slot, num_rows, num_held).transpose(0, 1),
                layer.newest(layer.values, slot, num_rows, num_held).transpose(0, 1),
                torch.arange(seq_len - num_held, seq_len, device=device),
            )
            for name, numbers in marks.items():
                layer.put_newest(layer.tracks[name], slot, num_rows, numbers.T)

    def _ask_in_prefill(
        self, sequences: abc.Sequence[Sequence], layer_idx: int, *tokens: Tensor
    ) -> abc.Mapping[str, Tensor]:
        with self._timings.time("mark_s", tokens[0].device):
            return self._covered(sequences, layer_idx, None, tokens)

    def _ask_in_decode(
        self, sequences: abc.Sequence[Sequence], keeps: bool, layer_idx: int, *tokens: Tensor
    ) -> abc.Mapping[str, Tensor]:
        if keeps and self.ring is not None and layer_idx in self.ring.layers:
            pending = [self._num_pending(seq) for seq in sequences]
            self.ring.note([seq.slot for seq in sequences], pending, tokens[0], layer_idx)
        if not self._in_step[layer_idx]:
            return {}
        with self._timings.time("mark_s", None):  # it may be captured in a graph, as time is not
            return self._covered(sequences, layer_idx, True, tokens)

    def _covered(
        self,
        sequences: abc.Sequence[Sequence],
        layer_idx: int,
        in_step: bool | None,
        tokens: abc.Sequence[Tensor],
    ) -> abc.Mapping[str, Tensor]:
        """Ask unless a policy has failed in this forward, which affects all its sequences."""
        marks: abc.Mapping[str, Tensor] = {}
        if sequences[0].error is None:
            with self._errors.covering(sequences):
                marks = self._asked(layer_idx, in_step, *tokens)
        return marks

    def _asked(
        self,
        layer_idx: int,
        in_step: bool | None,
        states: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
    ) -> abc.Mapping[str, Tensor]:
        """Marks of tokens in the heads of this process, ``[N, H_kv]`` by the name of a track."""
        gather, own_part = self._processes.all_gather, self._processes.own_part
        marks = self._stacks[layer_idx].mark(
            layer_idx,
            in_step=in_step,
            states=states,
            keys=gather(keys),
            values=gather(values),
            positions=positions,
            bound=self._bound[layer_idx],
        )
        return {name: own_part(numbers) for name, numbers in marks.items()}
