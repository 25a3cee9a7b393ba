"""What a plan takes: rows and bytes of every layer, without running anything."""

from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cache import LayerCache, LayerShape, Slab
from kvpolicy.compat import Seam
from kvpolicy.plan import Plan
from kvpolicy.resolved import LayerPlan


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
        layers: The layers, in order.
        schedule: Policies asked for the order of admission, with knobs.
    """

    digest: str
    dtype: str
    tokens: int
    slots: int
    layers: tuple[LayerFootprint, ...]
    schedule: tuple[dict[str, Any], ...]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes that one sequence takes in all layers."""
        return sum(layer.bytes_per_slot for layer in self.layers)

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
    seam = Seam(model)
    resolved = plan.resolve(seam.num_layers)
    tokens = min(longest or seam.max_positions, seam.max_positions)
    layers = []
    for layer, stack, shape in zip(
        resolved.layers, resolved.stacks(), seam.layer_shapes(), strict=True
    ):
        held = _slot(shape, stack.slab(layer.capacity(tokens)))
        layers.append(
            LayerFootprint(
                plan=layer,
                sliding_window=shape.sliding_window,
                rows_per_slot=held.slab.capacity,
                bytes_per_slot=_bytes(held),
                full_bytes_per_slot=_bytes(_slot(shape, Slab(tokens))),
            )
        )
    schedule = resolved.to_dict()["schedule"]
    dtype = str(model.dtype).removeprefix("torch.")
    return Footprint(resolved.digest(), dtype, tokens, slots, tuple(layers), tuple(schedule))


def _slot(shape: LayerShape, slab: Slab) -> LayerCache:
    """One slot of a layer, in tensors that have no memory."""
    return LayerCache(attrs.evolve(shape, device=torch.device("meta")), slab, num_slots=1)


def _bytes(layer: LayerCache) -> int:
    return sum(tensor.nbytes for tensor in layer.tensors)
