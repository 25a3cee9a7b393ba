"""`select_rows`: which rows stay, from tensors alone.

The interface for engines other than ours. Whoever holds keys and values, in pages or otherwise,
gets the rows that a plan's policies keep, and removes the others itself. Nothing is kept between
two calls but what the caller passes on: the tracks of rows, and the memory of sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from kvpolicy.attention.accumulators import ACCUMULATORS
from kvpolicy.attention.softmax import observed_weights
from kvpolicy.cache.rows import Tracks, checked_numbers
from kvpolicy.engine.eviction.choice import final_scores
from kvpolicy.errors import BudgetError, KVPolicyError
from kvpolicy.hooks.checks import mask_of
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.spec import Heads, PolicySpec
from kvpolicy.state import Bound, Memory, SequenceMemory


@attrs.frozen(eq=False, kw_only=True)
class CacheView:
    """The rows that some sequences hold in one layer.

    All sequences of a call hold the same number of rows, and every row is a token; sequences with
    another number need a call of their own. Where heads share their rows, ``T`` is that of the
    fullest head, and columns that a head has no row for come first, with position -1 and 0
    elsewhere. Tensors that no policy reads may be left out.

    Attributes:
        positions: Position of each row's token in its sequence, ``[B, H_kv, T]``, int64, strictly
            rising along ``T``.
        keys: Keys after RoPE, ``[B, H_kv, T, D]``.
        values: Values, ``[B, H_kv, T, D]``.
        queries: The last ``W`` queries after RoPE, ``[B, H_q, W, D]``, oldest first.
        lookahead_queries: Queries of tokens that might follow, ``[B, H_q, P, D]``, as of a forward
            that the caller has run, since `lookahead` is not called; if left out, there are none.
        attn_weights: Softmax weights of these queries over the rows, ``[B, H_q, W, T]``, fp32; if
            left out, computed from ``queries`` and ``keys`` with a plain softmax.
        tracks: Numbers of each row by the names in `Stack.tracks`, ``[B, H_kv, T]``: the policies'
            own, fp32, which are 0 if left out, and the accumulators of attention, which the caller
            keeps, as `score` is told of them.
        seq_len: Tokens of each sequence so far, ``[B]``; if left out, up to its last position.
        prompt_len: Tokens of each prompt, ``[B]``; if left out, ``seq_len``.
        num_new: Tokens of each sequence since its last compaction, ``[B]``; if left out, all.
        is_image: Rows that belong to images, bool ``[B, H_kv, T]``; if left out, none.
        out_of_sight: Rows that no later query can see, bool ``[B, H_kv, T]``: they leave first.
        layer_idx: Decoder layer, counted from 0.
        bound: What `Stack.bind` has made of the layer's weights, for policies that read them.
    """

    positions: Tensor
    keys: Tensor | None = None
    values: Tensor | None = None
    queries: Tensor | None = None
    lookahead_queries: Tensor | None = None
    attn_weights: Tensor | None = None
    tracks: Mapping[str, Tensor] = attrs.field(factory=dict)
    seq_len: Tensor | None = None
    prompt_len: Tensor | None = None
    num_new: Tensor | None = None
    is_image: Tensor | None = None
    out_of_sight: Tensor | None = None
    layer_idx: int = 0
    bound: Bound | None = None


@attrs.frozen(eq=False)
class Selection:
    """Which rows stay.

    Attributes:
        keep: Rows that stay, int64, rising: ``[B, H_kv, K]``, or ``[B, K]`` where all heads or all
            layers keep the same. Where heads share their rows, a mask, bool ``[B, H_kv, T]``.
        tracks: For each layer that was given, the numbers of all its rows by name,
            ``[B, H_kv, T]``, as policies have left them: those at ``keep`` are of rows that stay.
    """

    keep: Tensor
    tracks: Sequence[Mapping[str, Tensor]]


def select_rows(
    stack: Stack | str | object | Sequence[str | object],
    rows: CacheView | Sequence[CacheView],
    *,
    budget: int,
    memory: Sequence[SequenceMemory] | None = None,
    same_heads: bool = False,
    heads: Heads = "own",
) -> Selection:
    """Decide which rows stay, as a compaction of the engine does.

    Calls `protect`, `score` and `select`; the caller removes rows, so `evict` is not called.

    Where heads keep the same rows, `select` is asked once, with the mean of the scores of all
    heads, and rows that are protected in any head stay.

    Args:
        stack: The policies of the layer: a stack, as ``plan.resolve(num_layers).stacks()[layer]``
            gives it, or a policy, a name, or a list of these.
        rows: The rows of a layer; of several layers with equal positions if these keep the same.
        budget: Rows that stay.
        memory: What policies remember of each sequence, ``[B]``, between calls; by default nothing.
        same_heads: Whether all heads of the layer keep the same rows. Then their positions are
            equal. Always so for several layers.
        heads: ``"own"``: each head has the budget for itself. ``"shared"``: it is the mean over the
            heads of a layer.

    Returns:
        All rows if there are no more than the budget.

    Raises:
        BudgetError: Policies declare to protect more rows than the budget.
        KVPolicyError: Tensors that a policy reads are left out, or do not fit together.
        HookError: A policy raises.
        HookResultError: A policy's answer breaks the contract.
    """
    stack = _stack_of(stack)
    protected = stack.n_first + stack.n_last
    if budget < max(protected, 1):
        names = "+".join(stack.names)
        msg = f"policy '{names}' protects {protected} rows; a budget of {budget} is less"
        raise BudgetError(msg)
    if stack.mass_problem is not None:
        raise KVPolicyError(stack.mass_problem)
    together = not isinstance(rows, CacheView)
    shares = heads == "shared"
    if shares and (together or same_heads or stack.even_only):
        reason = "heads that keep the same rows share none"
        if stack.even_only:
            reason = f"policy '{stack.even_only[0]}' does not declare ragged = True"
        msg = f'select_rows() was given heads="shared", but {reason}; leave it out'
        raise KVPolicyError(msg)
    listed = [
        _Rows(one, stack, shares=shares)
        for one in (rows if not isinstance(rows, CacheView) else [rows])
    ]
    if not listed:
        msg = "select_rows() was given no layers; give the rows of at least one"
        raise KVPolicyError(msg)
    first = listed[0]
    if together or same_heads:
        _check_positions(listed)
    num_sequences, num_heads, num_rows = first.positions.shape
    memory = memory or [SequenceMemory() for _ in range(num_sequences)]
    shared: dict[str, Any] = {"budget": budget, "prompt_len": first.prompt_len}
    shared["memory"] = Memory(memory)
    positions = first.positions
    if num_rows <= budget and shares:
        return Selection(first.positions >= 0, [first.numbers])
    if num_rows <= budget:
        every = torch.arange(num_rows, device=positions.device)
        size = (num_sequences,) if together or same_heads else (num_sequences, num_heads)
        return Selection(every.expand(*size, -1), [one.numbers for one in listed])
    scores = [
        final_scores(
            one,
            stack,
            one.layers[0],
            bound=one.bound,
            supplied={"lookahead_queries": one.lookahead_queries},
            positions=one.positions,
            is_image=one.is_image,
            **shared,
        )
        for one in listed
    ]
    chosen = scores[0]
    if together or same_heads:
        chosen, positions = _mean(torch.cat(scores, dim=1)), positions[:, :1]
    keep = stack.select(first.layers[0], scores=chosen, positions=positions, heads=heads, **shared)
    if shares:
        keep = mask_of(keep, positions)
    if together or same_heads:
        keep = keep[:, 0]
    return Selection(keep, [one.numbers for one in listed])


def _stack_of(stack: Stack | str | object | Sequence[str | object]) -> Stack:
    if isinstance(stack, Stack):
        return stack
    listed = stack if isinstance(stack, (list, tuple)) else [stack]
    specs = [PolicySpec.of(one, {}) for one in listed]
    return Stack([(spec.policy, spec.build()) for spec in specs])


def _mean(scores: Tensor) -> Tensor:
    """Mean over heads, ``[B, 1, T]``; ``inf`` of one head outweighs ``-inf`` of another."""
    is_pinned = (scores == float("inf")).any(dim=1, keepdim=True)
    mean = scores.nan_to_num(posinf=0.0).mean(dim=1, keepdim=True)
    mean = mean.clamp(max=torch.finfo(mean.dtype).max)  # the sum of the largest scores is inf
    return mean.masked_fill(is_pinned, float("inf"))


def _check_positions(rows: Sequence["_Rows"]) -> None:
    positions = rows[0].positions[:, :1]
    for one in rows:
        alike = one.positions.shape[::2] == positions.shape[::2]
        if not alike or not bool((one.positions == positions).all()):
            msg = (
                "select_rows() was given rows at different positions in the heads or layers that "
                "are to keep the same; give rows that are the same in all of them"
            )
            raise KVPolicyError(msg)


class _Rows:
    """Given rows as policies are told of them; see `kvpolicy.cache.rows.HeldRows`.

    Attributes:
        numbers: Numbers of the rows by the name of the track, ``[B, H_kv, T]``.
    """

    def __init__(self, given: CacheView, stack: Stack, *, shares: bool = False) -> None:
        self._given = given
        self.positions = positions = given.positions
        _check_shapes(given)
        self.layers = [given.layer_idx] * len(positions)
        last = positions[:, :, -1].amax(dim=1).cpu() + 1
        self.seq_len = last if given.seq_len is None else given.seq_len.cpu()
        self.prompt_len = self.seq_len if given.prompt_len is None else given.prompt_len.cpu()
        self.num_new = self.seq_len if given.num_new is None else given.num_new.cpu()
        self.out_of_sight, self.lookahead_queries = given.out_of_sight, given.lookahead_queries
        self.absent = positions < 0 if shares else None
        none = torch.zeros_like(positions, dtype=torch.bool)
        self.is_image = none if given.is_image is None else given.is_image
        self._names = "+".join(stack.names)
        self.bound = given.bound
        if given.bound is None and stack.implements("bind"):
            name, argument = "weights", "bound=stack.bind(layer_idx, weights)"
            raise self._left_out(name, argument)
        zeros = torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
        self.numbers = {name: given.tracks.get(name, zeros) for name in stack.tracks}
        for name in ACCUMULATORS:
            if name in stack.tracks and name not in given.tracks:
                raise self._left_out(name, f"tracks={{'{name}': ...}}")

    @property
    def keys(self) -> Tensor:
        return self._tensor("keys")

    @property
    def values(self) -> Tensor:
        return self._tensor("values")

    @property
    def queries(self) -> Tensor:
        return self._tensor("queries")

    @property
    def attn_weights(self) -> Tensor:
        if self._given.attn_weights is not None:
            return self._given.attn_weights
        present = None if self.absent is None else ~self.absent
        return observed_weights(
            self.queries, self.keys, self.positions, self.seq_len, present=present
        )

    @property
    def tracks(self) -> Tracks:
        return Tracks(self)

    def track(self, name: str) -> Tensor:
        return self.numbers[name]

    def set_track(self, name: str, values: Tensor) -> None:
        like = self.numbers[name]
        self.numbers[name] = checked_numbers(f"track '{name}' was given", values, like.shape, like)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor | None = getattr(self._given, name)
        if tensor is None:
            raise self._left_out(name, f"{name}=...")
        return tensor

    def _left_out(self, name: str, argument: str) -> KVPolicyError:
        msg = (
            f"policy '{self._names}' reads {name}, which select_rows() was not given; write "
            f"CacheView({argument})"
        )
        return KVPolicyError(msg)


# Axes of the tensors of `CacheView`: those of the positions, or any size.
_AXES = {
    "keys": "BHT.",
    "values": "BHT.",
    "queries": "B...",
    "lookahead_queries": "B...",
    "attn_weights": "B..T",
    "out_of_sight": "BHT",
    "is_image": "BHT",
    "seq_len": "B",
    "prompt_len": "B",
    "num_new": "B",
}


def _check_shapes(given: CacheView) -> None:
    if given.positions.dim() != 3 or not all(given.positions.shape):
        msg = (
            f"select_rows() was given positions of shape {list(given.positions.shape)}; expected "
            "[B, H_kv, T] with at least one row"
        )
        raise KVPolicyError(msg)
    sizes = dict(zip("BHT", given.positions.shape, strict=True))
    named = [(name, axes, getattr(given, name)) for name, axes in _AXES.items()]
    named += [(f"tracks['{name}']", "BHT", track) for name, track in given.tracks.items()]
    for name, axes, tensor in named:
        if tensor is None:
            continue
        fits = tensor.dim() == len(axes) and all(
            sizes.get(axis, size) == size for axis, size in zip(axes, tensor.shape, strict=True)
        )
        if not fits:
            wanted = ", ".join(str(sizes.get(axis, "any")) for axis in axes)
            msg = (
                f"select_rows() was given {name} of shape {list(tensor.shape)}; expected "
                f"[{wanted}], as positions have shape {list(given.positions.shape)}"
            )
            raise KVPolicyError(msg)
