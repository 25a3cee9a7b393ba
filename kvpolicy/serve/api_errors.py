"""Errors as OpenAI's interface has them: ``{"error": {"message", "type", "param", "code"}}``."""

import json
import re
from collections.abc import Mapping
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from kvpolicy.cli.output import as_sentence
from kvpolicy.quantities import format_count
from kvpolicy.text import visible

_MOST_OF_MESSAGE = 600  # characters
_MOST_OF_VALUE = 60

# Code of an error that gives none, by its status.
_CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_too_slow",
    413: "body_too_large",
    415: "unsupported_media_type",
    421: "wrong_host",
    429: "queue_full",
    500: "internal_error",
    503: "unavailable",
    504: "request_timeout",
}
# What the framework answers with a phrase of HTTP only.
_SENTENCES = {
    404: "there is no such path here; see /v1/models, /v1/completions and /v1/chat/completions",
    405: "this path has no such method; see the header Allow",
}


class ApiError(HTTPException):
    """An answer other than success.

    Attributes:
        message: One sentence for the client.
        param: The field that it is about, such as ``"messages[0].content"``.
        code: What programs tell errors apart by.
        headers: Further headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers=dict(headers or {}))
        self.message, self.param = message, param
        self.code = code or _CODES.get(status, "invalid_request")

    def body(self) -> dict[str, Any]:
        """The error as data for JSON; control characters are escaped."""
        message = visible(as_sentence(self.message))[:_MOST_OF_MESSAGE]
        # A lone surrogate has no UTF-8 form.
        param = None if self.param is None else visible(self.param)[:_MOST_OF_MESSAGE]
        kind = _kind(self.status_code)
        return {"error": {"message": message, "type": kind, "param": param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The error as an answer."""
        return JSONResponse(self.body(), self.status_code, headers=self.headers)


def _kind(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def from_http(error: StarletteHTTPException) -> ApiError:
    """An error of the framework: an unknown path or method, a body that is too large.

    Args:
        error: The error.
    """
    if isinstance(error, ApiError):
        return error
    status = error.status_code
    return ApiError(status, _SENTENCES.get(status, str(error.detail)), headers=error.headers)


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body.

    Args:
        error: What pydantic has found. The context of a `refused` has ``param``, a field of the
            object that is refused, and ``what``, which goes on from its name.
    """
    first = error.errors()[0]
    context = first.get("ctx") or {}
    within = (int(one) if one.isdigit() else one for one in context.get("param", "").split("."))
    param, given = _param((*first["loc"], *within)), first.get("input")
    if not param:
        what = "empty" if first["type"] == "missing" else _described(given)
        return ApiError(400, f"the body is {what}; send a JSON object")
    if "param" in context:
        message = f"{param} {context['what']}"
    elif first["type"] == "missing":
        message = f"{param} is missing"
    elif isinstance(given, list) and "actual_length" in context:
        least = context.get("min_length")
        bound = "at most" if least is None else "at least"
        number = format_count(context["max_length"] if least is None else least, "item")
        message = f"{param} is {_described(given)}, and should have {bound} {number}"
    else:
        what = str(first["msg"]).removeprefix("Value error, ").removeprefix("Input ")
        message = f"{param} is {_described(given)}, and {what}"
    return ApiError(400, message, param=param)


def _described(value: Any) -> str:
    """A value of a body in a message: what it is, and it itself if it is short."""
    if isinstance(value, list):
        return f"a list of {format_count(len(value), 'item')}" if value else "an empty list"
    if isinstance(value, dict):
        return "an object"
    text = re.sub(r"\s+", " ", json.dumps(value, ensure_ascii=False, default=str))
    return text if len(text) <= _MOST_OF_VALUE else f"{text[:_MOST_OF_VALUE]}…"


def _param(place: tuple[int | str, ...]) -> str:
    """``messages[0].content`` for ``("body", "messages", 0, "content")``."""
    text = ""
    for part in place[1:]:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if part else ""
    return text.removeprefix(".")
