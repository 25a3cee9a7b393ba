"""Annotations of new rows: `annotate` is called in the forward, or for several tokens later.

In prefill, all policies that annotate are called within the forward, for the tokens of its
sequences. In decode, those that declare ``annotates_in_step`` are called within every step. For the
others, what enters the attention of their layers is kept in a ring of each slot, which has room for
as many tokens as the smallest buffer of these layers, but at most `MOST_KEPT`. They are called when
it is full, and before a compaction in such a layer, with the keys and values that the slabs hold by
then.
"""

from collections import abc
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvpolicy.cache.rings import StateRing
from kvpolicy.engine.extensions.base import ANY, CoreParts, Extension
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.engine.step import Drawn, Output, Step
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.model.forward_input import Annotating
from kvpolicy.model.tensor_parallel import SingleProcess
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.state import Bound

#: The most tokens of a sequence that a ring keeps.
MOST_KEPT = 128


class Annotate(Extension):
    """Asks for annotations and writes them.

    Its ring keeps what enters the attention of layers that are annotated after decode steps.
    """

    def __init__(
        self,
        layers: abc.Sequence[LayerPlan],
        stacks: abc.Sequence[Stack],
        bound: abc.Sequence[Bound],
        timings: PolicyTimings,
        errors: ErrorScope,
        processes: SingleProcess,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> None:
        """Bind what all forwards share.

        Args:
            layers: What each layer does.
            stacks: The policies of each layer.
            bound: What these have made of the weights of each layer.
            timings: Measures the time of policies.
            errors: Isolates errors of hooks.
            processes: The processes that hold the model.
            hidden_size: Size of a hidden state, ``M``.
            dtype: Precision of hidden states.
            device: Where rings are; ``None``: on the devices of their layers.
        """
        self._stacks, self._timings, self._errors = stacks, timings, errors
        self._bound, self._processes = bound, processes
        self._later = [index for index, stack in enumerate(stacks) if stack.annotated_later]
        self._interval = min([MOST_KEPT, *(layers[index].buffer for index in self._later)])
        self._in_step = {
            index: stack.annotated_in_step
            for index, stack in enumerate(stacks)
            if stack.is_annotated
        }
        self._size, self._dtype, self._device = hidden_size, dtype, device

    def attach(self, core: CoreParts) -> None:
        """Allocate the ring of the slots."""
        self.cache = cache = core.cache
        if self._later:
            devices = {i: self._device or cache.layers[i].shape.device for i in self._later}
            self.ring = StateRing(cache, self._interval, self._size, self._dtype, devices)

    def num_taken(self, seq: Sequence) -> int:
        """Tokens whose rows are annotated."""
        return seq.num_annotated

    def pending_states(self, seq: Sequence) -> None:
        """Annotate what is not annotated yet, so that no states wait."""
        self.flush(seq)

    def resumed(self, seq: Sequence, states: Tensor | None) -> None:
        """All rows of a sequence from elsewhere are annotated."""
        self._note_all([seq])

    def repeats(self, sequences: abc.Sequence[Sequence]) -> int:
        """Tokens that each of these sequences can still take before a ring is full."""
        if self.ring is None:
            return ANY
        return self._interval - max(map(self._num_pending, sequences), default=0)

    def before(self, step: Step) -> None:
        """Have the forward ask for annotations; what waits from before is annotated first."""
        if step.is_decode:
            ask = partial(self._ask_in_decode, step)
            step.annotating = Annotating(ask, self._in_step)
            # A replay leaves out the calls that a listener is to receive.
            step.runs_python |= any(
                stack.annotated_in_step and stack.is_recorded for stack in self._stacks
            )
            return
        for seq in step.sequences:
            self.flush(seq)
        step.annotating = Annotating(partial(self._ask_in_prefill, step))

    def after(self, step: Step, output: Output, drawn: Drawn) -> None:
        """Rows of prompts are annotated; those of decode steps are when a ring is full."""
        if not step.is_decode:
            self._note_all(step.sequences)
            return
        for seq in step.sequences if self.ring else ():
            if seq.error is None and self._num_pending(seq) >= self._interval:
                self.flush(seq)

    def before_eviction(self, sequences: abc.Sequence[Sequence], due: np.ndarray) -> None:
        """Annotate the rows of what is compacted in a layer that has a ring."""
        layers = [] if self.ring is None else list(self.ring.layers)
        for index in np.flatnonzero(due[layers].any(axis=0)).tolist():
            self.flush(sequences[index])

    def flush(self, seq: Sequence) -> None:
        """Annotate all rows of a sequence that are not annotated yet."""
        ring, num_new = self.ring, self._num_pending(seq)
        if ring is not None and num_new:
            with self._errors.covering([seq]):
                for layer_idx in ring.layers:
                    self._annotate_kept(seq, layer_idx, ring.take(seq.slot, num_new, layer_idx))
            seq.num_annotated += num_new

    def _note_all(self, sequences: abc.Sequence[Sequence]) -> None:
        """Note that all rows of some sequences are annotated."""
        for seq in sequences:
            seq.num_annotated = int(self.cache.seq_len[seq.slot])

    def _num_pending(self, seq: Sequence) -> int:
        return int(self.cache.seq_len[seq.slot]) - seq.num_annotated

    def _annotate_kept(self, seq: Sequence, layer_idx: int, states: Tensor) -> None:
        """Annotate the newest rows of a slot in a layer from the states in its ring, ``[N, M]``."""
        cache, slot = self.cache, seq.slot
        layer, num_rows = cache.layers[layer_idx], int(cache.rows[layer_idx, slot])
        # A slab that is shorter than the ring has dropped the first of these rows.
        num_held = min(len(states), num_rows)
        seq_len = int(cache.seq_len[slot])
        device, arena = layer.shape.device, layer.arena
        rows = layer.rows_of(slot)
        newest = rows.part(rows.num_rows - num_held, rows.num_rows)
        with self._timings.time("annotate_s", device):
            (keys,), (values,) = arena.store.read(newest.read)
            annotations = self._ask_policies(
                layer_idx,
                False,
                states[len(states) - num_held :],
                keys.transpose(0, 1),
                values.transpose(0, 1),
                torch.arange(seq_len - num_held, seq_len, device=device),
            )
            for name, numbers in annotations.items():
                newest.write(arena.tracks[name], numbers.T[None])

    def _ask_in_prefill(
        self, step: Step, layer_idx: int, *tokens: Tensor
    ) -> abc.Mapping[str, Tensor]:
        with self._timings.time("annotate_s", tokens[0].device):
            return self._covered(step, layer_idx, None, tokens)

    def _ask_in_decode(
        self, step: Step, layer_idx: int, *tokens: Tensor
    ) -> abc.Mapping[str, Tensor]:
        if not step.is_static and self.ring is not None and layer_idx in self.ring.layers:
            pending = [self._num_pending(seq) for seq in step.sequences]
            self.ring.note(step.slots, pending, tokens[0], layer_idx)
        if not self._in_step[layer_idx]:
            return {}
        with self._timings.time(
            "annotate_s", None
        ):  # it may be captured in a graph, as time is not
            return self._covered(step, layer_idx, True, tokens)

    def _covered(
        self, step: Step, layer_idx: int, in_step: bool | None, tokens: abc.Sequence[Tensor]
    ) -> abc.Mapping[str, Tensor]:
        """Ask unless a policy has failed in this forward, which affects all its sequences."""
        annotations: abc.Mapping[str, Tensor] = {}
        if step.error is None:
            with self._errors.covering(step.sequences, step.fail):
                annotations = self._ask_policies(layer_idx, in_step, *tokens)
        return annotations

    def _ask_policies(
        self,
        layer_idx: int,
        in_step: bool | None,
        states: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
    ) -> abc.Mapping[str, Tensor]:
        """Annotations of tokens in this process' heads, ``[N, H_kv]`` by the name of a track."""
        gather, own_part = self._processes.all_gather, self._processes.own_part
        annotations = self._stacks[layer_idx].annotate(
            layer_idx,
            in_step=in_step,
            states=states,
            keys=gather(keys),
            values=gather(values),
            positions=positions,
            bound=self._bound[layer_idx],
        )
        return {name: own_part(numbers) for name, numbers in annotations.items()}
