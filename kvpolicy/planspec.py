"""The words of a plan: a policy with knobs, and a group of layers treated alike."""

from collections.abc import Mapping
from typing import Any, Literal

import attrs

from kvpolicy.discovery import load_policy, snake_case

Padding = Literal["none", "stored"]


@attrs.frozen
class PolicySpec:
    """A policy by name, with the knobs that differ from its defaults.

    Attributes:
        policy: Name of an installed policy.
        knobs: Knobs by name.
        instance: The policy itself, for policies made in Python; never in a file.
    """

    policy: str
    knobs: dict[str, Any] = attrs.field(factory=dict)
    instance: object | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, policy: object, knobs: Mapping[str, Any] | None = None) -> "PolicySpec":
        """Name a policy, or take one made in Python as it is."""
        if isinstance(policy, PolicySpec):
            return policy
        if isinstance(policy, str):
            return cls(policy, dict(knobs or {}))
        return cls(snake_case(type(policy).__name__), instance=policy)

    def build(self) -> object:
        """The policy object; see `kvpolicy.load_policy` for the errors."""
        return self.instance or load_policy(self.policy, **self.knobs)


@attrs.frozen
class LayerGroup:
    """Layers that are treated alike; what is ``None`` is taken from the plan.

    Attributes:
        where: ``"all"``, a slice such as ``"0:2"`` or ``"-2:"``, or a list of layers.
        stack: Policies, the later ones wrapping the earlier ones.
        budget: Rows that stay after a compaction.
        buffer: Rows that may join before the next one.
    """

    where: str | tuple[int, ...] = "all"
    stack: tuple[PolicySpec, ...] | None = None
    budget: int | None = None
    buffer: int | None = None
