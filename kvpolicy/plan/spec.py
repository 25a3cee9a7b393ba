"""The words of a plan: a policy with knobs, and a group of layers treated alike."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, get_args

import attrs

from kvpolicy.errors import PlanError
from kvpolicy.hooks.discovery import load_policy, load_policy_class, snake_case
from kvpolicy.plan import budget as planbudget
from kvpolicy.plan.budget import Budget
from kvpolicy.plan.codehash import code_of

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
    knobs: dict[str, Any] = attrs.field(factory=dict, converter=dict)
    instance: object | None = attrs.field(default=None, repr=False)

    @classmethod
    def of(cls, policy: object, knobs: Mapping[str, Any] | None = None) -> "PolicySpec":
        """Name a policy, or take one made in Python as it is.

        Raises:
            PlanError: If it is neither.
        """
        if isinstance(policy, PolicySpec):
            return policy
        if isinstance(policy, str):
            return cls(policy, dict(knobs or {}))
        if inspect.isclass(policy):
            name = policy.__name__
            msg = f"policy {name} was given as a class; give an object, {name}()"
            raise PlanError(msg)
        if policy is None or isinstance(policy, (int, float, bytes, list, tuple, set, Mapping)):
            msg = f"{policy!r:.60} is no policy; give its name, or an object with hooks"
            raise PlanError(msg)
        return cls(snake_case(type(policy).__name__), instance=policy)

    def build(self) -> object:
        """The policy object; see `kvpolicy.load_policy` for the errors."""
        return load_policy(self.policy, **self.knobs) if self.instance is None else self.instance

    def code(self) -> str | None:
        """Hash of the policy's code; `None` if kvpolicy's own version says it."""
        named = self.instance is None
        return code_of(load_policy_class(self.policy) if named else type(self.instance))


def specs_of(stack: Iterable[object] | None) -> tuple[PolicySpec, ...]:
    """A stack made in Python: names, policy objects and specs, in order."""
    if stack is None or isinstance(stack, (str, Mapping)) or not isinstance(stack, Iterable):
        msg = f'{stack!r:.60} is no list of policies; write for example ["NAME", "NAME"]'
        raise PlanError(msg)
    return tuple(PolicySpec.of(policy) for policy in stack)


def knobs_of(knobs: Mapping[str, Mapping[str, Any]] | None) -> dict[str, dict[str, Any]]:
    """Knobs made in Python, by policy name and knob name."""
    given = {} if knobs is None else knobs
    if not isinstance(given, Mapping) or not all(
        isinstance(one, Mapping) for one in given.values()
    ):
        msg = f'knobs were given as {knobs!r:.60}; write {{"POLICY": {{"KNOB": VALUE}}}}'
        raise PlanError(msg)
    return {str(policy): dict(of_policy) for policy, of_policy in given.items()}


def padding_of(value: object) -> object:
    """How pads are treated, as it came; `TypeError` with a sentence if nobody knows it."""
    if value not in get_args(Padding):
        msg = f"{value!r:.60} is no padding; write one of {', '.join(get_args(Padding))}"
        raise TypeError(msg)
    return value


def checked_with(
    check: Callable[[object], object],
) -> "Callable[[object, attrs.Attribute[Any], object], None]":
    """A validator of an optional field, of a check that raises `TypeError`."""

    def validate(_instance: object, field: "attrs.Attribute[Any]", value: object) -> None:
        try:
            if value is not None:
                check(value)
        except TypeError as error:
            msg = f"the plan: in {field.name}: {error}"
            raise PlanError(msg) from error

    return validate


def where_of(value: object) -> str | tuple[int, ...]:
    """Which layers a group is about, as it came; `TypeError` with a sentence if nothing is."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple)) and value:
        return tuple(planbudget.whole(layer) for layer in value)
    msg = f'{value!r} names no layers; write "all", a slice such as "0:2", or a list such as [0, 5]'
    raise TypeError(msg)


def _where(value: str | Iterable[int]) -> str | tuple[int, ...]:
    try:
        return where_of(value)
    except TypeError as error:
        msg = f"the plan: in where: {error}"
        raise PlanError(msg) from error


@attrs.frozen
class LayerGroup:
    """Layers that are treated alike; what is ``None`` is taken from the plan.

    Attributes:
        where: ``"all"``, a slice such as ``"0:2"`` or ``"-2:"``, or a list of layers.
        stack: Policies, the later ones wrapping the earlier ones.
        budget: Rows that stay after a compaction, or a share such as ``"25%"``.
        buffer: Rows that may join before the next one.
    """

    where: str | tuple[int, ...] = attrs.field(default="all", converter=_where)
    stack: tuple[PolicySpec, ...] | None = attrs.field(
        default=None, converter=attrs.converters.optional(specs_of)
    )
    budget: Budget | None = attrs.field(default=None, validator=checked_with(planbudget.budget))
    buffer: int | None = attrs.field(default=None, validator=checked_with(planbudget.whole))


def groups_of(layers: Iterable[object]) -> tuple[LayerGroup, ...]:
    """Groups of layers made in Python, in order."""
    given: tuple[object, ...] = tuple(layers) if isinstance(layers, Iterable) else (layers,)
    for one in given:
        if not isinstance(one, LayerGroup):
            msg = (
                f"layers were given as {layers!r:.60}; each is a group of layers with its own "
                "stack or budget: LayerGroup([0, 5], stack=...), or [[layers]] in a file"
            )
            raise PlanError(msg)
    return tuple(one for one in given if isinstance(one, LayerGroup))
