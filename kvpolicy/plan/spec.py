"""The entries of a plan: policies with knobs, budgets, and groups of layers.

Every rule about a value is written once, as a `Rule` of its field. Plans made in Python, plan
files, overrides and the JSON schema for editors all use it.
"""

import errno
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import date, time
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import attrs
import cattrs
from cattrs.gen import make_dict_structure_fn, override

from kvpolicy.entry_points import nearest, packages_of
from kvpolicy.errors import BudgetError, PlanError, PolicyLoadError, class_name, type_name
from kvpolicy.hooks.discovery import GROUP, load_policy, load_policy_class, snake_case
from kvpolicy.plan.plain import as_plain, held_by
from kvpolicy.plugin_code import plugin_code
from kvpolicy.validators import MAX_COUNT, positive_int

Budget = int | str
# Keys and indices that lead to an entry of a plan.
Location = tuple[str | int, ...]
Padding = Literal["none", "stored"]
PromptRows = Literal["evict", "keep"]
Heads = Literal["own", "shared"]
RowFormat = Literal["model", "int8", "int4"]

#: Top-level sections that plans do not have, with what to use instead.
RESERVED = {
    "sampling": (
        "set it with --temperature, --top-p, --top-k and --seed, or in Python with "
        "generate(..., sampling=Sampling(...))"
    ),
    "steering": "list a policy that steers in the stack, with its knobs",
}

#: A share as text: ``"25%"``, ``"12.5%"``.
SHARE = r"^[0-9]+(\.[0-9]+)?%$"
_END = r" *(-?[0-9]{1,9})? *"
# A slice as in Python whose step is not 0.
_SLICE = rf"{_END}:{_END}(: *(-?0{{0,8}}[1-9][0-9]{{0,8}})? *)?"
_WHERE = rf"^(all|attention|{_SLICE}|attention\[{_SLICE}\])$"

# Fields of plans and sweeps that are no keys of their files.
_FOR_MESSAGES = ("name", "sources", "options")

# Values of TOML and JSON that are no policy objects.
_PLAIN = (int, float, str, bytes, list, tuple, set, frozenset, Mapping, date, time, type(None))

T = TypeVar("T")

#: Reads the tables of plan files; raises the errors of all their values together.
CONVERTER = cattrs.Converter()


@attrs.frozen
class Rule:
    """How one field of a plan is read.

    Attributes:
        read: Returns the value to store; raises `TypeError` with a sentence, or cattrs'
            group of errors for a value with entries.
        schema: The JSON schema of the values that it accepts.
    """

    read: Callable[[Any], Any]
    schema: Mapping[str, Any]


def plan_field(rule: Rule, default: Any) -> Any:
    """An attrs field with a rule; ``None`` is accepted if it is the default."""

    def convert(value: object, field: "attrs.Attribute[Any]") -> Any:
        if value is None and default is None:
            return None
        try:
            return rule.read(value)
        except (TypeError, cattrs.BaseValidationError) as error:
            first = problems_of(error)[0]
            msg = f"the plan: {attrs.evolve(first, path=(field.name, *first.path))}"
            raise PlanError(msg) from error

    converter = attrs.Converter(convert, takes_field=True)
    return attrs.field(default=default, converter=converter, metadata={"rule": rule})


# Rules of single values


def _read_budget(value: object) -> Budget:
    if isinstance(value, str) and re.fullmatch(SHARE, value):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        msg = (
            f"{value!r:.60} is not a count or a share; write a number of rows such as 128, or a "
            'share of a stated length such as "25%"'
        )
        raise TypeError(msg)
    return positive_int(value)


def _read_where(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str) and re.fullmatch(_WHERE, value):
        return value
    layers = tuple(value) if isinstance(value, (list, tuple)) else ()
    if layers and all(type(layer) is int and abs(layer) <= MAX_COUNT for layer in layers):
        return layers
    msg = (
        f'{value!r:.60} is not a set of layers; write "all", a slice such as "0:2" or "-2:", a '
        'slice of the layers with attention, "attention[0:2]", or a list such as [0, 5]'
    )
    raise TypeError(msg)


def _one_of(choices: tuple[str, ...], what: str) -> Rule:
    def read_choice(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return value
        msg = f"{value!r:.60} is not {what}; write one of {', '.join(choices)}"
        raise TypeError(msg)

    return Rule(read_choice, {"enum": list(choices)})


def _read_heads(value: object) -> Heads:
    for known in get_args(Heads):
        if isinstance(value, str) and value == known:
            return known
    msg = (
        f'{value!r:.60} does not say how KV heads have the budget; write "own", or "shared" for '
        "the budget of all heads together"
    )
    raise TypeError(msg)


@attrs.frozen
class RowFormats:
    """How the keys and the values of rows are stored.

    Attributes:
        keys: ``"model"``: in the model's precision; ``"int8"`` or ``"int4"``: in integers.
        values: Likewise.
        exact: Newest tokens whose keys or values stay exact where these have 4 bits.
    """

    keys: RowFormat = "model"
    values: RowFormat = "model"
    exact: int = attrs.field()

    @exact.default
    def _enough(self) -> int:
        sides = {"keys": self.keys, "values": self.values}
        return max(EXACT_ROWS[name] if form == "int4" else 0 for name, form in sides.items())

    @property
    def key_bits(self) -> int:
        """Bits of the numbers of keys; 0: those of the model's precision."""
        return _BITS[self.keys]

    @property
    def value_bits(self) -> int:
        """Those of values."""
        return _BITS[self.values]

    def to_plain(self) -> str | dict[str, str | int]:
        """As a plan file has it."""
        if self == RowFormats(self.keys, self.values):
            sides = {"keys": self.keys, "values": self.values}
            return self.keys if self.keys == self.values else {**sides}
        return attrs.asdict(self)

    def __str__(self) -> str:
        """In few words: ``int8/int4``, or with another number of exact rows ``int4, 64 exact``."""
        sides = self.keys if self.keys == self.values else f"{self.keys}/{self.values}"
        plain = isinstance(self.to_plain(), str) or "exact" not in self.to_plain()
        return sides if plain else f"{sides}, {self.exact} exact"


#: Newest tokens whose rows stay exact by default, if a side has 4 bits. Of a small model keys in 4
#: bits cost 1.9 % of perplexity with 8, and half a percent with 16 or 32. Values alone cost 0.6 %
#: with none, 0.3 % with 8, and 0.2 % with 32, which take as many bytes as 76 rows.
EXACT_ROWS = {"keys": 16, "values": 8}

_BITS: dict[RowFormat, int] = {"model": 0, "int8": 8, "int4": 4}

#: Keys and values in the model's precision.
PLAIN_ROWS = RowFormats()


def _read_rows(value: object) -> RowFormats:
    if isinstance(value, RowFormats):
        return value
    sides: dict[Any, Any]
    if isinstance(value, Mapping):
        sides = dict(value)
    else:  # "int8/int4": keys, then values
        keys, slash, values = value.partition("/") if isinstance(value, str) else (value, "", "")
        sides = {"keys": keys, "values": values if slash else keys}
    exact = {"exact": sides.pop("exact")} if "exact" in sides else {}
    known = all(isinstance(one, str) and one in _BITS for one in sides.values())
    if not (known and sides and set(sides) <= {"keys", "values"}):
        msg = (
            f'{value!r:.60} does not say how rows are stored; write "model", "int8", "int4", or '
            'for keys and values "int8/int4", which is { keys = "int8", values = "int4" }'
        )
        raise TypeError(msg)
    if exact:
        _check_exact(value, exact["exact"], sides)
    return RowFormats(**sides, **exact)


def _check_exact(value: object, exact: object, sides: Mapping[Any, Any]) -> None:
    """Check how many newest tokens of keys and values in some forms are to stay exact."""
    if type(exact) is not int or not 0 <= exact <= MAX_COUNT:
        problem = f"no number of tokens in exact; write for example exact = {EXACT_ROWS['keys']}"
    elif exact and "int4" not in sides.values():
        problem = "exact, which is for rows in 4 bits; leave it out"
    elif exact == 0 and sides.get("keys") == "int4":
        problem = (
            "keys in 4 bits and no exact rows, with which models answer much worse; write exact = "
            f"{EXACT_ROWS['keys']}, or leave it out"
        )
    else:
        return
    msg = f"{value!r:.80} has {problem}"
    raise TypeError(msg)


def _list_of(cls: type[T], expected: str) -> Callable[[Any], tuple[T, ...]]:
    """Read a list entry by entry; cattrs raises the errors of all entries together."""

    def read_list(value: Any) -> tuple[T, ...]:
        if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
            msg = f"{value!r:.60} is not {expected}"
            raise TypeError(msg)
        return CONVERTER.structure(value, tuple[cls, ...])  # type: ignore[valid-type]

    return read_list


# Policies


def _knobs(given: Any) -> dict[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(knob, str) for knob in given):
        msg = f'knobs of a policy were given as {given!r:.60}; write {{"KNOB": VALUE}}'
        raise PlanError(msg)
    return dict(given)


@attrs.frozen
class PolicySpec:
    """A policy by name, with the knobs that differ from its defaults.

    Attributes:
        policy: Name of an installed policy.
        knobs: Knobs by name.
        instance: The policy itself, for policies made in Python; never in a file.
        files: Hashes of the files that knobs name, by their names; known once knobs are spelled
            out.
    """

    policy: str
    knobs: dict[str, Any] = attrs.field(factory=dict, converter=_knobs)
    instance: object | None = attrs.field(default=None, repr=False)
    files: dict[str, str] = attrs.field(factory=dict, repr=False)

    @classmethod
    def of(cls, policy: object, knobs: Mapping[str, Any] | None = None) -> "PolicySpec":
        """Convert a name, a table of a plan file, a policy object or a spec.

        Args:
            policy: What to convert.
            knobs: Knobs of a policy given by name.

        Raises:
            PlanError: If it is none of these.
        """
        try:
            spec = _read_policy(policy, PolicySpec)
        except TypeError as error:
            raise PlanError(str(error)) from error
        return attrs.evolve(spec, knobs=knobs) if knobs and isinstance(policy, str) else spec

    def build(self) -> object:
        """The policy object; see `kvpolicy.load_policy` for the errors."""
        return load_policy(self.policy, **self.knobs) if self.instance is None else self.instance

    def spell_out(self, policy: object) -> "PolicySpec":
        """The same spec with the values of all knobs of the policy built from it.

        Knobs of a class of attrs are its fields. Of an object of another class, which names none,
        they are all that it holds: policies hold nothing but knobs.

        Raises:
            PolicyLoadError: If the knobs cannot be read.
            PlanError: If a file that a knob names cannot be read.
        """
        fields: tuple[attrs.Attribute[object], ...] | None
        fields = getattr(type(policy), "__attrs_attrs__", None)
        held, knobs = self.knobs, self.knobs
        with plugin_code(f"the knobs of policy '{self.policy}' cannot be read", PolicyLoadError):
            if fields:
                kept = [field for field in fields if field.init]
                held = knobs = {str(field.alias): getattr(policy, field.name) for field in kept}
                json.dumps(knobs, default=repr, sort_keys=True)  # as plans are told apart
            elif self.instance is not None:
                held = held_by(policy)
                knobs = {"attributes": as_plain(held)} if held else {}
        return attrs.evolve(self, knobs=knobs, files=hashes_of_files(held))

    def code(self) -> str | None:
        """Hash of the policy's code, see `hash_of_code`."""
        is_named = self.instance is None
        return hash_of_code(load_policy_class(self.policy) if is_named else type(self.instance))

    def to_dict(self) -> dict[str, Any]:
        """The name and all knobs in one table, as in a plan file."""
        return {"policy": self.policy, **self.knobs}


def _read_policy(value: object, _: object) -> PolicySpec:
    if isinstance(value, PolicySpec):
        return value
    if isinstance(value, str):
        return PolicySpec(value)
    if isinstance(value, Mapping) and isinstance(value.get("policy"), str):
        knobs = {key: knob for key, knob in value.items() if key != "policy"}
        return PolicySpec(value["policy"], knobs)
    if inspect.isclass(value):
        name = class_name(value)
        msg = f"policy {name} was given as a class; give an object, {name}()"
        raise TypeError(msg)
    if isinstance(value, _PLAIN):
        msg = (
            f'{value!r:.60} is not a policy; write "NAME" or {{ policy = "NAME", KNOB = VALUE }}, '
            "or give an object with hooks in Python"
        )
        raise TypeError(msg)
    return PolicySpec(snake_case(type_name(value)), instance=value)


CONVERTER.register_structure_hook(PolicySpec, _read_policy)


def hash_of_code(policy: type) -> str | None:
    """Hash the file that defines a policy; files that it imports are not included.

    Results are stored by the hash of their plan. With names and knobs alone, an edited policy
    would be given the samples of its previous version.

    Args:
        policy: The policy's class.

    Returns:
        8 hexadecimal digits; ``None`` without a file, and for policies that come with kvpolicy,
        whose version identifies them.
    """
    package = policy.__module__.partition(".")[0]
    if package == "kvpolicy" or package in packages_of(GROUP, "kvpolicy"):
        return None
    file = getattr(sys.modules.get(policy.__module__), "__file__", None)
    if file is None or not Path(file).is_file():
        return None
    return _hash_of_file(file)


def hashes_of_files(knob: object) -> dict[str, str]:
    """Hash the files that a knob names, also within lists and tables.

    Results with a file that was made again under the same name are not those with the old one.

    Args:
        knob: A path, or a text; it names a file if there is a regular file of this name.

    Returns:
        8 hexadecimal digits for each file, by its name as the knob gives it.

    Raises:
        PlanError: If one cannot be read.
    """
    if isinstance(knob, Mapping):
        knob = list(knob.values())
    if isinstance(knob, (list, tuple, set, frozenset)):
        return dict(sorted(pair for one in knob for pair in hashes_of_files(one).items()))
    if not isinstance(knob, (str, os.PathLike)):
        return {}
    try:
        return {os.fsdecode(knob): _hash_of_file(knob)} if Path(knob).is_file() else {}
    except ValueError:  # a text with a NUL
        return {}
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return {}
        msg = f"file '{os.fsdecode(knob)}', which a knob names, cannot be read: {error.strerror}"
        raise PlanError(msg) from error


def _hash_of_file(path: str | os.PathLike[Any]) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:8]


# Fields

_COUNT = {"type": "integer", "minimum": 1, "maximum": MAX_COUNT}
_LAYER = {"type": "integer", "minimum": -MAX_COUNT, "maximum": MAX_COUNT}

COUNT = Rule(positive_int, _COUNT)
BUDGET = Rule(_read_budget, {"oneOf": [_COUNT, {"type": "string", "pattern": SHARE}]})
PADDING = _one_of(get_args(Padding), "a padding")
PROMPT = _one_of(get_args(PromptRows), "what becomes of the rows of prompts")
HEADS = Rule(_read_heads, {"enum": list(get_args(Heads))})
_FORMS = list(get_args(RowFormat))
_EITHER = f"({'|'.join(_FORMS)})"
ROWS = Rule(
    _read_rows,
    {
        "oneOf": [
            {"enum": _FORMS},
            {"type": "string", "pattern": f"^{_EITHER}/{_EITHER}$"},
            {
                "type": "object",
                "properties": {
                    "keys": {"enum": _FORMS},
                    "values": {"enum": _FORMS},
                    "exact": {"type": "integer", "minimum": 0, "maximum": MAX_COUNT},
                },
                "anyOf": [{"required": ["keys"]}, {"required": ["values"]}],
                "additionalProperties": False,
            },
        ]
    },
)
WHERE = Rule(
    _read_where,
    {
        "oneOf": [
            {"type": "string", "pattern": _WHERE},
            {"type": "array", "items": _LAYER, "minItems": 1},
        ]
    },
)
STACK = Rule(
    _list_of(PolicySpec, 'a list of policies; write for example ["NAME", "NAME"]'),
    {"type": "array", "items": {"$ref": "#/definitions/policy"}},
)


@attrs.frozen
class LayerGroup:
    """Layers with the same entries; ``None``: those of the plan.

    Attributes:
        where: ``"all"`` or ``"attention"``: all layers that have attention; a slice such as
            ``"0:2"`` or ``"-2:"``: those of so many layers that have it; ``"attention[0:2]"``: a
            slice of the layers that have it; or a list of layers.
        stack: Policies, the later ones wrapping the earlier ones.
        budget: Rows that stay after a compaction, or a share such as ``"25%"``.
        buffer: Rows that may join before the next compaction.
        prompt: ``"evict"``, or ``"keep"``: the rows of prompts stay, and do not count.
        heads: Whether each KV head has the budget for itself, ``"own"``, or all heads of a layer
            have it together, ``"shared"``.
        prefill_buffer: Rows that may join before the next compaction while a prompt enters.
        rows: How rows are stored: ``"model"``, ``"int8"``, ``"int4"``, or a table of these for
            ``keys`` and ``values``, where ``exact`` says how many newest tokens of what has 4 bits
            stay exact.
    """

    where: str | tuple[int, ...] = plan_field(WHERE, "all")
    stack: tuple[PolicySpec, ...] | None = plan_field(STACK, None)
    budget: Budget | None = plan_field(BUDGET, None)
    buffer: int | None = plan_field(COUNT, None)
    prompt: PromptRows | None = plan_field(PROMPT, None)
    heads: Heads | None = plan_field(HEADS, None)
    prefill_buffer: int | None = plan_field(COUNT, None)
    rows: RowFormats | None = plan_field(ROWS, None)

    def layers(
        self, num_layers: int, name: str, attention: Sequence[int] | None = None
    ) -> list[int]:
        """The layers of the group, in the order in which `where` names them.

        Args:
            num_layers: Layers of the model.
            name: Name of the plan, for messages.
            attention: Those that have attention; ``None``: all.

        Raises:
            PlanError: If it names none, or one that the model does not have, or one without
                attention.
        """
        every = list(range(num_layers))
        with_rows = every if attention is None else list(attention)
        if isinstance(self.where, str):
            inner = self.where.removeprefix("attention").strip("[]")
            counted = with_rows if inner != self.where else every
            ends = [] if inner in ("", "all") else inner.split(":")
            parts = [int(end) if end.strip() else None for end in ends] or [None]
            found = [layer for layer in counted[slice(*parts)] if layer in with_rows]
        else:
            outside = [layer for layer in self.where if not -num_layers <= layer < num_layers]
            if outside:
                msg = f"{name} names layer {outside[0]}; the model has layers 0 to {num_layers - 1}"
                raise PlanError(msg)
            found = [layer % num_layers for layer in self.where]
            without = [layer for layer in found if layer not in with_rows]
            if without:
                msg = (
                    f"{name} names layer {without[0]}, which holds no rows; "
                    f"those of the model that do are {', '.join(map(str, with_rows))}"
                )
                raise PlanError(msg)
        if not found:
            which = "" if len(with_rows) == num_layers else f", of which {len(with_rows)} hold rows"
            msg = f"{name}: {self.where!r} covers none of the model's {num_layers} layers{which}"
            raise PlanError(msg)
        return found


def _read_group(value: object, _: object) -> LayerGroup:
    if isinstance(value, LayerGroup):
        return value
    if isinstance(value, Mapping):
        return read_table(LayerGroup, value)
    msg = (
        f'{value!r:.60} is not a group of layers; write [[layers]] with where = "0:2", or '
        'LayerGroup("0:2") in Python'
    )
    raise TypeError(msg)


CONVERTER.register_structure_hook(LayerGroup, _read_group)

GROUPS = Rule(
    _list_of(LayerGroup, 'a list of groups of layers; write [[layers]] with where = "0:2"'),
    {"type": "array", "items": {"$ref": "#/definitions/group"}},
)


def rows_of(
    budget: Budget, length: int | None, name: str, *, to_give_a_length: str
) -> tuple[int, str | None]:
    """The number of rows of a budget.

    Args:
        budget: Rows, or a share of ``length``.
        length: Tokens that shares refer to, if the plan names them.
        name: Name of the plan, or how the user gave the budget, for messages.
        to_give_a_length: What to do if there is no length, for messages.

    Returns:
        The rows, a share being rounded down, and the calculation as text (``None`` for a
        budget given in rows).

    Raises:
        PlanError: If a share has no length to refer to.
        BudgetError: If a share is less than one row or more than the length.
    """
    if isinstance(budget, int):
        return budget, None
    if length is None:
        msg = (
            f'{name}: the budget "{budget}" has no length to refer to; {to_give_a_length}, or '
            "the budget as a number of rows"
        )
        raise PlanError(msg)
    share = Fraction(budget.removesuffix("%")) / 100
    rows = int(share * length)
    if share > 1 or rows < 1:
        msg = (
            f'{name}: the budget "{budget}" of {length:,} tokens is {rows:,} rows; '
            "it must be at least 1 row and at most all of them"
        )
        raise BudgetError(msg)
    return rows, f"{budget} of {length:,} tokens is {rows:,} rows"


# Reading whole tables


@attrs.frozen
class Problem:
    """One mistake in a table that was read.

    Attributes:
        path: Keys and indices that lead to the value, or to the table with an unknown key.
        message: What is wrong, as a sentence.
        key: The unknown key, if that is the problem.
        source: How the user gave the value, if it is not in a file.
    """

    path: Location
    message: str
    key: str | None = None
    source: str | None = None

    @property
    def location(self) -> Location:
        """Keys and indices that lead to the malformed value or the unknown key."""
        return self.path if self.key is None else (*self.path, self.key)

    def __str__(self) -> str:
        """The message with its place, as "in layers[0].where: MESSAGE", or with its source."""
        if self.source is not None:
            return f"{self.source}: {self.message}"
        steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path]
        place = "".join(steps).removeprefix(".")
        return f"in {place}: {self.message}" if place else self.message


def problems_of(error: BaseException) -> list[Problem]:
    """All problems in an error raised by cattrs."""
    if isinstance(error, cattrs.ForbiddenExtraKeysError):
        names = [field.name for field in attrs.fields(error.cl)]
        known = [name for name in names if name not in _FOR_MESSAGES]
        keys = sorted(error.extra_fields)
        return [Problem((), _unknown_key(key, known), key) for key in keys]
    if isinstance(error, KeyError):  # of a required field; its place names it
        return [Problem((), "it is required, and missing")]
    if not isinstance(error, cattrs.BaseValidationError):
        return [Problem((), str(error))]
    found = []
    for inner in error.exceptions:
        notes = getattr(inner, "__notes__", [])
        steps = (getattr(note, "name", getattr(note, "index", None)) for note in notes)
        place = tuple(step for step in steps if step is not None)
        found += [attrs.evolve(one, path=(*place, *one.path)) for one in problems_of(inner)]
    return found


def _unknown_key(key: str, known: list[str]) -> str:
    if "layers" in known:  # a plan, not one of its groups
        if key in RESERVED:
            return f"section '{key}' is reserved; {RESERVED[key]}"
        known = [*known, "extends"]
    return f"unknown key '{key}'{nearest(key, known)}"


def read_table(cls: type[T], table: Mapping[str, Any]) -> T:
    """Read a table into an attrs class whose fields have rules.

    Raises:
        cattrs.BaseValidationError: With the errors of all fields, see `problems_of`.
    """
    read: T = _reader(cls)(table, cls)  # type: ignore[arg-type] # a class is hashable
    return read


@lru_cache
def _reader(cls: type) -> Callable[[Mapping[str, Any], Any], Any]:
    fields = {field.name: _override(field.metadata.get("rule")) for field in attrs.fields(cls)}
    return make_dict_structure_fn(cls, CONVERTER, _cattrs_forbid_extra_keys=True, **fields)


def _override(rule: Rule | None) -> Any:
    if rule is None:
        return override(omit=True)
    return override(struct_hook=lambda value, _: rule.read(value))
