"""Replicas in this process behind the application of a router, and a client for it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx2
import openai
import torch
from serving import break_engine
from starlette.types import Message

from kvpolicy import Plan
from kvpolicy.lab.executors.process_setup import ProcessSetup
from kvpolicy.serve.on_ray.config import ServeConfig, plan_data
from kvpolicy.serve.on_ray.forwarding import HttpCall, LostReplicaError
from kvpolicy.serve.on_ray.replica import Replica
from kvpolicy.serve.on_ray.router import create_router
from kvpolicy.serve.settings import ServerSettings


def config_of(
    model: Path,
    *,
    name: str = "tiny",
    prefix_store: dict[str, Any] | None = None,
    **engine: Any,
) -> ServeConfig:
    """A configuration of the model in a folder under two plans."""
    plans = {"full": Plan.uniform("full"), "h2o": Plan.uniform("h2o", budget=12, buffer=4)}
    return ServeConfig(
        name,
        str(model),
        {"dtype": "auto", "device": None, "trust_remote_code": False, "cpu_weights": "plain"},
        {key: plan_data(plan) for key, plan in plans.items()},
        {"slots": 2, "max_waiting": 4, "kv_memory": None} | engine,
        ServerSettings(),
        needs_key=False,
        json_logs=False,
        requests=8,
        setup=ProcessSetup.of_this_process(threads=torch.get_num_threads()),
        prefix_store=prefix_store,
    )


class LocalReplica(Replica):
    """A replica of this process, which is closed by who has started it."""

    def __del__(self) -> None:  # type: ignore[override] # Ray Serve would await it
        pass

    @classmethod
    async def started(cls, config: ServeConfig, name: str) -> "LocalReplica":
        replica = cls.__new__(cls)
        await replica.__init__(config, name)  # type: ignore[misc] # as Ray Serve does
        return replica


@attrs.define(eq=False)
class LocalReplicas:
    """Replicas in this process; the first one that has not refused a request answers it.

    Attributes:
        replicas: The replicas.
        lost_after: Messages after which the next request loses its replica; ``None``: never.
        asked: Names of the replicas that were asked, and keys of conversations.
    """

    replicas: list[Replica]
    lost_after: int | None = None
    asked: list[tuple[str, str | None]] = attrs.field(factory=list)

    async def ask(
        self, call: HttpCall, conversation: str | None, tried: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        left = [one for one in self.replicas if one.name not in tried] or self.replicas
        self.asked.append((left[0].name, conversation))
        answer = left[0].answer(call)
        left_over, self.lost_after = self.lost_after, None
        try:
            async for message in answer:
                if left_over == 0:
                    raise LostReplicaError
                left_over = None if left_over is None else left_over - 1
                yield message
        finally:
            await answer.aclose()

    async def each(self, method: str) -> list[Any]:
        return [await getattr(one, method)() for one in self.replicas]


async def broken(replica: Replica, plan: int) -> None:
    """Have the engine of a plan of a replica break, and wait until it has."""
    served = replica.service.model.plans[plan]
    await break_engine(served, RuntimeError("a defect"))
    while served.running.is_running:
        await asyncio.sleep(0.005)


@attrs.define(eq=False)
class Routed:
    """A router in this process."""

    replicas: LocalReplicas
    http: httpx2.AsyncClient
    client: openai.AsyncOpenAI

    async def metric(self, begin: str) -> float:
        """The sum of the samples whose lines begin so."""
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(begin))


@asynccontextmanager
async def routed(config: ServeConfig, num: int = 2, **settings: Any) -> AsyncIterator[Routed]:
    """Run replicas and a router."""
    replicas: list[Replica] = [await LocalReplica.started(config, name) for name in "abcdef"[:num]]
    local = LocalReplicas(replicas)
    app = create_router(local, ServerSettings(**settings))
    transport = httpx2.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost") as http:
        client = openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="none", max_retries=0, http_client=http
        )
        try:
            yield Routed(local, http, client)
        finally:
            for replica in replicas:
                await replica.close()
