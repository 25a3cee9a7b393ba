"""The form of answers, for the OpenAPI document; `kvpolicy.serve.replies` makes them."""

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict


class TokenDetails(TypedDict):
    """``usage.prompt_tokens_details``."""

    cached_tokens: int


class Rows(TypedDict):
    """``usage.kvpolicy``: what the rows of an answer took."""

    peak_rows: int
    rows_evicted: int
    compactions: int
    peak_bytes: int
    full_bytes: int


class Usage(TypedDict):
    """``usage``: what an answer has cost."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    kvpolicy: Rows


class CompletionTokens(TypedDict):
    """``logprobs`` of a choice of a completion."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(TypedDict):
    """What choices of both kinds have."""

    index: int
    token_ids: NotRequired[list[int]]
    finish_reason: Literal["stop", "length"]


class CompletionChoice(Choice):
    """A choice of a completion."""

    text: str
    logprobs: CompletionTokens | None


class Alternative(TypedDict):
    """A token that could have been taken."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(Alternative):
    """A token of a chat."""

    top_logprobs: list[Alternative]


class ChatTokens(TypedDict):
    """``logprobs`` of a choice of a chat."""

    content: list[ChatToken]
    refusal: None


class Answer(TypedDict):
    """``message`` of a choice of a chat."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Choice):
    """A choice of a chat."""

    message: Answer
    logprobs: ChatTokens | None


class Reply(TypedDict):
    """What answers of both kinds have."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class Completion(Reply):
    """An answer of ``/v1/completions``."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ChatCompletion(Reply):
    """An answer of ``/v1/chat/completions``."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ServedPlan(TypedDict):
    """``kvpolicy`` of a model."""

    plan: str
    digest: str
    slots: int


class Model(TypedDict):
    """A model under one of its plans."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    kvpolicy: ServedPlan


class Models(TypedDict):
    """An answer of ``/v1/models``."""

    object: Literal["list"]
    data: list[Model]


class Error(TypedDict):
    """What was wrong."""

    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str


class ErrorAnswer(TypedDict):
    """An answer other than success."""

    error: Error


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "What is wrong with the request"},
    "5XX": {"model": ErrorAnswer, "description": "Why there is no answer"},
}
"""For `responses` of a path."""

STREAM: dict[str, Any] = {"text/event-stream": {"schema": {"type": "string"}}}
"""The content of an answer to ``"stream": true``."""
