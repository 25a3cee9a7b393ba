"""A JSON schema of plan files for editors, derived from the classes that read them.

Forms of values come from the rules of the fields, descriptions from the docstrings. The schema
is of draft 7, which editors support.
"""

import inspect
import re
from typing import Any

import attrs

from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.plan.toml import EXTENDS


def plan_schema() -> dict[str, Any]:
    """The schema, as plain data."""
    schema = _table(Plan)
    base = {
        "type": "string",
        "minLength": 1,
        "description": "The plan whose values are used for keys that this plan does not have: "
        "a file, relative to the folder of this one, or the name of an installed plan.",
    }
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
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "A plan of kvpolicy",
        **schema,
        "properties": {EXTENDS: base, **schema["properties"]},
        "definitions": {"policy": policy, "group": _table(LayerGroup)},
    }


def _table(cls: type) -> dict[str, Any]:
    """An attrs class as a table whose keys are the fields with a rule."""
    descriptions = _descriptions(cls)
    properties = {}
    for field in attrs.fields(cls):
        if "rule" not in field.metadata:
            continue
        properties[field.name] = {
            "description": descriptions[field.name],
            **field.metadata["rule"].schema,
            **({"default": field.default} if isinstance(field.default, (int, str)) else {}),
        }
    return {
        "description": _summary(cls),
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _summary(cls: type) -> str:
    return _without_backticks((cls.__doc__ or "").partition("\n")[0])


def _descriptions(cls: type) -> dict[str, str]:
    """The section "Attributes" of a docstring, by field."""
    section = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:")[2]
    entries = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section, re.M | re.S)
    return {name: _without_backticks(" ".join(text.split())) for name, text in entries}


def _without_backticks(text: str) -> str:
    return re.sub(r"`+([^`]*)`+", r"\1", text)
