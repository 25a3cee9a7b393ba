"""Mix: several policies rate every row, and the weighted sum of their ratings decides."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from attrs.validators import in_
from torch import Tensor

from kvpolicy import hookimpl, load_policy
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.parts import Parts

Normalise = Literal["rank", "minmax", "zscore", "sum"]

# What an entry of ``of`` says besides knobs.
_WORDS = ("policy", "weight")


def _spelled_out(value: Any) -> tuple[dict[str, Any], ...]:
    """The parts as plain data, with weights and all knobs, so that a plan can be hashed."""
    if not isinstance(value, (list, tuple)) or not value:
        msg = f"'of' must be a list of policies: {value!r}"
        raise ValueError(msg)
    listed = tuple(_spell_out(entry, place) for place, entry in enumerate(value))
    if not any(part["weight"] > 0 for part in listed):
        msg = f"'of' must give a policy a weight above 0: {[part['policy'] for part in listed]}"
        raise ValueError(msg)
    return listed


def _spell_out(entry: Any, place: int) -> dict[str, Any]:
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
        msg = f"policy 'mix' has a wrong part {place}: {error}"
        raise type(error)(msg) from error
    return {"policy": given["policy"], "weight": float(weight), **_knobs_of(policy, knobs)}


def _knobs_in(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: knob for name, knob in entry.items() if name not in _WORDS}


def _knobs_of(policy: object, given: dict[str, Any]) -> dict[str, Any]:
    """All knobs of a policy; those that are none and by default none cannot be said in TOML."""
    kind = type(policy)
    if not attrs.has(kind):
        return given
    fields = [field for field in attrs.fields(kind) if field.init]
    knobs = {field.alias: getattr(policy, field.name) for field in fields}
    unsaid = {field.alias for field in fields if field.default is None}
    return {name: knob for name, knob in knobs.items() if knob is not None or name not in unsaid}


@attrs.define(eq=False, kw_only=True)
class Mix:
    """Mix: several policies rate every row, and the weighted sum of their ratings decides.

    Scores of different policies have nothing in common but their order: sums of attention run
    into the hundreds, a mean of softmax weights stays below one, a redundancy is negative. So
    each policy's scores are brought to one scale first, for each sequence and KV head by
    itself, and over the rows in question only:

    * a row that any part pins (``inf``) is pinned, and what the part protects counts as
      protected in the plan;
    * of the others, a row that any part offers first (``-inf``) is offered first;
    * the rest are in question: all parts rate them, and ``normalise`` says how.

    ``"rank"``: the share of the other rows in question that score lower, equal ones counting
    half, as in a Borda count; only the order of scores matters. ``"minmax"``: 0 for the lowest,
    1 for the highest. ``"zscore"``: less the mean, by the standard deviation. ``"sum"``: by the
    sum of magnitudes, as CAOTE (Goel et al., 2025, arXiv 2504.14051) does with any policy's
    scores. Equal scores stay equal, and a part whose scores are all equal says nothing.

    Weights are divided by their sum. A part of weight 0 is not asked and costs nothing; a mix
    of one policy keeps what the policy keeps (with another scale than ``"rank"`` up to rounding
    of scores that are almost equal). Parts read, remember and are told what they would be in
    the stack itself, tracks apart from each other's. A policy that selects rows or does away
    with them cannot be a part: list it after the mix.

    Attributes:
        of: The parts: names of policies, or tables with ``policy``, ``weight`` (default 1) and
            knobs.
        normalise: ``"rank"``, ``"minmax"``, ``"zscore"`` or ``"sum"``, see above.
    """

    of: tuple[dict[str, Any], ...] = attrs.field(
        default=({"policy": "h2o", "n_recent": 8}, "rkv"), converter=_spelled_out
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
        """The policies that have a say, by name."""
        return self._parts

    @hookimpl
    def score(self, parts: Parts) -> Tensor:
        """Bring the parts' scores to one scale and add them up."""
        scores = torch.stack(parts.of(self)).double()  # [P, B, H_kv, T]
        pinned, offered = (scores == torch.inf).any(dim=0), (scores == -torch.inf).any(dim=0)
        weights = torch.tensor(
            [part["weight"] for part in self.of if part["weight"] > 0],
            dtype=scores.dtype,
            device=scores.device,
        )
        alike = _SCALES[self.normalise](scores, ~(pinned | offered))
        mixed = torch.tensordot(weights / weights.sum(), alike, dims=1)
        return mixed.masked_fill(offered, -torch.inf).masked_fill(pinned, torch.inf).float()


# Each scale takes scores, [P, B, H_kv, T], and which rows are in question, [B, H_kv, T]; what
# it says of the others is not looked at.


def _rank(scores: Tensor, asked: Tensor) -> Tensor:
    scores = scores.where(asked, torch.inf)
    ordered = scores.sort(dim=-1).values
    lower = torch.searchsorted(ordered, scores)
    not_higher = torch.searchsorted(ordered, scores, right=True)
    others = (asked.sum(dim=-1, keepdim=True) - 1).clamp(min=1)
    return (lower + not_higher - 1).double() / (2 * others)


def _minmax(scores: Tensor, asked: Tensor) -> Tensor:
    lowest = scores.where(asked, torch.inf).amin(dim=-1, keepdim=True)
    highest = scores.where(asked, -torch.inf).amax(dim=-1, keepdim=True)
    return (scores - lowest) / _or_one(highest - lowest)


def _zscore(scores: Tensor, asked: Tensor) -> Tensor:
    num = asked.sum(dim=-1, keepdim=True).clamp(min=1)
    mean = scores.where(asked, 0).sum(dim=-1, keepdim=True) / num
    variance = (scores - mean).where(asked, 0).square().sum(dim=-1, keepdim=True) / num
    return (scores - mean) / _or_one(variance.sqrt())


def _sum(scores: Tensor, asked: Tensor) -> Tensor:
    return scores / _or_one(scores.where(asked, 0).abs().sum(dim=-1, keepdim=True))


def _or_one(size: Tensor) -> Tensor:
    """A size to divide by; 1 where all scores are equal, and any size will do."""
    return size.where(size > 0, 1)


_SCALES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rank": _rank,
    "minmax": _minmax,
    "zscore": _zscore,
    "sum": _sum,
}
