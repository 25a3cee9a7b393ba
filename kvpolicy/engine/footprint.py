"""What a plan takes: rows and bytes of every layer, without running anything."""

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cache.slab import Cache, LayerCache, LayerShape, Slab
from kvpolicy.engine.isolation import ErrorScope
from kvpolicy.engine.observer import Observer
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import Clock
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import LayerPlan
from kvpolicy.registers import RegisterFile


@attrs.frozen
class LayerFootprint:
    """What one layer does and takes.

    Attributes:
        plan: What it does.
        sliding_window: Tokens that a query sees, its own included; ``None``: all before it.
        rows_per_slot: Rows allocated for each sequence.
        bytes_per_slot: Bytes allocated for each sequence: keys, values, positions, and the
            tracks and queries that its policies read.
        full_bytes_per_slot: Bytes of keys, values and positions if everything stayed that
            some query may still see.
    """

    plan: LayerPlan
    sliding_window: int | None
    rows_per_slot: int
    bytes_per_slot: int
    full_bytes_per_slot: int

    @property
    def layer_idx(self) -> int:
        """Decoder layer, counted from 0."""
        return self.plan.layer_idx

    def same_as(self, other: "LayerFootprint") -> bool:
        """Whether another layer does and takes the same."""
        return attrs.evolve(self, plan=attrs.evolve(self.plan, layer_idx=other.layer_idx)) == other


@attrs.frozen
class Footprint:
    """What a plan takes on one model.

    Attributes:
        digest: Digest of the resolved plan.
        dtype: Precision of keys and values.
        tokens: Longest sequence.
        slots: Sequences decoded together.
        shared_bytes_per_slot: Bytes of each sequence that belong to no layer: registers, and
            hidden states that policies have not been shown yet.
        layers: The layers, in order.
        schedule: Policies asked for the order of admission, with knobs.
    """

    digest: str
    dtype: str
    tokens: int
    slots: int
    shared_bytes_per_slot: int
    layers: tuple[LayerFootprint, ...]
    schedule: tuple[dict[str, Any], ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one sequence takes."""
        of_layers = sum(layer.bytes_per_slot for layer in self.layers)
        return of_layers + self.shared_bytes_per_slot

    @property
    def full_bytes_per_slot(self) -> int:
        """Bytes that one sequence of the greatest length would take if everything stayed."""
        return sum(layer.full_bytes_per_slot for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.bytes_per_slot

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "slots": self.slots,
            "digest": self.digest,
            "bytes_per_slot": self.bytes_per_slot,
            "bytes": self.num_bytes,
            "full_bytes_per_slot": self.full_bytes_per_slot,
            "shared_bytes_per_slot": self.shared_bytes_per_slot,
            "layers": [
                layer.plan.to_dict()
                | {
                    "sliding_window": layer.sliding_window,
                    "rows_per_slot": layer.rows_per_slot,
                    "bytes_per_slot": layer.bytes_per_slot,
                }
                for layer in self.layers
            ],
            "schedule": list(self.schedule),
        }


def footprint(
    plan: Plan, model: PreTrainedModel, *, slots: int, longest: int | None = None
) -> Footprint:
    """Work out what a plan takes on a model.

    Args:
        plan: The plan.
        model: The model; it may be on the device ``meta``.
        slots: Sequences decoded together.
        longest: Tokens of the longest sequence; the model's positions if not given.

    Returns:
        The same bytes that an engine would allocate.

    Raises:
        KVPolicyError: The engine cannot run the model, or the plan does not fit it.
    """
    adapter = ModelAdapter(model)
    resolved = plan.resolve(adapter.num_layers)
    tokens = min(longest or adapter.max_positions, adapter.max_positions)
    stacks = resolved.stacks()
    layers = []
    for layer, stack, shape in zip(resolved.layers, stacks, adapter.layer_shapes(), strict=True):
        held = _slot(shape, stack.slab(layer.capacity(tokens)))
        layers.append(
            LayerFootprint(
                plan=layer,
                sliding_window=shape.sliding_window,
                rows_per_slot=held.slab.capacity,
                bytes_per_slot=held.num_bytes,
                full_bytes_per_slot=_slot(shape, Slab(tokens)).num_bytes,
            )
        )
    schedule = resolved.to_dict()["schedule"]
    dtype = str(model.dtype).removeprefix("torch.")
    shared = _shared_bytes(resolved.layers, stacks, adapter)
    return Footprint(
        resolved.digest(), dtype, tokens, slots, shared, tuple(layers), tuple(schedule)
    )


# Bytes are counted on tensors that have no memory.
_NOWHERE = torch.device("meta")


def _shared_bytes(
    layers: Sequence[LayerPlan], stacks: Sequence[Stack], adapter: ModelAdapter
) -> int:
    policies = [policy for stack in stacks for policy in stack.policies]
    registers = RegisterFile(policies, 1, _NOWHERE)
    nothing = Cache([], [], num_slots=1)
    observer = Observer(layers, stacks, registers, None, Clock(), ErrorScope("raise"))
    observer.attach(nothing, adapter.hidden_size, adapter.model.dtype, _NOWHERE)
    return sum(tensor.nbytes for tensor in [*registers.all, *nothing.slot_tensors])


def _slot(shape: LayerShape, slab: Slab) -> LayerCache:
    """One slot of a layer."""
    return LayerCache(attrs.evolve(shape, device=_NOWHERE), slab, num_slots=1)
