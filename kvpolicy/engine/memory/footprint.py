"""Rows and bytes that a plan allocates on a model, computed without allocating them."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.layouts.base import LayerCache
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.engine.bound_plan import DEFAULT_MAX_TOKENS
from kvpolicy.engine.compose import slot_bytes
from kvpolicy.engine.memory.layers import check_layers
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.stack import Stack
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import LayerPlan, ResolvedPlan

# Bytes are counted on tensors without memory.
_META = torch.device("meta")


@attrs.frozen
class LayerFootprint:
    """What one layer does and allocates.

    Attributes:
        plan: What it does.
        sliding_window: Tokens that a query attends to, including its own; ``None``: all.
        rows_per_slot: Rows allocated for each sequence and KV head; in the mean over the heads if
            they share them.
        bytes_per_slot: Bytes allocated for each sequence: keys, values, positions, the tracks and
            queries that its policies read, where the rows of each head begin if heads share
            them, and its states.
        full_bytes_per_slot: Bytes of keys, values and positions of a full cache, of all rows
            that some query can still attend to, and of its states.
        kv_bytes_per_row: Bytes of the keys and values of one row, in all heads, as it is stored.
        other_bytes_per_row: Bytes of the positions and tracks of one row.
        window_bytes_per_slot: Bytes of the stored queries.
        plain_bytes_per_row: Those of the keys and values of a row in the model's precision, in
            which attention and policies read it.
        state_bytes_per_slot: Bytes of its states of fixed size, which no budget changes.
        source: The layer whose rows it attends to, and which allocates them; ``None``: itself.
        exact_bytes_per_slot: Bytes of the exact copies of its newest rows, likewise.
    """

    plan: LayerPlan
    sliding_window: int | None
    rows_per_slot: int
    bytes_per_slot: int
    full_bytes_per_slot: int
    kv_bytes_per_row: int
    other_bytes_per_row: int
    window_bytes_per_slot: int
    plain_bytes_per_row: int
    state_bytes_per_slot: int = 0
    source: int | None = None
    exact_bytes_per_slot: int = 0

    @property
    def layer_idx(self) -> int:
        """Decoder layer, counted from 0."""
        return self.plan.layer_idx

    def to_dict(self) -> dict[str, Any]:
        """What the layer does and allocates, as plain data."""
        plan = self.plan.to_dict()
        if self.sliding_window is not None:
            plan.pop("prefill_buffer", None)  # it has no rows beside its slabs
        sizes: tuple[str, ...] = ("sliding_window", "rows_per_slot", "bytes_per_slot")
        fixed = ("state_bytes_per_slot", "exact_bytes_per_slot")
        sizes += tuple(size for size in fixed if getattr(self, size))
        source = {} if self.source is None else {"source": self.source}
        return plan | {size: getattr(self, size) for size in sizes} | source

    def same_as(self, other: "LayerFootprint") -> bool:
        """Whether two layers differ in their number only."""
        return attrs.evolve(self, plan=attrs.evolve(self.plan, layer_idx=other.layer_idx)) == other


@attrs.frozen
class Footprint:
    """What a plan allocates on one model.

    Attributes:
        plan: The resolved plan.
        dtype: Precision of keys and values.
        tokens: Longest sequence.
        prompt_tokens: Longest prompt, which matters where the rows of prompts stay.
        slots: Sequences decoded together.
        shared_bytes_per_slot: Bytes of each sequence that belong to no slab: registers, hidden
            states that are kept until policies observe them, and those that enter the attention of
            layers and are kept until policies annotate their rows.
        layers: The layers, in order.
        lookahead_size: The most tokens of a lookahead.
        lookahead_bytes_per_slot: Bytes that a lookahead of a sequence takes for a moment, at most:
            keys and values of its tokens in all layers, and their queries.
        max_tokens_per_forward: The most prompt tokens of all sequences in one forward.
        longest_entering: See `footprint`.
        staged_bytes_per_prompt: Bytes of these rows of one prompt.
        staged_copy_bytes: The most bytes of a temporary copy of one prompt with such rows.
    """

    plan: ResolvedPlan
    dtype: str
    tokens: int
    prompt_tokens: int
    slots: int
    shared_bytes_per_slot: int
    layers: tuple[LayerFootprint, ...]
    lookahead_size: int = 0
    lookahead_bytes_per_slot: int = 0
    max_tokens_per_forward: int = DEFAULT_MAX_TOKENS
    longest_entering: int | None = None
    staged_bytes_per_prompt: int = 0
    staged_copy_bytes: int = 0

    @property
    def first(self) -> LayerFootprint:
        """The first layer that has rows."""
        return self.layers[self.plan.attention[0]]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one sequence."""
        return sum(layer.bytes_per_slot for layer in self.layers) + self.shared_bytes_per_slot

    @property
    def state_bytes_per_slot(self) -> int:
        """Bytes of the states of one sequence, which no budget changes."""
        return sum(layer.state_bytes_per_slot for layer in self.layers)

    @property
    def full_bytes_per_slot(self) -> int:
        """Bytes of one sequence of the greatest length in a full cache."""
        return sum(layer.full_bytes_per_slot for layer in self.layers)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, and of the staging area."""
        return self.slots * self.bytes_per_slot + self.staging_bytes

    @property
    def num_staged(self) -> int:
        """Prompts that have rows beside their slabs at a time."""
        return self.plan.num_staged(
            self.slots, self.max_tokens_per_forward, self.tokens, self.longest_entering
        )

    @property
    def staging_bytes(self) -> int:
        """Bytes of the rows beside the slabs, which all slots share."""
        return self.num_staged * self.staged_bytes_per_prompt

    @property
    def copied_bytes(self) -> int:
        """The most bytes of a temporary copy.

        A compaction copies rows of one layer at a time; with rows beside slabs, or in integers, so
        does a forward. Exact copies of its newest rows wait in all layers until it is done.
        """
        of_slot = max(self._copied_rows(one) * one.plain_bytes_per_row for one in self.layers)
        waiting = sum(layer.exact_bytes_per_slot for layer in self.layers)
        copied = max(self.slots * of_slot, self.num_staged * self.staged_copy_bytes)
        return copied + self.slots * waiting

    def _copied_rows(self, layer: LayerFootprint) -> int:
        """Rows of a slot that are copied at once.

        With exact ones: all, and another copy of them with those that are read exactly behind it.
        """
        rows, exact = layer.rows_per_slot, layer.plan.rows.exact
        return 2 * rows + min(rows, exact + self.max_tokens_per_forward) if exact else rows

    @property
    def needed_bytes(self) -> int:
        """Bytes with all that is copied or added for a moment."""
        return self.num_bytes + self.copied_bytes + self.slots * self.lookahead_bytes_per_slot

    @property
    def groups(self) -> list[list[LayerFootprint]]:
        """Consecutive equal layers."""
        groups: list[list[LayerFootprint]] = []
        for layer in self.layers:
            if groups and groups[-1][-1].same_as(layer):
                groups[-1].append(layer)
            else:
                groups.append([layer])
        return groups

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "slots": self.slots,
            "digest": self.plan.digest(),
            "bytes_per_slot": self.bytes_per_slot,
            "bytes": self.num_bytes,
            "copied_bytes": self.copied_bytes,
            "staging_bytes": self.staging_bytes,
            "full_bytes_per_slot": self.full_bytes_per_slot,
            "state_bytes_per_slot": self.state_bytes_per_slot,
            "shared_bytes_per_slot": self.shared_bytes_per_slot,
            "lookahead_bytes_per_slot": self.lookahead_bytes_per_slot,
            "layers": [layer.to_dict() for layer in self.layers],
            "schedule": self.plan.to_dict()["schedule"],
        }


def footprint(
    plan: Plan | ResolvedPlan,
    model: PreTrainedModel | ModelAdapter,
    *,
    slots: int,
    longest: int | None = None,
    longest_prompt: int | None = None,
    longest_entering: int | None = None,
    max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
) -> Footprint:
    """Compute what a plan allocates on a model.

    Args:
        plan: The plan.
        model: The model, or an adapter; it may be on the device ``meta``.
        slots: Sequences decoded together.
        longest: Tokens of the longest sequence; the model's positions if not given.
        longest_prompt: Tokens of the longest prompt; ``longest`` if not given.
        longest_entering: The most tokens that a sequence has when its first token is drawn, if
            they are known to be fewer; they matter where prompts have rows beside slabs.
        max_tokens_per_forward: As of `Engine`: so many prompts have rows beside their slabs.

    Returns:
        The same bytes that an engine allocates.

    Raises:
        KVPolicyError: The engine cannot run the model, or the plan does not fit it.
    """
    adapter = model if isinstance(model, ModelAdapter) else ModelAdapter(model)
    resolved = plan.resolve(adapter.num_layers, attention=adapter.attention_layers)
    check_layers(resolved, adapter)
    tokens = min(longest or adapter.max_positions, adapter.max_positions)
    prompt_tokens = min(longest_prompt or tokens, tokens)
    parts = zip(resolved.layers, resolved.stacks(), adapter.layer_shapes(), strict=True)
    layers, staged, copies = [], 0, [0]
    for layer, stack, shape in parts:
        slab = layer.slab(stack, tokens, prompt_tokens, longest_entering)
        if not shape.has_rows:
            layers.append(_without_rows(layer, shape))
            continue
        cache = _slot(shape, slab)
        if cache.slab.staging is not None:
            staged += _slot(shape, cache.slab.of_lanes).num_bytes
            # All rows in a copy, and those of the slab in one on the way.
            copies.append((slab.most_rows + slab.capacity) * shape.row_bytes)
        window_bytes = 0 if cache.window is None else cache.window.nbytes
        of_rows = sum(slab.nbytes for slab in cache.slabs)
        layers.append(
            LayerFootprint(
                plan=layer,
                sliding_window=shape.sliding_window,
                rows_per_slot=cache.slab.capacity,
                bytes_per_slot=cache.num_bytes + shape.state_bytes,
                full_bytes_per_slot=_slot(shape, Slab(tokens)).num_bytes + shape.state_bytes,
                kv_bytes_per_row=cache.row_bytes,
                other_bytes_per_row=of_rows // cache.slab.capacity - cache.row_bytes,
                window_bytes_per_slot=window_bytes,
                plain_bytes_per_row=shape.row_bytes,
                state_bytes_per_slot=shape.state_bytes,
                exact_bytes_per_slot=cache.exact_bytes,
            )
        )
    dtype = str(adapter.model.dtype).removeprefix("torch.")
    return Footprint(
        resolved,
        dtype,
        tokens,
        prompt_tokens,
        slots,
        slot_bytes(resolved, adapter),
        tuple(layers),
        lookahead_size=max(stack.lookahead_size for stack in resolved.stacks()),
        lookahead_bytes_per_slot=_lookahead_bytes(resolved.stacks(), adapter.layer_shapes()),
        max_tokens_per_forward=max_tokens_per_forward,
        longest_entering=longest_entering,
        staged_bytes_per_prompt=staged,
        staged_copy_bytes=max(copies),
    )


def slots_within(
    num_bytes: int,
    plan: Plan | ResolvedPlan,
    model: PreTrainedModel | ModelAdapter,
    *,
    longest: int | None = None,
    longest_prompt: int | None = None,
    max_tokens_per_forward: int = DEFAULT_MAX_TOKENS,
) -> int:
    """How many slots of a plan fit into so many bytes, with the copy that a compaction makes.

    The arguments are those of `footprint`.

    Raises:
        KVPolicyError: Not one slot fits.
    """
    one = footprint(
        plan,
        model,
        slots=1,
        longest=longest,
        longest_prompt=longest_prompt,
        max_tokens_per_forward=max_tokens_per_forward,
    )
    needed = one.needed_bytes
    if num_bytes < needed:
        msg = (
            f"kv_memory is {num_bytes:,} bytes, and one sequence of up to {one.tokens:,} tokens "
            f"takes {needed:,} with {one.plan.name}; give at least as many, a smaller max_len, or "
            "a plan with smaller budgets"
        )
        raise KVPolicyError(msg)
    most = range(1, num_bytes // one.bytes_per_slot + 1)
    return bisect_right(most, num_bytes, key=lambda num: attrs.evolve(one, slots=num).needed_bytes)


def _lookahead_bytes(stacks: Sequence[Stack], shapes: Sequence[LayerShape]) -> int:
    """Bytes of the largest lookahead of a sequence, of all stacks that have one."""
    of_rows = sum(shape.row_bytes for shape in shapes)
    of_queries = {
        stack: sum(
            shape.num_heads * shape.head_dim * shape.dtype.itemsize
            for other, shape in zip(stacks, shapes, strict=True)
            if other is stack
        )
        for stack in dict.fromkeys(stacks)
    }
    return max(stack.lookahead_size * (of_rows + of_queries[stack]) for stack in stacks)


def _without_rows(layer: LayerPlan, shape: LayerShape) -> LayerFootprint:
    """What a layer without rows of its own allocates: its states."""
    return LayerFootprint(
        layer,
        sliding_window=None,
        rows_per_slot=0,
        bytes_per_slot=shape.state_bytes,
        full_bytes_per_slot=shape.state_bytes,
        kv_bytes_per_row=0,
        other_bytes_per_row=0,
        window_bytes_per_slot=0,
        plain_bytes_per_row=0,
        state_bytes_per_slot=shape.state_bytes,
        source=shape.source,
    )


def _slot(shape: LayerShape, slab: Slab) -> LayerCache:
    """One slot of a layer."""
    return KVCache([attrs.evolve(shape, device=_META)], [slab], num_slots=1).layers[0]
