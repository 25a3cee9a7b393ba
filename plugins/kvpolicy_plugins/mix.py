"""Mix: the weighted sum of the normalised scores of several policies."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from attrs.validators import in_
from torch import Tensor

from kvpolicy import KVPolicyError, Parts, hookimpl, load_policy

Normalise = Literal["rank", "minmax", "zscore", "sum"]

# Keys of an entry of ``of`` that are not knobs.
_KEYS = ("policy", "weight")


def _with_all_knobs(value: Any) -> tuple[dict[str, Any], ...]:
    """The parts as plain data with weights and all knobs, so that the plan can be hashed."""
    if not isinstance(value, (list, tuple)) or not value:
        msg = f"'of' must be a list of policies: {value!r}"
        raise ValueError(msg)
    listed = tuple(_entry_with_all_knobs(entry, index) for index, entry in enumerate(value))
    if not any(part["weight"] > 0 for part in listed):
        msg = f"'of' must give a policy a weight above 0: {[part['policy'] for part in listed]}"
        raise ValueError(msg)
    return listed


def _entry_with_all_knobs(entry: Any, index: int) -> dict[str, Any]:
    given = {"policy": entry} if isinstance(entry, str) else entry
    if not isinstance(given, Mapping) or not isinstance(given.get("policy"), str):
        msg = f"'of' must list names, or tables with a policy, its weight and knobs: {entry!r}"
        raise ValueError(msg)
    weight: Any = given.get("weight", 1.0)
    is_number = isinstance(weight, (int, float)) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:
        msg = f"'weight' of '{given['policy']}' must be a number from 0 on: {weight!r}"
        raise ValueError(msg)
    knobs = _knobs_in(given)
    try:
        policy = load_policy(given["policy"], **knobs)
    except KVPolicyError as error:
        msg = f"policy 'mix' has a wrong part {index}: {error}"
        raise type(error)(msg) from error
    return {"policy": given["policy"], "weight": float(weight), **_knobs_of(policy, knobs)}


def _knobs_in(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: knob for name, knob in entry.items() if name not in _KEYS}


def _knobs_of(policy: object, given: dict[str, Any]) -> dict[str, Any]:
    """All knobs of a policy, without those left at ``None``, which TOML cannot express."""
    kind = type(policy)
    if not attrs.has(kind):
        return given
    fields = [field for field in attrs.fields(kind) if field.init]
    knobs = {field.alias: getattr(policy, field.name) for field in fields}
    optional = {field.alias for field in fields if field.default is None}
    return {name: knob for name, knob in knobs.items() if knob is not None or name not in optional}


@attrs.define(eq=False, kw_only=True)
class Mix:
    """Mix: score rows by the weighted sum of the normalised scores of several policies.

    Scores of different policies have different scales: sums of attention reach hundreds, means
    of softmax weights stay below one, redundancies are negative. So the scores of each part are
    normalised first, separately for each sequence and KV head, over the contested rows only:

    * rows that are protected, by a part or in the stack, stay;
    * of the others, a row that any part gives ``inf`` leaves last, one with ``-inf`` first;
    * the rest are contested and normalised as ``normalise`` says.

    ``"rank"``: the fraction of the other contested rows with a lower score, equal ones counting
    half, as in a Borda count; only the order of scores matters. ``"minmax"``: 0 for the lowest
    score, 1 for the highest. ``"zscore"``: minus the mean, divided by the standard deviation.
    ``"sum"``: divided by the sum of magnitudes, as CAOTE (Goel et al., 2025, arXiv 2504.14051)
    does. Equal scores stay equal, and a part whose scores are all equal has no effect.

    Weights are divided by their sum. A part of weight 0 is not called. A mix of one policy keeps
    the same rows as the policy (with a scale other than ``"rank"`` up to rounding of almost
    equal scores). Parts have tracks, memory and registers of their own and are shown the same
    tokens as policies of the stack. The first part that divides the budget among layers does so,
    unless a policy of the stack does. A policy that implements `select`, `evict` or `schedule`
    cannot be a part: list it after the mix.

    Attributes:
        of: The parts: names of policies, or tables with ``policy``, ``weight`` (default 1) and
            knobs.
        normalise: ``"rank"``, ``"minmax"``, ``"zscore"`` or ``"sum"``, see above.
    """

    of: tuple[dict[str, Any], ...] = attrs.field(
        default=({"policy": "h2o", "n_recent": 8}, "rkv"), converter=_with_all_knobs
    )
    normalise: Normalise = attrs.field(
        default="rank", validator=in_(["rank", "minmax", "zscore", "sum"])
    )
    _parts: tuple[tuple[str, object], ...] = attrs.field(init=False, repr=False)

    @_parts.default
    def _build(self) -> tuple[tuple[str, object], ...]:
        return tuple(
            (part["policy"], load_policy(part["policy"], **_knobs_in(part)))
            for part in self.of
            if part["weight"] > 0
        )

    @property
    def parts(self) -> tuple[tuple[str, object], ...]:
        """The policies with a weight above 0, by name."""
        return self._parts

    @hookimpl
    def score(self, protected: Tensor, parts: Parts) -> Tensor:
        """Normalise the scores of the parts and add them up."""
        scores = torch.stack(parts.of(self)).double()  # [P, B, H_kv, T]
        first_out = (scores == -torch.inf).any(dim=0)
        pinned = (scores == torch.inf).any(dim=0)
        given = [part["weight"] for part in self.of if part["weight"] > 0]
        weights = torch.tensor(given, dtype=scores.dtype).to(scores.device, non_blocking=True)
        scaled = _SCALES[self.normalise](scores, ~(protected | pinned | first_out))
        mixed = torch.tensordot(weights / weights.sum(), scaled, dims=1)
        return mixed.masked_fill(first_out, -torch.inf).masked_fill(pinned, torch.inf).float()


# Each scale takes scores, [P, B, H_kv, T], and the mask of contested rows, [B, H_kv, T]. Its
# values for other rows are not used.


def _rank(scores: Tensor, contested: Tensor) -> Tensor:
    scores = scores.where(contested, torch.inf)
    ordered = scores.sort(dim=-1).values
    lower = torch.searchsorted(ordered, scores)
    not_higher = torch.searchsorted(ordered, scores, right=True)
    others = (contested.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    return (lower + not_higher - 1).double() / (2 * others)


def _minmax(scores: Tensor, contested: Tensor) -> Tensor:
    lowest = scores.where(contested, torch.inf).amin(dim=-1, keepdim=True)
    highest = scores.where(contested, -torch.inf).amax(dim=-1, keepdim=True)
    return (scores - lowest) / _or_one(highest - lowest)


def _zscore(scores: Tensor, contested: Tensor) -> Tensor:
    num = contested.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = scores.where(contested, 0).sum(dim=-1, keepdim=True) / num
    variance = (scores - mean).where(contested, 0).square().sum(dim=-1, keepdim=True) / num
    return (scores - mean) / _or_one(variance.sqrt())


def _sum(scores: Tensor, contested: Tensor) -> Tensor:
    return scores / _or_one(scores.where(contested, 0).abs().sum(dim=-1, keepdim=True))


def _or_one(size: Tensor) -> Tensor:
    """A divisor that is not 0: 1 where all scores are equal."""
    return size.where(size > 0, 1)


_SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rank": _rank,
    "minmax": _minmax,
    "zscore": _zscore,
    "sum": _sum,
}
