"""The clause of knobs: written to a plan and read again, they make the same policy."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks import discovery
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.testing.clauses import ConformanceError, Example
from kvpolicy.testing.maker import Maker
from kvpolicy.testing.setup import Setup, World, least_budget
from kvpolicy.testing.story import Arrival, differs
from kvpolicy.testing.trial import Trial


def check_knobs(maker: Maker, world: World) -> bool:
    """Save and load the knobs of a policy through a plan.

    Returns:
        Whether it could be checked: only the knobs of attrs classes can be read.

    Raises:
        ConformanceError: If a knob is lost or changed.
    """
    policy = maker.build()
    fields: Any = getattr(type(policy), "__attrs_attrs__", None)
    if fields is None:
        return False
    given = {field.name: getattr(policy, field.name) for field in fields if field.init}
    with _named(maker.name, type(policy)):
        saved = _text(maker, given)
        first = _loaded(maker, json.loads(saved))
        again = _loaded(maker, json.loads(_text(maker, first.knobs)))
    for stage, spec in (("", first), (" and once more", again)):
        now = _text(maker, spec.knobs)
        if now != saved:
            came = f"{now} when they were written and read{stage}"
            raise _broken(maker, f"the knobs {saved}", came)
    _check_same_rows(maker, world, type(policy), first.knobs)
    return True


def _text(maker: Maker, knobs: dict[str, Any]) -> str:
    """The knobs as a file holds them."""
    for name, value in knobs.items():
        try:
            json.dumps(value, allow_nan=True)
        except TypeError as error:
            expected = f"'{name}' is a number, a text, true or false, or a list of such"
            raise _broken(maker, expected, f"{value!r:.80}, and {error}") from error
    return json.dumps(knobs)


def _loaded(maker: Maker, knobs: dict[str, Any]) -> PolicySpec:
    """The policy as a plan that says these knobs has it, all spelled out."""
    entry = {"policy": maker.name, **knobs}
    policy = maker.build()
    num_layers = 1 + max(getattr(policy, "steers", None) or (0,))
    try:
        # A plan spells out policies of layers and those that only schedule alike.
        plan = Plan.from_dict({"budget": least_budget(policy), "stack": [entry]})
        return plan.resolve(num_layers).layers[0].stack[0]
    except KVPolicyError as error:
        raise _broken(maker, f"a plan that says {entry}", str(error)) from error


def _check_same_rows(maker: Maker, world: World, policy_class: type, knobs: dict[str, Any]) -> None:
    """Serve the same with the policy as it was given, and as it was loaded."""
    loaded = attrs.evolve(maker, build=lambda: policy_class(**knobs))
    budget = least_budget(maker.build()) + 2
    setup = attrs.asdict(Setup(budget=budget, buffer=2, kv_heads=2, group=2, head_dim=8))
    arrival = Arrival(0, prompt=budget + 9, new=8)
    (before,), (after,) = (
        Trial(one, world=world, **setup).alone([arrival]) for one in (maker, loaded)
    )
    found = differs(after, before)
    if found is not None:
        raise _broken(maker, f"{found[0]} (as with the policy given)", f"{found[1]} when loaded")


@contextmanager
def _named(name: str, policy_class: type) -> Iterator[None]:
    """Have plans know a class by a name for the length of a block."""
    before = dict(discovery._from_files)
    discovery._from_files[name] = (policy_class, Path(f"<{name}>"))
    try:
        yield
    finally:
        discovery._from_files.clear()
        discovery._from_files.update(before)


def _broken(maker: Maker, expected: str, came: str) -> ConformanceError:
    code = [
        "import attrs",
        "from kvpolicy.testing import Trial",
        "",
        f"policy = Trial({maker.words}, budget=64).policy",
        "print({f.name: getattr(policy, f.name) for f in attrs.fields(type(policy)) if f.init})",
    ]
    example = Example("one policy, its knobs, and a plan", "\n".join(code))
    return ConformanceError("knobs", expected, came, maker.name, example)
