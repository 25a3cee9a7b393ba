"""A router in front of replicas in this process answers as one server does."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
import torch
from folders import save_tiny_model
from replicas import Routed, broken, config_of, routed
from step_gate import Gate

from kvpolicy import Engine, Plan
from kvpolicy.engine.requests.request import Request, Sampling
from kvpolicy.model.loading import load_model
from kvpolicy.serve.on_ray.conversations import conversation_of
from kvpolicy.serve.on_ray.replica import Replica
from kvpolicy.serve.settings import ServerSettings

ASK: dict[str, Any] = {"model": "tiny:h2o", "prompt": [5, 9, 40, 7, 11, 3], "max_tokens": 30}
WITH_IDS: dict[str, Any] = {"extra_body": {"kvpolicy": {"token_ids": True}}}

Check = Callable[[Routed], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In double precision, so that sampled tokens do not depend on what else is computed."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", torch.float64)


def check(model: Path, what: Check, *, engine: dict[str, Any] | None = None, **given: Any) -> None:
    async def run() -> None:
        async with routed(config_of(model, **(engine or {})), **given) as router:
            await what(router)

    asyncio.run(run())


def alone(model: Path, **sampling: Any) -> list[int]:
    loaded, tokenizer = load_model(str(model))
    engine = Engine(loaded, tokenizer, Plan.uniform("h2o", budget=12, buffer=4), slots=1)
    request = Request(ASK["prompt"], ASK["max_tokens"], Sampling(**sampling))
    return list(engine.generate([request]).results()[0].tokens)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("seed", [None, 7])
@pytest.mark.parametrize("lost_after", [None, 0, 1])
def test_a_request_has_the_tokens_of_the_engine_alone_also_if_its_replica_is_lost(
    model_folder: Path, lost_after: int | None, seed: int | None
) -> None:
    sampling = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    expected = alone(model_folder, **sampling)

    async def what(router: Routed) -> None:
        for stream in (False, True):
            router.replicas.lost_after = lost_after
            ask = {**ASK, **sampling, **WITH_IDS, "stream": stream}
            found: Any = await router.client.completions.create(**ask)
            pieces = [piece async for piece in found] if stream else [found]
            ids = [t for piece in pieces for t in piece.choices[0].model_extra.get("token_ids", [])]
            assert ids == expected
        lost = await router.metric('kvpolicy_router_retries_total{reason="lost"}')
        assert lost == (0 if lost_after is None else 2)

    check(model_folder, what)


def test_a_broken_stream_raises_in_the_client_and_is_counted(model_folder: Path) -> None:
    async def what(router: Routed) -> None:
        router.replicas.lost_after = 2  # the head of the answer, and its first piece
        stream = await router.client.completions.create(**ASK, stream=True)
        with pytest.raises(openai.APIError) as caught:
            [piece async for piece in stream]
        assert caught.value.code == "replica_lost"
        assert await router.metric("kvpolicy_router_broken_streams_total") == 1

    check(model_folder, what)


def gated(replica: Replica, *, after: float) -> Gate:
    """Let the second plan of a replica do so many steps until the gate is opened."""
    gate = Gate()
    gate.close(after=after)
    replica.service.model.plans[1].running.before_step = gate.wait
    return gate


def test_a_full_replica_sends_requests_to_the_next_one_and_two_full_ones_refuse(
    model_folder: Path,
) -> None:
    async def what(router: Routed) -> None:
        held, gates = [], []
        for replica in router.replicas.replicas:  # each takes what those before it have no slot for
            gates.append(gated(replica, after=3))
            body = {**ASK, "n": 2, "max_tokens": 400}
            held.append(asyncio.create_task(router.client.completions.create(**body)))
            while not replica.service.model.plans[1].stats.running:
                await asyncio.sleep(0.005)
        with pytest.raises(openai.RateLimitError) as caught:
            await router.client.completions.create(**{**ASK, "n": 2})
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert await router.metric('kvpolicy_router_retries_total{reason="refused"}') == 3
        assert [name for name, _ in router.replicas.asked] == ["a", *"ab", *"aba"]
        for job in held:
            job.cancel()
        for gate in gates:
            gate.open()

    check(model_folder, what, engine={"slots": 2, "max_waiting": 0})


def test_a_client_that_goes_away_cancels_at_the_replica(model_folder: Path) -> None:
    async def what(router: Routed) -> None:
        (replica,) = router.replicas.replicas
        gate = gated(replica, after=3)
        job = asyncio.create_task(router.client.completions.create(**{**ASK, "max_tokens": 400}))
        plan = replica.service.model.plans[1]
        while not plan.stats.report.new_tokens:
            await asyncio.sleep(0.005)
        job.cancel()
        await asyncio.gather(job, return_exceptions=True)
        for _ in range(20):  # what follows at once
            await asyncio.sleep(0)
        gate.open()
        while plan.running.num_open:
            await asyncio.sleep(0.005)
        assert plan.stats.report.new_tokens <= 4

    check(model_folder, what, num=1)


def test_the_router_checks_as_a_server_does(model_folder: Path) -> None:
    async def what(router: Routed) -> None:
        http = router.http
        assert (await http.get("/v1/models")).status_code == 401
        headers = {"Authorization": "Bearer one"}
        models = await http.get("/v1/models", headers=headers)
        assert [one["id"] for one in models.json()["data"]] == ["tiny", "tiny:full", "tiny:h2o"]
        assert (await http.get("/v1/models/x", headers=headers)).status_code == 404
        assert (await http.put("/v1/models", headers=headers)).status_code == 405
        large = await http.post("/v1/completions", headers=headers, json={"prompt": "a" * 2000})
        assert large.status_code == 413
        plain = await http.post("/v1/completions", headers=headers, content="{}")
        assert plain.status_code == 415
        wrong = await http.post("/v1/completions", headers=headers, json={"model": "tiny"})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")
        other = await http.get("/health", headers={"Host": "elsewhere"})
        assert other.status_code == 421
        sent = {**headers, "X-Request-Id": "mine", "X-Session-Id": "s"}
        found = await http.post("/v1/completions", headers=sent, json={**ASK, "max_tokens": 1})
        assert found.headers["x-request-id"] == "mine"
        assert found.headers["x-kvpolicy-replica"] == "a"
        assert router.replicas.asked[-1] == ("a", conversation_of("s", b""))

    hosts = frozenset({"localhost"})
    check(model_folder, what, api_keys=("one",), hosts=hosts, max_body=1000)


def test_health_and_metrics_are_of_all_replicas(model_folder: Path) -> None:
    async def what(router: Routed) -> None:
        a, b = router.replicas.replicas
        health = await router.http.get("/health")
        assert (health.status_code, set(health.json()["replicas"])) == (200, {"a", "b"})
        await router.client.completions.create(**ASK)
        assert await router.metric("kvpolicy_router_replicas") == 2
        name = 'kvpolicy_requests_total{outcome="completed",plan="h2o",replica="a"}'
        assert await router.metric(name) == 1
        assert await router.metric("kvpolicy_slots{") == 8
        text = (await router.http.get("/metrics")).text
        assert text.count("# TYPE kvpolicy_slots ") == 1
        await broken(a, 0)
        assert set((await router.http.get("/health")).json()["replicas"]) == {"b"}
        await broken(b, 1)
        assert (await router.http.get("/health")).status_code == 503
        assert (await router.http.get("/health/live")).status_code == 200

    check(model_folder, what)


def test_a_router_counts_its_answers_by_their_status(model_folder: Path) -> None:
    async def what(router: Routed) -> None:
        for _ in range(2):
            await router.client.completions.create(**ASK)
        await router.http.post("/v1/completions", json={"model": "tiny"})
        assert await router.metric('kvpolicy_router_responses_total{status="200"}') == 2
        assert await router.metric('kvpolicy_router_responses_total{status="400"}') == 1

    check(model_folder, what)


def test_a_request_that_a_broken_replica_refuses_is_answered_by_another(model_folder: Path) -> None:
    async def what(router: Routed) -> None:
        await broken(router.replicas.replicas[0], 1)
        found = await router.client.completions.create(**ASK)
        assert found.usage is not None
        assert [name for name, _ in router.replicas.asked] == ["a", "b"]

    check(model_folder, what)


def test_the_router_answers_to_every_name_and_to_pages_of_allowed_origins(
    model_folder: Path,
) -> None:
    origin = "https://chat.example.com"

    async def run() -> None:
        config = attrs.evolve(
            config_of(model_folder), aliases=("other",), settings=ServerSettings(origins=(origin,))
        )
        async with routed(config, num=1, origins=(origin,)) as router:
            headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
            asked = await router.http.options("/v1/completions", headers=headers)
            assert asked.headers.get_list("access-control-allow-origin") == [origin]
            body = {**ASK, "model": "other:h2o", "max_tokens": 2}
            answer = await router.http.post(
                "/v1/completions", json=body, headers={"Origin": origin}
            )
            assert answer.status_code == 200
            assert answer.headers.get_list("access-control-allow-origin") == [origin]

    asyncio.run(run())
