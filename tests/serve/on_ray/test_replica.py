"""A replica by itself: what Ray asks it, without a cluster."""

import asyncio
import json
from pathlib import Path

import pytest
from commands import model_folder
from replicas import LocalReplica, broken, config_of
from serving import BODY

from kvpolicy.serve.on_ray.forwarding import HttpCall
from kvpolicy.serve.on_ray.replica import Replica

__all__ = ["model_folder"]


async def status(replica: Replica, path: str, body: bytes = b"") -> int:
    """Status of its answer to a request."""
    headers = ((b"host", b"localhost"), (b"content-type", b"application/json"))
    call = HttpCall("POST" if body else "GET", path, b"", headers, body)
    messages = [message async for message in replica.answer(call)]
    found: int = messages[0]["status"]
    return found


def test_a_replica_is_healthy_until_an_engine_breaks(model_folder: Path) -> None:
    async def run() -> None:
        replica = await LocalReplica.started(config_of(model_folder), "a")
        try:
            await replica.check_health()
            assert (await replica.state())[1]["ready"]
            assert await status(replica, "/health/live") == 200
            await broken(replica, 1)
            # No request has come: it is what the engines say.
            with pytest.raises(RuntimeError, match="'h2o'"):
                await replica.check_health()
            assert not (await replica.state())[1]["ready"]
            assert await status(replica, "/health/live") == 503
            # Until Ray has another one, it serves its other plans.
            for plan, expected in (("full", 200), ("h2o", 503)):
                body = {**BODY, "prompt": [5, 9], "model": f"tiny:{plan}"}
                answer = status(replica, "/v1/completions", json.dumps(body).encode())
                assert await answer == expected
        finally:
            await replica.close()

    asyncio.run(run())
