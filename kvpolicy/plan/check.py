"""Everything that is wrong with a plan, in one go.

`Plan.resolve` stops at the first problem. Here the plan is taken apart into the smallest plans
that say one thing each, and into its groups of layers, and each is put before the same code:
whatever a run would refuse is found, in the same words. What rests on something broken is not
looked at, so that one mistake is told once.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from kvpolicy.errors import CoverageError, KVPolicyError
from kvpolicy.plan.budget import MOST
from kvpolicy.plan.layercover import coverage_errors
from kvpolicy.plan.overrides import override
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.plan.spec import LayerGroup
from kvpolicy.plan.toml import RESERVED, reserved, tables

# Which group a key stands in, and the key; groups are counted from 0, the plan's own are None.
_Place = tuple[int | None, str]


@attrs.frozen
class Findings:
    """What was found in a plan.

    Attributes:
        problems: What is wrong with it, each once; the first is not worse than the others.
        resolved: What each layer will do, if nothing is wrong and the model is known.
    """

    problems: tuple[KVPolicyError, ...]
    resolved: ResolvedPlan | None = None


def check_plan(
    data: Mapping[str, Any],
    overrides: Sequence[str] = (),
    *,
    num_layers: int | None = None,
    name: str = "the plan",
) -> Findings:
    """Find everything that is wrong with a plan.

    Args:
        data: What its TOML file holds.
        overrides: Changes, as in `Plan.load`.
        num_layers: Layers of the model; ``None`` if it is not known: which layers are
            covered, and whether budgets suffice, is not looked at then.
        name: Name of the plan, for messages.
    """
    found: list[KVPolicyError] = []
    try:
        raw = tables(data, name)
    except KVPolicyError as error:
        return Findings((error,))
    for change in overrides:
        try:
            override(raw, change, name)
        except KVPolicyError as error:
            found.append(error)
    found += [reserved(section, name) for section in RESERVED if section in raw]
    raw = {key: value for key, value in raw.items() if key not in RESERVED}
    broken = _look_at_each(raw, name, found)
    if num_layers is not None:
        _look_at_groups(_sound(raw, broken, name), broken, num_layers, found)
    resolved = None
    if not found and num_layers is not None:
        try:
            resolved = Plan.from_dict(raw, name=name).resolve(num_layers)
        except KVPolicyError as error:
            found.append(error)
    first = {str(error): error for error in reversed(found)}
    return Findings(tuple(dict.fromkeys(first[str(error)] for error in found)), resolved)


def _look_at_each(raw: Mapping[str, Any], name: str, found: list[KVPolicyError]) -> set[_Place]:
    """Read every entry by itself and build every policy; which places are broken."""
    broken = set()
    for place, smallest in _entries(raw):
        try:
            plan = Plan.from_dict(smallest, name=name)
            for stack in (plan.stack, plan.schedule, *(group.stack for group in plan.layers)):
                for spec in stack or ():
                    spec.build()
        except KVPolicyError as error:
            found.append(error)
            broken.add(place)
    return broken


def _entries(raw: Mapping[str, Any]) -> Iterator[tuple[_Place, dict[str, Any]]]:
    """Every place of a plan, with a plan that says this one thing in the same place."""
    for key, value in raw.items():
        if key != "layers" or not isinstance(value, list):
            for part in _parts(key, value):
                yield (None, key), {key: part}
            continue
        for i, group in enumerate(value):
            before: list[Any] = [{}] * i
            if not isinstance(group, Mapping):
                yield (i, "where"), {"layers": [*before, group]}
                continue
            for inner, inner_value in group.items():
                for part in _parts(inner, inner_value):
                    yield (i, inner), {"layers": [*before, {inner: part}]}


def _parts(key: str, value: Any) -> list[Any]:
    """A stack as stacks of one policy each, anything else as it is."""
    is_stack = key in ("stack", "schedule") and isinstance(value, list) and value
    return [[policy] for policy in value] if is_stack else [value]


def _sound(raw: Mapping[str, Any], broken: set[_Place], name: str) -> Plan:
    """The plan without what is broken."""
    own = {key: value for key, value in raw.items() if (None, key) not in broken}
    if "layers" in own:
        groups = [
            {key: value for key, value in group.items() if (i, key) not in broken}
            for i, group in enumerate(own["layers"])
            if isinstance(group, Mapping)
        ]
        own["layers"] = groups
    return Plan.from_dict(own, name=name)


def _look_at_groups(
    plan: Plan, broken: set[_Place], num_layers: int, found: list[KVPolicyError]
) -> None:
    """Resolve every group as if it were the only one, and see who covers what."""
    where_is_known = not any(key == "where" for _, key in broken)
    if where_is_known and (None, "layers") not in broken:
        groups = plan.layers or (LayerGroup(),)
        found += coverage_errors(groups, num_layers, plan.name)
        for i, group in enumerate(groups):
            if not _rests_on_broken(i, group, broken):
                _look_at_group(plan, group, num_layers, found)


def _rests_on_broken(i: int, group: LayerGroup, broken: set[_Place]) -> bool:
    keys = ("stack", "budget", "buffer")
    theirs = {(None if getattr(group, key) is None else i, key) for key in keys}
    return any((i, key) in broken for key in keys) or bool(broken & {*theirs, (None, "length")})


def _look_at_group(
    plan: Plan, group: LayerGroup, num_layers: int, found: list[KVPolicyError]
) -> None:
    # A second time with room for everything: a budget that is wrong hides a wrong buffer.
    for tried in (group, attrs.evolve(group, budget=MOST)):
        try:
            attrs.evolve(plan, layers=(tried,), schedule=()).resolve(num_layers)
        except CoverageError:
            continue  # of one group alone; all groups together have been looked at
        except KVPolicyError as error:
            found.append(error)
