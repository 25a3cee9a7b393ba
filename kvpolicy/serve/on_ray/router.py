"""The application of a router: it checks requests as one server does, and passes them on."""

import asyncio
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

import kvpolicy
from kvpolicy.serve.api_errors import ApiError, from_http
from kvpolicy.serve.defects import answer_to_defect
from kvpolicy.serve.guard import guarded
from kvpolicy.serve.json_request import JsonRequest
from kvpolicy.serve.metrics import CONTENT_TYPE
from kvpolicy.serve.observer import Observer
from kvpolicy.serve.on_ray.conversations import SESSION_HEADER, conversation_of
from kvpolicy.serve.on_ray.forwarding import HttpCall, Replicas, forward
from kvpolicy.serve.on_ray.router_metrics import RouterMetrics
from kvpolicy.serve.service import ClientGoneError, unless_gone
from kvpolicy.serve.settings import ServerSettings

_GENERATION = ("/v1/completions", "/v1/chat/completions")
# The routes of a replica by which requests are logged; the last one has all others.
_OTHERS = ("/", "/v1/models", "/v1/models/{model_id:path}", "/assets/{name:path}", "/{path:path}")
_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
_OVERVIEW_TIMEOUT_S = 5.0  # for what all replicas are asked


def create_router(replicas: Replicas, settings: ServerSettings) -> ASGIApp:
    """The application that passes requests to replicas.

    Hosts, keys, sizes of bodies and the time for them are checked here; bodies by the replicas.

    Args:
        replicas: The replicas.
        settings: What clients may ask for.
    """
    metrics = RouterMetrics()
    app = FastAPI(
        title="kvpolicy",
        version=kvpolicy.__version__,
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        exception_handlers={HTTPException: _answer_http, Exception: _answer_defect},
    )
    _add_operation(app, replicas, metrics)

    async def pass_on(http: HttpRequest) -> Response:
        body = b""
        if http.method == "POST":
            given = JsonRequest(http.scope, http.receive)
            given.settings = settings
            body = await given.body()
        return _Forwarded(replicas, http, body, settings, metrics)

    for path in (*_GENERATION, *_OTHERS):
        app.add_api_route(path, pass_on, methods=_METHODS, response_model=None)
    return Observer(guarded(app, settings), metrics)


async def _answer_http(_: HttpRequest, error: Any) -> Response:
    return from_http(error).response()


async def _answer_defect(request: HttpRequest, _: Exception) -> Response:
    return answer_to_defect(request.state.record).response()


def _add_operation(app: FastAPI, replicas: Replicas, metrics: RouterMetrics) -> None:
    async def each(method: str) -> list[Any]:
        try:
            return await asyncio.wait_for(replicas.each(method), _OVERVIEW_TIMEOUT_S)
        except TimeoutError:
            return []

    @app.get("/health/live")
    async def live() -> JSONResponse:
        return JSONResponse({"live": True})

    @app.get("/health/ready")
    @app.get("/health")
    async def ready() -> JSONResponse:
        found = {name: state for name, state in await each("state") if state["ready"]}
        body = {"ready": bool(found), "replicas": {name: found[name] for name in sorted(found)}}
        return JSONResponse(body, 200 if found else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.text(await each("metrics")), media_type=CONTENT_TYPE)


class _Forwarded(Response):
    """The answer of a replica."""

    def __init__(
        self,
        replicas: Replicas,
        http: HttpRequest,
        body: bytes,
        settings: ServerSettings,
        metrics: RouterMetrics,
    ) -> None:
        super().__init__()
        self._replicas, self._metrics, self._settings = replicas, metrics, settings
        record = http.state.record
        headers = {b"x-request-id": record.id.encode(), b"host": b"localhost"}
        self._call = HttpCall.of(http.scope, body, headers)
        self._conversation = (
            conversation_of(http.headers.get(SESSION_HEADER), body) if body else None
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        work = forward(
            self._replicas,
            self._call,
            self._conversation,
            send,
            self._metrics,
            timeout_s=self._settings.request_timeout_s,
        )
        try:
            await unless_gone(HttpRequest(scope, receive), work)
        except ClientGoneError:
            return
        except ApiError as error:
            await error.response()(scope, receive, send)
