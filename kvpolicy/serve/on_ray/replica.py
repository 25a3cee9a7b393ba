"""A replica: the application of one server in a process of Ray's, without its socket."""

import asyncio
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import attrs
from starlette.types import Message
from uvicorn import Config
from uvicorn.lifespan.on import LifespanOn

from kvpolicy.engine.reuse.store import PrefixStore
from kvpolicy.errors import KVPolicyError
from kvpolicy.model.image_prompts import processor_for
from kvpolicy.model.loading import load_model
from kvpolicy.serve.app import create_app
from kvpolicy.serve.launch import served_model
from kvpolicy.serve.logs import logging_to
from kvpolicy.serve.metrics import Metrics
from kvpolicy.serve.on_ray.config import ServeConfig
from kvpolicy.serve.on_ray.forwarding import REPLICA_HEADER, HttpCall
from kvpolicy.serve.service import Service


class Replica:
    """Answers requests that a router passes on.

    Ray starts another one in its place if its process ends, or if `check_health` fails.

    Attributes:
        name: Its name, which answers have in a header.
        service: What answers.
    """

    async def __init__(  # type: ignore[misc] # Ray Serve waits for it
        self, config: ServeConfig, name: str | None = None
    ) -> None:
        """Load the model and start the engines.

        Args:
            config: What is served.
            name: Name of the replica; by default the one that Ray Serve has given it.

        Raises:
            KVPolicyError: The model or a plan cannot be served here.
        """
        self.name = name or _name_of_this_replica()
        with _naming_host():
            config.setup.apply()
            self.service = service_of(config)
        self._logs = ExitStack()
        self._logs.enter_context(logging_to(sys.stderr, as_json=config.json_logs))
        self._metrics = Metrics(self.service.model)
        self._app = create_app(self.service, self._metrics)
        self._lifespan = LifespanOn(Config(self._app, lifespan="on", log_config=None))
        await self._lifespan.startup()
        await self.check_health()

    async def close(self) -> None:
        """End what still runs, and the engines."""
        await self._lifespan.shutdown()
        self._logs.close()

    async def __del__(self) -> None:
        """Called by Ray Serve when the replica is to end, and no request runs any more."""
        await self.close()

    async def answer(
        self, call: HttpCall, tried: Sequence[str] = ()
    ) -> AsyncGenerator[Message, None]:
        """Answer a request.

        Args:
            call: The request.
            tried: Names of the replicas that have refused it, for `ConversationRouter`.

        Yields:
            Messages of the answer: its start, and the parts of its body.
        """
        parts = asyncio.Queue[Message | None]()
        job = asyncio.create_task(self._run(call, parts))
        try:
            while (part := await parts.get()) is not None:
                if part["type"] == "http.response.start":
                    name = (REPLICA_HEADER, self.name.encode())
                    part = {**part, "headers": [*part["headers"], name]}
                yield part
        finally:
            job.cancel()

    async def _run(self, call: HttpCall, parts: "asyncio.Queue[Message | None]") -> None:
        is_read = False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                await asyncio.Future()  # a client that goes away cancels the whole call
            is_read = True
            return {"type": "http.request", "body": call.body, "more_body": False}

        try:
            await self._app(call.scope(), receive, parts.put)
        finally:
            parts.put_nowait(None)

    async def state(self) -> tuple[str, dict[str, Any]]:
        """Its name, and what its engines do."""
        plans = self.service.model.plans
        return self.name, {
            "ready": self.service.model.problem is None,
            "host": socket.gethostname(),
            "plans": {
                plan.name: {"waiting": plan.stats.waiting, "running": plan.stats.running}
                for plan in plans
            },
        }

    async def metrics(self) -> tuple[str, bytes]:
        """Its name and its metrics, in Prometheus' text format."""
        return self.name, await asyncio.to_thread(self._metrics.text)

    async def check_health(self) -> None:
        """Fail if an engine has broken; called by Ray Serve, which then starts another replica.

        Raises:
            RuntimeError: An engine has broken.
        """
        problem = self.service.model.problem
        if problem is not None:
            raise RuntimeError(problem)


def service_of(config: ServeConfig) -> Service:
    """Load the model of a configuration, and build its engines.

    Args:
        config: What is served.

    Raises:
        KVPolicyError: It cannot be served here.
    """
    model, tokenizer = load_model(config.model, **config.loading)
    remote = config.loading.get("trust_remote_code", False)
    processor, problem = processor_for(model, config.model, trust_remote_code=remote)
    store = None if config.prefix_store is None else PrefixStore(**config.prefix_store)
    served = served_model(
        config.name,
        model,
        tokenizer,
        config.read_plans(),
        config.settings,
        prefix_store=store,
        aliases=config.aliases,
        processor=processor,
        lacks_processor=bool(problem),
        **config.engine,
    )
    # The router has checked the host and the origin, and replicas are given no keys.
    return Service(served, attrs.evolve(config.settings, hosts=None, origins=()))


def _name_of_this_replica() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


@contextmanager
def _naming_host() -> Iterator[None]:
    """Errors in the block name the machine; only their messages reach the one that deploys."""
    try:
        yield
    except KVPolicyError as error:
        msg = f"on {socket.gethostname()}: {error}"
        raise KVPolicyError(msg) from None
    except Exception:
        msg = f"on {socket.gethostname()}, in a replica:\n{traceback.format_exc()}"
        raise RuntimeError(msg) from None
