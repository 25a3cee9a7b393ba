"""What is given to other machines, and the file that says so, without Ray."""

import json
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given
from plan_strategies import plan_data as plan_files
from replicas import config_of

from kvpolicy import Plan
from kvpolicy.errors import KVPolicyError
from kvpolicy.plan.toml import read_file
from kvpolicy.serve.on_ray.config import ServeConfig, plan_data
from kvpolicy.serve.on_ray.options import ReplicaOptions
from kvpolicy.serve.settings import ServerSettings

CONFIG = config_of(Path("model"))
REASONERS_PLANS = ["reasoner-mix", "skipkv-reasoner"]  # which come with the bundled models


def options(**changes: Any) -> ReplicaOptions:
    usual = {"replicas": 2, "max_replicas": None, "target": 8, "waiting": 64, "cpus": 1, "gpus": 0}
    return ReplicaOptions(**usual | changes)


def test_a_configuration_survives_a_file() -> None:
    setup = attrs.evolve(CONFIG.setup, plugins=(("a.py", "π = 3\n".encode()),))
    settings = ServerSettings(hosts=frozenset({"b", "a"}), max_new_tokens=7)
    config = attrs.evolve(CONFIG, setup=setup, settings=settings)
    data = json.loads(json.dumps(config.to_dict()))
    assert ServeConfig.from_dict(data) == config
    assert data["setup"]["plugins"] == [["a.py", "π = 3\n"]]
    assert data["settings"]["hosts"] == ["a", "b"]


def test_keys_are_not_written() -> None:
    secret = attrs.evolve(CONFIG, settings=ServerSettings(api_keys=("secret",)))
    assert "secret" not in str(secret.to_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": 1}, "more"),
        ({"settings": {"body": 3}}, "body"),
        ({"setup": None}, "setup"),
        ({"requests": "many"}, "requests"),
    ],
)
def test_other_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(KVPolicyError, match=message) as caught:
        ServeConfig.from_dict(CONFIG.to_dict() | change)
    assert "--write-deployment" in str(caught.value)


@given(plan_files())
def test_a_plan_survives_as_data(given_data: dict[str, Any]) -> None:
    plan = Plan.from_dict(given_data)
    assert Plan.from_dict(plan_data(plan)) == plan


def test_a_plan_without_exact_rows_survives_as_data() -> None:
    for rows in ("model", "int8", {"keys": "int8", "values": "int4", "exact": 0}):
        plan = Plan.uniform("h2o", budget=8, rows=rows)
        assert Plan.from_dict(plan_data(plan)) == plan


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(one, marks=pytest.mark.needs_reasoner) for one in REASONERS_PLANS),
        "laq-plus-plus",
        "epicache",
    ],
)
def test_installed_plans_survive_as_data(name: str) -> None:
    plan = Plan.from_dict(read_file(name))
    assert Plan.from_dict(plan_data(plan)) == plan


def test_the_number_of_replicas_is_fixed_or_follows_the_queues() -> None:
    fixed = options().of_deployments()["Replica"]
    assert fixed["num_replicas"] == 2
    assert "autoscaling_config" not in fixed
    scaled = options(max_replicas=5, target=16).of_deployments()["Replica"]
    assert "num_replicas" not in scaled
    expected = {"min_replicas": 2, "max_replicas": 5, "target_ongoing_requests": 16}
    assert scaled["autoscaling_config"] == expected
    assert options(replicas=1).of_deployments()["Replica"]["max_surge_percent"] == 100
    with pytest.raises(KVPolicyError, match="--max-replicas"):
        options(max_replicas=1)
