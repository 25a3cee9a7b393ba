"""From what a plan file holds to a plan, with every mistake answered by a sentence."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn

from kvpolicy.errors import PlanError
from kvpolicy.hooks.discovery import nearest
from kvpolicy.plan import budget as planbudget
from kvpolicy.plan import extends
from kvpolicy.plan.budget import Budget
from kvpolicy.plan.overrides import override
from kvpolicy.plan.spec import LayerGroup, Padding, PolicySpec, padding_of, where_of

if TYPE_CHECKING:
    from kvpolicy.plan.plan import Plan

# Sections that plans will have one day: nobody's key until then.
RESERVED = {
    "sampling": (
        "set it with --temperature, --top-p, --top-k and --seed, or in Python with "
        "generate(..., sampling=Sampling(...))"
    ),
    "steering": "list a policy that steers in the stack, with its knobs",
}


def structure(
    plan_class: "type[Plan]", data: Mapping[str, Any], overrides: Sequence[str], name: str
) -> "Plan":
    """Turn what a TOML file holds into a plan; unknown keys and wrong types are refused."""
    if isinstance(overrides, str):
        msg = f"changes of {name} were given as one text, {overrides!r:.60}; give a list of them"
        raise PlanError(msg)
    raw = tables(data, name)
    for change in overrides:
        override(raw, change, name)
    for section in RESERVED:
        if section in raw:
            raise reserved(section, name)
    if "name" in raw:
        # Where a plan came from is told by whoever reads it, and is no key of the file.
        msg = f"{name}: unknown key 'name'; a plan is called by its file. Take the key out"
        raise PlanError(msg)
    try:
        plan = _converter().structure(raw, plan_class)
    except cattrs.BaseValidationError as error:
        msg = f"{name}: {first_problem(error)}"
        raise PlanError(msg) from error
    return attrs.evolve(plan, name=name)


def tables(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of what a file or a caller gives, as the lists and tables of TOML, bases merged."""
    if not isinstance(data, Mapping):
        msg = f"{name} was given as {data!r:.60}; a table of its keys is wanted"
        raise PlanError(msg)
    copied: dict[str, Any] = _copy(extends.merged(data, name), name)
    return copied


def reserved(section: str, name: str) -> PlanError:
    """What is raised for a section that is not a plan's yet."""
    return PlanError(f"{name}: section '{section}' is reserved; {RESERVED[section]}")


def _copy(data: Any, name: str) -> Any:
    if isinstance(data, Mapping):
        strange = [key for key in data if not isinstance(key, str)]
        if strange:
            msg = f"{name} has a key {strange[0]!r:.60}; keys are texts"
            raise PlanError(msg)
        return {key: _copy(value, name) for key, value in data.items()}
    return [_copy(value, name) for value in data] if isinstance(data, (list, tuple)) else data


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(int, lambda value, _: planbudget.whole(value))
    converter.register_structure_hook(PolicySpec, lambda value, _: _policy_spec(value))

    def register(hook: Any, *types: object) -> None:
        converter.register_structure_hook_func(types.__contains__, lambda value, _: hook(value))

    register(_stack, tuple[PolicySpec, ...], tuple[PolicySpec, ...] | None)
    register(planbudget.budget, Budget, Budget | None)
    register(where_of, attrs.fields(LayerGroup).where.type)
    register(padding_of, Padding)
    group = make_dict_structure_fn(LayerGroup, converter, _cattrs_forbid_extra_keys=True)

    def one_group(value: object, _: object) -> LayerGroup:
        if not isinstance(value, Mapping):
            msg = f'{value!r:.60} is no group of layers; write [[layers]] with where = "0:2"'
            raise TypeError(msg)
        return group(value, LayerGroup)

    def all_groups(value: object) -> tuple[LayerGroup, ...]:
        if not isinstance(value, list):
            msg = f'{value!r:.60} is no list of groups; write [[layers]] with where = "0:2"'
            raise TypeError(msg)
        return tuple(converter.structure(value, list[LayerGroup]))

    converter.register_structure_hook(LayerGroup, one_group)
    register(all_groups, tuple[LayerGroup, ...])
    return converter


def _stack(value: object) -> tuple[PolicySpec, ...]:
    if isinstance(value, list):
        return tuple(_policy_spec(entry) for entry in value)
    msg = f'{value!r:.60} is no list of policies; write for example ["NAME", "NAME"]'
    raise TypeError(msg)


def _policy_spec(value: object) -> PolicySpec:
    if isinstance(value, str):
        return PolicySpec(value)
    if isinstance(value, Mapping) and isinstance(value.get("policy"), str):
        knobs = {key: knob for key, knob in value.items() if key != "policy"}
        return PolicySpec(value["policy"], knobs)
    msg = f'{value!r:.60} names no policy; write "NAME" or {{ policy = "NAME", KNOB = VALUE }}'
    raise TypeError(msg)


def first_problem(error: BaseException, where: str = "") -> str:
    """The first leaf of cattrs' tree of errors, as a sentence."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        known = [field.name for field in attrs.fields(error.cl) if field.name != "name"]
        known += [extends.KEY] if "layers" in known else []
        key = min(error.extra_fields)
        return f"unknown key '{key}'{where}{nearest(key, known)}"
    if isinstance(error, BaseExceptionGroup):
        inner = error.exceptions[0]
        places = [str(note).rpartition(" @ ")[2] for note in getattr(inner, "__notes__", [])]
        deeper = "".join(map(_place, places))
        return first_problem(inner, where + deeper)
    return f"{where.strip()}: {error}" if where else str(error)


def _place(note: str) -> str:
    """``attribute layers`` as " in layers", ``index 0`` as "[0]"."""
    kind, _, name = note.partition(" ")
    return f"[{name}]" if kind == "index" else f" in {name}"
