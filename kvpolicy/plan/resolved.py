"""A plan spelled out for one model: plain data that hashes and is stored with every result."""

import hashlib
import json
import re
from itertools import chain
from typing import Any

import attrs

from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.spec import Padding, PolicySpec


@attrs.frozen
class LayerPlan:
    """What one layer will do.

    Attributes:
        layer_idx: Decoder layer, counted from 0.
        stack: Its policies with all their knobs.
        budget: Rows that stay after a compaction; ``None``: everything stays.
        buffer: Rows that may join before the next one.
        bounded: Whether its slabs have a fixed size; if not, they are as long as the longest
            sequence may become.
        num_protected: Rows that its policies promise to keep.
        budget_from: What the budget is a share of, in words, if the plan says a share. Told
            to readers; the plan is the same as one that says the count.
    """

    layer_idx: int
    stack: tuple[PolicySpec, ...]
    budget: int | None
    buffer: int
    bounded: bool
    num_protected: int = 0
    budget_from: str | None = attrs.field(default=None, eq=False)

    @property
    def num_spare_rows(self) -> int:
        """Rows that pads may take away without breaking a promise, or leaving none."""
        if not self.bounded or self.budget is None:
            return 0
        return self.budget - max(self.num_protected, 1)

    def capacity(self, longest: int) -> int:
        """Rows to allocate for each slot if no sequence exceeds ``longest`` tokens."""
        if not self.bounded or self.budget is None:
            return longest
        return min(self.budget + self.buffer, longest)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "layer": self.layer_idx,
            "stack": [{"policy": spec.policy, **spec.knobs} for spec in self.stack],
            "budget": self.budget if self.bounded else None,
            "buffer": self.buffer if self.bounded else None,
            # Policies whose slabs grow may still compact: a budget of theirs is kept apart.
            **({} if self.bounded else {"prefill_budget": self.budget}),
            **({} if self.budget_from is None else {"budget_from": self.budget_from}),
        }


def _as_text(knob: object) -> object:
    """A knob that is no plain data, in words that are the same in every process."""
    if isinstance(knob, (set, frozenset)):
        return sorted(knob, key=repr)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(knob))


@attrs.frozen
class ResolvedPlan:
    """What every layer of one model will do.

    Attributes:
        layers: One plan for each layer, in order.
        schedule: Policies that are asked for the order of admission only.
        padding: ``"none"``, or ``"stored"``: pads of a prefill group take up budget.
        name: Where the plan came from, for messages.
    """

    layers: tuple[LayerPlan, ...]
    schedule: tuple[PolicySpec, ...] = ()
    padding: Padding = "none"
    name: str = attrs.field(default="the plan", eq=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "layers": [layer.to_dict() for layer in self.layers],
            "schedule": [{"policy": spec.policy, **spec.knobs} for spec in self.schedule],
            # Said only where it differs, so that digests of other plans stay what they were.
            **({} if self.padding == "none" else {"padding": self.padding}),
            **({"code": code} if (code := self._code()) else {}),
        }

    def _code(self) -> dict[str, str]:
        """Hashes of the code of policies that are not kvpolicy's own."""
        specs = [*chain.from_iterable(layer.stack for layer in self.layers), *self.schedule]
        named = {spec.policy: spec for spec in specs}
        codes = {name: spec.code() for name, spec in sorted(named.items())}
        return {name: code for name, code in codes.items() if code is not None}

    def digest(self) -> str:
        """A stable hash of all that this plan says, 16 hexadecimal digits."""
        said = self.to_dict()
        for layer in said["layers"]:
            layer.pop("budget_from", None)  # a share says the same as the count it comes to
        text = json.dumps(said, sort_keys=True, default=_as_text)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def stacks(self) -> list[Stack]:
        """Build the stacks, one for each layer; layers with the same policies share theirs."""
        built: dict[str, Stack] = {}
        stacks = []
        for layer in self.layers:
            key = json.dumps(
                [[spec.policy, id(spec.instance), spec.knobs] for spec in layer.stack],
                default=repr,
            )
            if key not in built:
                built[key] = Stack([(spec.policy, spec.build()) for spec in layer.stack])
            stacks.append(built[key])
        return stacks

    def scheduling_stack(self) -> Stack:
        """Build the stack that is asked for the order of admission."""
        return Stack([(spec.policy, spec.build()) for spec in self.schedule])
