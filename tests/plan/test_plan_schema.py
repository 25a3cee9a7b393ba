"""The JSON schema for editors accepts exactly what can be read."""

import json
import tomllib
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
from hypothesis import given
from plan_strategies import mutated, plan_data, tables

from kvpolicy import Plan
from kvpolicy.entry_points import installed, installed_file
from kvpolicy.errors import KVPolicyError
from kvpolicy.plan.schema import plan_schema
from kvpolicy.plan.spec import LayerGroup

FILE = Path(__file__).parents[2] / "docs" / "reference" / "plan.schema.json"
SCHEMA = plan_schema()
# JSON has one type of numbers, TOML has two: 3.0 is not an integer there.
_TYPES = jsonschema.Draft7Validator.TYPE_CHECKER.redefine(
    "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
)
CHECK = jsonschema.validators.extend(jsonschema.Draft7Validator, type_checker=_TYPES)(SCHEMA)


def test_the_file_in_the_docs_is_up_to_date() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == SCHEMA, (
        "write it again: kvpolicy plan schema > docs/reference/plan.schema.json"
    )


def test_the_schema_is_valid() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("cls", [Plan, LayerGroup])
def test_every_key_is_described(cls: type) -> None:
    table = SCHEMA if cls is Plan else SCHEMA["definitions"]["group"]
    fields = {field.name for field in attrs.fields(cls)} - {"name", "sources", "options"}
    assert set(table["properties"]) - {"extends"} == fields
    for form in table["properties"].values():
        assert form["description"].endswith((".", '"25%".')), form
        assert "`" not in form["description"]


@pytest.mark.parametrize("name", installed("kvpolicy.plans"))
def test_an_installed_plan_conforms(name: str) -> None:
    path = installed_file("kvpolicy.plans", name, suffix=".toml", what="plan")
    CHECK.validate(tomllib.loads(path.read_text(encoding="utf-8")))


@given(plan_data())
def test_a_valid_plan_conforms(data: dict[str, Any]) -> None:
    CHECK.validate(data)


@given(mutated() | tables)
def test_a_plan_conforms_exactly_if_it_can_be_read(data: dict[str, Any]) -> None:
    data.pop("extends", None)  # a schema cannot find out whether there is such a file
    try:
        Plan.from_dict(data)
    except KVPolicyError:
        assert not CHECK.is_valid(data)
    else:
        CHECK.validate(data)


@pytest.mark.parametrize(
    "data",
    [
        {"bugdet": 3},
        {"budget": "25"},
        {"budget": 0},
        {"budget": True},
        {"buffer": 1.5},
        {"stack": "h2o"},
        {"stack": [{"knob": 3}]},
        {"layers": [{"where": "first"}]},
        {"layers": [{"where": []}]},
        {"layers": {"where": "all"}},
        {"padding": "left"},
        {"sampling": {}},
        {"name": "x"},
    ],
    ids=str,
)
def test_malformed_values_do_not_conform(data: dict[str, Any]) -> None:
    assert not CHECK.is_valid(data)
