"""What an asynchronous engine cannot serve."""

from types import SimpleNamespace

import pytest
from tiny import shared_model

from kvpolicy import AsyncEngine, Engine, Plan
from kvpolicy.errors import KVPolicyError


def test_models_that_several_processes_share_are_refused() -> None:
    engine = Engine(shared_model(), plan=Plan.uniform("full"))
    engine.adapter.processes = SimpleNamespace(num_processes=2)
    with pytest.raises(KVPolicyError, match="2 processes"):
        AsyncEngine(engine)
