"""The application of a server: its paths, and what stands around them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

import kvpolicy
from kvpolicy.cli.output import as_sentence
from kvpolicy.serve.answers import ERRORS, STREAM, ChatCompletion, Completion, Model, Models
from kvpolicy.serve.api_errors import from_http, from_validation
from kvpolicy.serve.bodies import ChatBody, CompletionBody
from kvpolicy.serve.defects import answer_to_defect
from kvpolicy.serve.guard import guarded
from kvpolicy.serve.json_request import JsonRequest
from kvpolicy.serve.metrics import CONTENT_TYPE, Metrics
from kvpolicy.serve.observer import Observer
from kvpolicy.serve.page import page_router
from kvpolicy.serve.plans import ServedModel
from kvpolicy.serve.service import Service

# FastAPI can send what it does with requests to OpenTelemetry, bodies included.
_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False}


def create_app(service: Service, metrics: Metrics | None = None) -> ASGIApp:
    """The application that answers for a model.

    Its lifespan starts the engines. When it is over, it ends what still runs, and the prefix store
    writes what it holds to its folder, if it has one.

    Args:
        service: What answers completions and chats.
        metrics: Counts requests; by default new ones.
    """
    model = service.model
    metrics = metrics or Metrics(model)
    parser = ThreadPoolExecutor(1, "kvpolicy-parse")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as running:
            running.callback(service.encoder.close)
            running.callback(parser.shutdown, wait=False)
            if model.prefix_store is not None:  # after the engines have ended
                running.push_async_callback(asyncio.to_thread, model.prefix_store.flush)
            for plan in model.plans:
                await running.enter_async_context(plan.running)
            yield

    app = FastAPI(
        title="kvpolicy",
        version=kvpolicy.__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
        exception_handlers={
            HTTPException: _answer_http,
            RequestValidationError: _answer_validation,
            Exception: _answer_defect,
        },
    )
    app.include_router(_generation(service, parser))
    app.include_router(_models(model))
    app.include_router(_operation(service, metrics))
    app.include_router(page_router(model))
    return Observer(guarded(app, service.settings), metrics)


async def _answer_http(_: Request, error: Any) -> Response:
    return from_http(error).response()


async def _answer_validation(_: Request, error: Any) -> Response:
    return from_validation(error).response()


async def _answer_defect(request: Request, _: Exception) -> Response:
    return answer_to_defect(request.state.record).response()


def _generation(service: Service, parser: Executor) -> APIRouter:
    class BodyRoute(APIRoute):
        """Reads bodies as `JsonRequest` does."""

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handler = super().get_route_handler()

            async def read(request: Request) -> Response:
                given = JsonRequest(request.scope, request.receive)
                request.state.record.outcome = "invalid"  # unless its body is read and checked
                given.settings, given.parser = service.settings, parser
                return await handler(given)

            return read

    router = APIRouter(prefix="/v1", route_class=BodyRoute)

    @router.post("/completions", response_model=None, responses=_streamed(Completion))
    async def completions(http: Request, body: CompletionBody) -> Response:
        return await service.complete(http, body)

    @router.post("/chat/completions", response_model=None, responses=_streamed(ChatCompletion))
    async def chat_completions(http: Request, body: ChatBody) -> Response:
        return await service.chat(http, body)

    return router


def _streamed(answer: type) -> dict[int | str, dict[str, Any]]:
    """The answers of a path whose answer may be a stream."""
    return {200: {"model": answer, "content": STREAM}, **ERRORS}


def _models(model: ServedModel) -> APIRouter:
    router = APIRouter(prefix="/v1/models", responses=ERRORS)

    def described(model_id: str) -> Model:
        plan = model.plan_of(model_id)
        return {
            "id": model_id,
            "object": "model",
            "created": model.created,
            "owned_by": "kvpolicy",
            "root": model.name,
            "parent": None if model_id in (model.name, *model.aliases) else model.name,
            "max_model_len": plan.max_len,
            "kvpolicy": {
                "plan": plan.name,
                "digest": plan.engine.plan.digest(),
                "slots": plan.stats.slots,
            },
        }

    @router.get("")
    async def models() -> Models:
        return {"object": "list", "data": [described(model_id) for model_id in model.ids]}

    @router.get("/{model_id:path}")
    async def one_model(model_id: str) -> Model:
        return described(model_id)

    return router


def _health(name: str, problem: str | None) -> JSONResponse:
    """The answer to a question for health: yes, or why not."""
    if problem is None:
        return JSONResponse({name: True})
    return JSONResponse({name: False, "problem": as_sentence(problem)}, 503)


def _operation(service: Service, metrics: Metrics) -> APIRouter:
    router = APIRouter(include_in_schema=False)

    @router.get("/health/live")
    async def live() -> JSONResponse:
        return _health("live", service.model.problem)

    @router.get("/health/ready")
    @router.get("/health")
    async def ready() -> JSONResponse:
        stopping = "the server is shutting down" if service.draining else None
        return _health("ready", service.model.problem or stopping)

    @router.get("/metrics")
    def prometheus() -> Response:  # in a thread: engines may hold the prefix store for a while
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    return router
