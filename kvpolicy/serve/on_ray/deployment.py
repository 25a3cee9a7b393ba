"""The application on Ray Serve: replicas of an engine, and a router that accepts HTTP.

`build` is what a deployment file names; it is called on the cluster.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import attrs
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
)
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvpolicy.errors import KVPolicyError
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.logs import logging_to
from kvpolicy.serve.on_ray.config import ServeConfig
from kvpolicy.serve.on_ray.forwarding import HttpCall, LostReplicaError
from kvpolicy.serve.on_ray.options import REPLICA, ROUTER
from kvpolicy.serve.on_ray.replica import Replica
from kvpolicy.serve.on_ray.router import create_router
from kvpolicy.serve.settings import KEYS

_ALL = 2**31  # replicas are tried in turn, however many there are
_UNLIMITED = 2**31 - 1  # requests: the router passes all on, or refuses them

_QUEUE_FULL = "every replica is full and so is the queue in front of them; try again later"
_RETRY_S = 2
_HEALTH_PERIOD_S = 5
_HEALTH_TIMEOUT_S = 30


class ConversationRouter(ConsistentHashRouter):
    """Sends the requests of a conversation to one replica, and to others if that has refused."""

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """Candidates in order; replicas that have refused the request come last."""
        ranks = await super().choose_replicas(candidate_replicas, pending_request)
        tried = () if pending_request is None else pending_request.kwargs.get("tried", ())
        return sorted(
            ranks, key=lambda rank: all(one.replica_id.unique_id in tried for one in rank)
        )


class ServeReplicas:
    """The replicas of a deployment; see `Replicas`."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def ask(
        self, call: HttpCall, conversation: str | None, tried: Sequence[str]
    ) -> AsyncGenerator[Message, None]:
        """Have one of the replicas answer; see `Replicas.ask`."""
        session = {} if conversation is None else {"session_id": conversation}
        handle = self._handle.options(method_name="answer", stream=True, **session)
        response = handle.remote(call, tried=tuple(tried))
        try:
            async for message in response:
                yield message
        except (asyncio.CancelledError, GeneratorExit):  # nobody reads any more
            response.cancel()
            raise
        except BackPressureError as error:
            headers = {"Retry-After": str(_RETRY_S)}
            raise ApiError(429, _QUEUE_FULL, headers=headers) from error
        except (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError) as error:
            raise LostReplicaError from error
        except RayError as error:
            if isinstance(getattr(error, "cause", None), RayActorError):
                raise LostReplicaError from error
            raise

    async def each(self, method: str) -> list[Any]:
        """Call a method of every replica; see `Replicas.each`."""
        try:
            response = self._handle.broadcast(method)
            found = await response.results_async(return_exceptions=True)
        except DeploymentUnavailableError:
            return []
        return [one for one in found if not isinstance(one, BaseException)]


class Router:
    """Accepts requests from Ray Serve's HTTP proxy."""

    def __init__(self, config: ServeConfig, keys: Sequence[str], handle: Any) -> None:
        """Prepare to answer.

        Args:
            config: What is served.
            keys: Keys of which clients must send one; if there are none, those of the
                environment.
            handle: Handle of the replicas.

        Raises:
            KVPolicyError: There are no keys although the server needs them.
        """
        keys = tuple(keys) or tuple(os.environ.get(KEYS, "").split())
        if config.needs_key and not keys:
            msg = f"{KEYS} is not set where Ray's head was started; set it, and start it again"
            raise KVPolicyError(msg)
        self._logs = ExitStack()  # until the process ends
        self._logs.enter_context(logging_to(sys.stderr, as_json=config.json_logs))
        self._settings = attrs.evolve(config.settings, api_keys=keys)
        self._handle = handle

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _without_id(create_router(ServeReplicas(self._handle), self._settings))


def _without_id(app: ASGIApp) -> ASGIApp:
    """Leave out the header with the id of a request, which Ray's HTTP proxy adds to answers."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def pass_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["X-Request-Id"]
            await send(message)

        await app(scope, receive, pass_on)

    return answer


def application(
    config: ServeConfig,
    keys: Sequence[str] = (),
    options: Mapping[str, Mapping[str, Any]] | None = None,
) -> Any:
    """The application for Ray Serve.

    Args:
        config: What is served.
        keys: See `Router`.
        options: Options of each deployment by its name, as a deployment file has them.
    """
    given = options or {}
    shutdown_s = config.settings.shutdown_timeout_s
    replica = serve.deployment(
        Replica,
        name=REPLICA,
        max_ongoing_requests=config.requests,
        graceful_shutdown_timeout_s=shutdown_s,
        health_check_period_s=_HEALTH_PERIOD_S,
        health_check_timeout_s=_HEALTH_TIMEOUT_S,
        request_router_config={
            "request_router_class": ConversationRouter,
            "request_router_kwargs": {"num_fallback_replicas": _ALL},
        },
    ).options(**given.get(REPLICA, {}))
    router = serve.deployment(
        serve.ingress()(Router),
        name=ROUTER,
        num_replicas=1,
        # Beside Ray's HTTP proxy, on the machine whose loss ends the cluster anyway.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=_UNLIMITED,
        max_surge_percent=100,  # an update starts the new one before the old one stops
        graceful_shutdown_timeout_s=shutdown_s,
    ).options(**given.get(ROUTER, {}))
    return router.bind(config, tuple(keys), replica.bind(config))


def build(args: dict[str, Any]) -> Any:
    """The application that a deployment file describes.

    Args:
        args: Its ``args``, as `ServeConfig.to_dict` makes them.

    Raises:
        KVPolicyError: They are something else.
    """
    return application(ServeConfig.from_dict(args))
