"""A JSON schema of plan files, for editors, made from the classes that read them.

Types come from the fields, descriptions from the docstrings. Draft 7 is what editors know.
"""

import re
import types
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import attrs

from kvpolicy.plan import budget as planbudget
from kvpolicy.plan import extends
from kvpolicy.plan.layercover import WHERE
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import LayerGroup, PolicySpec

ADDRESS = "http://json-schema.org/draft-07/schema#"

_COUNT = {"type": "integer", "minimum": 1, "maximum": planbudget.MOST}
_LAYER = {"type": "integer", "minimum": -planbudget.MOST, "maximum": planbudget.MOST}
# What a type does not say: the form of a text, the least of a number.
_FORMS: dict[str, dict[str, Any]] = {
    "budget": {"oneOf": [_COUNT, {"type": "string", "pattern": planbudget.SHARE}]},
    "buffer": _COUNT,
    "length": _COUNT,
    "where": {
        "oneOf": [
            {"type": "string", "pattern": WHERE},
            {"type": "array", "items": _LAYER, "minItems": 1},
        ]
    },
}


def plan_schema() -> dict[str, Any]:
    """The schema, as plain data."""
    schema = _table(Plan)
    base = {
        "type": "string",
        "minLength": 1,
        "description": "The plan whose keys hold where this one has none: a file, from the "
        "folder of this one, or the name of an installed plan.",
    }
    properties = {extends.KEY: base, **schema["properties"]}
    policy = {
        "description": _summary(PolicySpec),
        "oneOf": [
            {"type": "string"},
            {
                "type": "object",
                "properties": {"policy": {"type": "string"}},
                "required": ["policy"],
            },
        ],
    }
    return {
        "$schema": ADDRESS,
        "title": "A plan of kvpolicy",
        **schema,
        "properties": properties,
        "definitions": {"policy": policy, "group": _table(LayerGroup)},
    }


def _table(cls: type) -> dict[str, Any]:
    """A class as a table whose keys are its fields; `name` is nobody's key."""
    hints, said = get_type_hints(cls), _descriptions(cls)
    properties = {}
    for field in attrs.fields(cls):
        if field.name == "name":
            continue
        form = {"description": said[field.name]} | (
            _FORMS.get(field.name) or _form(hints[field.name])
        )
        if isinstance(field.default, (int, str)):
            form["default"] = field.default
        properties[field.name] = form
    return {
        "description": _summary(cls),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _form(hint: Any) -> dict[str, Any]:
    """What JSON a type stands for; a type that no plan has is a defect of ours."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType) and len(inner) == 2 and type(None) in inner:
        return _form(inner[0])  # TOML has no null: what may be None may be left out
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is tuple:
        return {"type": "array", "items": _form(inner[0])}
    assert hint in (PolicySpec, LayerGroup), f"a plan has a field of type {hint}"
    return {"$ref": f"#/definitions/{'policy' if hint is PolicySpec else 'group'}"}


def _summary(cls: type) -> str:
    return _plain((cls.__doc__ or "").partition("\n")[0])


def _descriptions(cls: type) -> dict[str, str]:
    """The section "Attributes" of a docstring, by field."""
    section = (cls.__doc__ or "").partition("Attributes:")[2]
    entries = re.findall(r"^ {8}(\w+): (.*?)(?=^ {8}\w|\Z)", section, re.M | re.S)
    return {name: _plain(" ".join(text.split())) for name, text in entries}


def _plain(text: str) -> str:
    """A docstring's words without its marks."""
    return re.sub(r"`+([^`]*)`+", r"\1", text)
