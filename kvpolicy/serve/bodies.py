"""Bodies of requests: the fields of OpenAI's interface that this server has, with their limits.

A field that is not supported may be sent with a value that has no effect, as many clients do; see
`kvpolicy.serve.fields`. With any other value it is refused, and so is a field that is not known: a
request never gets an answer to another question than the one that was asked.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NoReturn

import attrs
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    InstanceOf,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from kvpolicy.entry_points import nearest
from kvpolicy.serve import fields
from kvpolicy.text import visible
from kvpolicy.validators import MAX_COUNT, MAX_SEED

Schema = dict[str, Any]  # of JSON

MAX_CHOICES = 16  # of one prompt
MAX_PROMPTS = 64  # of one body
MAX_MESSAGES = 2048
MAX_IMAGES = 16  # of one body: a small one, too, may become as large as the model sees
MAX_STOPS = 4
MAX_STOP_LENGTH = 256  # characters
MAX_TOP_LOGPROBS = 20
MAX_PENALTY = 1000
MAX_BIAS = 100  # of a token, as in OpenAI's interface
MAX_BIASES = 1024  # tokens of one body
_MAX_NAME = 256  # characters of names and the like
_MOST_SHOWN = 60  # characters of a name that is wrong


def _refuse(param: str, what: str) -> NoReturn:
    """Refuse a field of the object that is checked; the sentence begins with its name."""
    kind = "refused"
    raise PydanticCustomError(kind, "{param} {what}", {"param": param, "what": what})


def _plain(text: Any) -> Any:
    """A text that every tokenizer reads to its end: without NUL and without half characters."""
    if isinstance(text, str):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            msg = f"has half a character at {error.start}; send UTF-8"
            raise ValueError(msg) from error
        if "\0" in text:
            msg = f"has a NUL character at {text.index(chr(0))}; leave it out"
            raise ValueError(msg)
    return text


# Schemas of what is sent, where validators read several forms.
_PLAIN = {"type": "string", "pattern": r"^[^\x00]*$"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


def _both(**values: Schema) -> Schema:
    """Bodies in which all of some fields have such values."""
    return {"required": [*values], "properties": values}


def _without(other: str, value: object, /, **values: Schema) -> Schema:
    """Bodies with such values of some fields, in which another field has not a value."""
    return {"required": [*values], "properties": {**values, other: {"not": {"const": value}}}}


Name = Annotated[
    str,
    BeforeValidator(_plain),
    Field(max_length=_MAX_NAME),
    WithJsonSchema({**_PLAIN, "maxLength": _MAX_NAME}),
]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
StopIds = Annotated[list[int], Field(max_length=64, fail_fast=True)]


_BIAS = {
    "type": "object",
    "propertyNames": {"pattern": r"^(0|[1-9][0-9]{0,8})$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    "maxProperties": MAX_BIASES,
}
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,8}", re.ASCII)


def _bias(value: Any) -> Any:
    """Numbers by token id, whose ids are texts in JSON."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        msg = f"should be an object with up to {MAX_BIASES} token ids"
        raise ValueError(msg)
    for token, number in value.items():
        if not _TOKEN_ID.fullmatch(token):
            msg = 'should have token ids as names, such as {"17": -2.5}'
            raise ValueError(msg)
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not is_number or not abs(number) <= MAX_BIAS:
            msg = f"should have numbers from -{MAX_BIAS} to {MAX_BIAS}"
            raise ValueError(msg)
    return {int(token): float(number) for token, number in value.items()}


def _whole(value: Any) -> Any:
    """Numbers without a fraction as integers, as JSON does not tell 5.0 from 5."""
    if isinstance(value, list):
        # A long prompt may have a million token ids.
        return value if {*map(type, value)} <= {int, str} else [_whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class _Strict(BaseModel):
    """An object of a body: unknown fields are refused, and no value is converted."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)
    unserved: ClassVar[Mapping[str, fields.Unserved]] = {}
    # Whether a field that is in no list changes nothing.
    is_open: ClassVar[bool] = False
    # Bodies whose fields do not go together, which validators refuse.
    conflicts: ClassVar[tuple[Schema, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for name, value in given.items():
            field = cls.unserved.get(name)
            if name in cls.model_fields or (field is not None and field.takes(value, given)):
                continue
            if field is not None:
                _refuse(name, f"is not supported by this server; {field.instead}")
            if cls.is_open:
                continue
            # Half a character in a name has no form that pydantic takes.
            shown = visible(name[:_MOST_SHOWN]) or '""'
            _refuse(shown, f"is no field of this server{nearest(shown, cls.model_fields)}")
        # OpenAI's interface allows null for what has a default.
        return {
            name: _whole(value)
            for name, value in given.items()
            if name in cls.model_fields
            if value is not None or cls.model_fields[name].is_required()
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> Schema:
        schema = handler.resolve_ref_schema(handler(core_schema))
        properties = schema["properties"]
        for name, field in cls.model_fields.items():
            if not field.is_required():
                properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
        properties |= {name: field.schema for name, field in cls.unserved.items()}
        conflicts = [
            _without(*field.where, **{name: {"not": field.plain_schema}})
            for name, field in cls.unserved.items()
            if field.where is not None
        ]
        if conflicts or cls.conflicts:
            schema["not"] = {"anyOf": [*conflicts, *cls.conflicts]}
        schema["additionalProperties"] = cls.is_open
        return schema


class StreamOptions(_Strict):
    """``stream_options``."""

    unserved: ClassVar[Mapping[str, fields.Unserved]] = fields.STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Extension(_Strict):
    """``kvpolicy``: what other servers do not have.

    Attributes:
        kept: Whether a stream says which rows are held; see `kvpolicy.serve.kept`.
        token_ids: Whether choices have ``token_ids``.
        stop_ids: Tokens that end the generation; ``None``: the model's own.
    """

    kept: bool = False
    token_ids: bool = False
    stop_ids: StopIds | None = None


_STOP = {**_PLAIN, "minLength": 1, "maxLength": MAX_STOP_LENGTH}
_STOPS = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}]}
_KEPT = {"type": "object", "required": ["kept"], "properties": {"kept": {"const": True}}}


class GenerationBody(_Strict):
    """What both endpoints have."""

    conflicts: ClassVar[tuple[Schema, ...]] = (
        _without("stream", True, stream_options={"type": "object"}),
        _without("stream", True, kvpolicy=_KEPT),
        _both(kvpolicy=_KEPT, n={"not": {"enum": [1, None]}}),
    )

    model: Name
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=MAX_PENALTY)] | None = None
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[int, float], BeforeValidator(_bias), WithJsonSchema(_BIAS)] = {}
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    seed: Annotated[int, Field(ge=-1)] | None = None
    stop: Annotated[list[str], WithJsonSchema(_STOPS)] = []
    include_stop_str_in_output: bool = False
    stop_token_ids: StopIds | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    kvpolicy: Extension = Extension()

    @field_validator("top_k", mode="after")
    @classmethod
    def _all(cls, value: int | None) -> int | None:
        """Other servers write -1 for all tokens."""
        return 0 if value == -1 else value

    @field_validator("seed", mode="after")
    @classmethod
    def _drawn(cls, value: int | None) -> int | None:
        """Other servers write -1 for a seed that is drawn; of a longer one, 63 bits are taken."""
        return None if value is None or value == -1 else value % (MAX_SEED + 1)

    @field_validator("stop", mode="before")
    @classmethod
    def _stops(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        is_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
        if not is_list or not all(isinstance(one, str) and one for one in stops):
            msg = f"should be a text or up to {MAX_STOPS} texts, none of them empty"
            raise ValueError(msg)
        if max(map(len, stops), default=0) > MAX_STOP_LENGTH:
            msg = f"should have texts of at most {MAX_STOP_LENGTH} characters"
            raise ValueError(msg)
        return [_plain(one) for one in stops]

    @model_validator(mode="after")
    def _stream_alone(self) -> "GenerationBody":
        if not self.stream and self.stream_options is not None:
            _refuse("stream_options", "needs stream: true")
        if self.kvpolicy.kept and not (self.stream and self.n == 1):
            _refuse("kvpolicy.kept", "needs stream: true and n: 1")
        return self


def _prompts(value: Any) -> Any:
    """A list of prompts for each of the four forms that a prompt may have."""
    if isinstance(value, str) or (isinstance(value, list) and value and _are_ids(value)):
        return [_plain(value)]
    is_list = isinstance(value, list) and 1 <= len(value) <= MAX_PROMPTS
    if not is_list or not all(isinstance(one, str) or _are_ids(one) for one in value):
        msg = f"should be a text, a list of token ids, or a list of 1 to {MAX_PROMPTS} of either"
        raise ValueError(msg)
    return [_plain(one) for one in value]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} <= {int}


def _list_of_prompts(most: int) -> Schema:
    return {
        "type": "array",
        "items": {"anyOf": [_PLAIN, _TOKEN_IDS]},
        "minItems": 1,
        "maxItems": most,
    }


_PROMPT = {"anyOf": [_PLAIN, _TOKEN_IDS, _list_of_prompts(MAX_PROMPTS)]}
_ONE_PROMPT = {"anyOf": [_PLAIN, _TOKEN_IDS, _list_of_prompts(1)]}


class CompletionBody(GenerationBody):
    """Body of ``/v1/completions``."""

    conflicts: ClassVar[tuple[Schema, ...]] = (
        *GenerationBody.conflicts,
        _both(kvpolicy=_KEPT, prompt={"not": _ONE_PROMPT}),
    )

    unserved: ClassVar[Mapping[str, fields.Unserved]] = fields.COMPLETION

    prompt: Annotated[list[str | list[int]], BeforeValidator(_prompts), WithJsonSchema(_PROMPT)]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool = False

    @field_validator("echo", mode="before")
    @classmethod
    def _no_echo(cls, value: Any) -> Any:
        return False if value is None else value

    @model_validator(mode="after")
    def _echoes_at_once(self) -> "CompletionBody":
        if self.echo and self.stream:
            _refuse("echo", "needs stream: false")
        return self

    @model_validator(mode="after")
    def _one_is_watched(self) -> "CompletionBody":
        if self.kvpolicy.kept and len(self.prompt) > 1:
            _refuse("kvpolicy.kept", "needs a single prompt")
        return self


# Parts of OpenAI's interface that are neither text nor an image in a message.
_OTHER_PARTS = ("input_text", "input_image", "input_audio", "video_url", "audio_url", "file")
_FORMS = (
    'parts {"type": "text", "text": TEXT} or {"type": "image_url", "image_url": {"url": DATA_URL}}'
)


@attrs.frozen
class ImagePart:
    """An image in a message.

    Attributes:
        url: A ``data:`` URL, not decoded.
    """

    url: str = attrs.field(repr=False)


def _text_of(value: Any) -> Any:
    """The text of a content, which may come in parts."""
    found = _content(value)
    if isinstance(found, tuple):
        msg = "should be a text, and has an image"
        raise ValueError(msg)
    return found


def _content(value: Any) -> Any:
    """A text, or a tuple of parts if one of them is an image."""
    if isinstance(value, str):
        return _plain(value)
    if not isinstance(value, list):
        msg = f"should be a text, or {_FORMS}"
        raise ValueError(msg)
    parts = [_part(part, number) for number, part in enumerate(value)]
    texts = [part for part in parts if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(parts) else tuple(parts)


def _part(part: Any, number: int) -> str | ImagePart:
    # What else a part has is for caches of other servers.
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "image_url":
        return _image(part.get("image_url"), f"{number}.image_url")
    if kind in _OTHER_PARTS:
        _refuse(f"{number}.type", f"is {kind!r}, and this server takes {_FORMS}")
    if kind != "text" or not isinstance(part.get("text"), str):
        msg = f"should be a text, or {_FORMS}"
        raise ValueError(msg)
    return str(_plain(part["text"]))


def _image(given: Any, param: str) -> ImagePart:
    url = given.get("url") if isinstance(given, dict) else None
    if not isinstance(url, str):
        _refuse(param, 'should be an object {"url": "data:image/png;base64,..."}')
    for name, value in given.items():
        field = fields.IMAGE_URL.get(name)
        if name != "url" and (field is None or not field.takes(value, given)):
            instead = "leave it out" if field is None else field.instead
            what = f"is not supported by this server; {instead}"
            _refuse(f"{param}.{visible(name[:_MOST_SHOWN])}", what)
    if not url.startswith("data:"):
        what = (
            "is the address of an image, and this server fetches nothing; send the image itself, as"
            ' "data:image/png;base64,..."'
        )
        _refuse(f"{param}.url", what)
    return ImagePart(url)


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _PLAIN},
}
_IMAGE_PART = {
    "type": "object",
    "required": ["type", "image_url"],
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "required": ["url"],
            "properties": {
                "url": {"type": "string", "pattern": "^data:"},
                **{name: field.schema for name, field in fields.IMAGE_URL.items()},
            },
            "additionalProperties": False,
        },
    },
}
_TEXT = {"anyOf": [_PLAIN, {"type": "array", "items": _TEXT_PART}]}
_CONTENT = {"anyOf": [_PLAIN, {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}]}

Text = Annotated[str, BeforeValidator(_text_of), WithJsonSchema(_TEXT)]
Content = Annotated[
    str | tuple[str | InstanceOf[ImagePart], ...],
    BeforeValidator(_content),
    WithJsonSchema(_CONTENT),
]


def _plain_data(value: Any) -> Any:
    """Data in which every text is plain."""
    if isinstance(value, dict):
        return {_plain(key): _plain_data(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain_data(one) for one in value]
    return _plain(value)


class Message(_Strict):
    """One message of a chat."""

    unserved: ClassVar[Mapping[str, fields.Unserved]] = fields.MESSAGE
    is_open: ClassVar[bool] = True  # as what clients keep beside a message

    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: Name | None = None
    reasoning_content: Text | None = None

    @property
    def images(self) -> list[tuple[int, ImagePart]]:
        """Its images, with the number of the part that each is."""
        parts = () if isinstance(self.content, str) else self.content
        return [(number, part) for number, part in enumerate(parts) if isinstance(part, ImagePart)]


_VARIABLES = {
    "type": "object",
    "propertyNames": _PLAIN,
    "additionalProperties": {"anyOf": [_PLAIN, {"type": ["boolean", "number", "null"]}]},
}


class ChatBody(GenerationBody):
    """Body of ``/v1/chat/completions``."""

    conflicts: ClassVar[tuple[Schema, ...]] = (
        *GenerationBody.conflicts,
        _without("logprobs", True, top_logprobs={"type": "integer"}),
        # Equal ones are taken, too.
        _both(max_tokens={"type": "integer"}, max_completion_tokens={"type": "integer"}),
        _both(continue_final_message={"const": True}, add_generation_prompt={"const": True}),
    )

    unserved: ClassVar[Mapping[str, fields.Unserved]] = fields.CHAT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], BeforeValidator(_plain_data), WithJsonSchema(_VARIABLES)] | None
    ) = None
    reasoning_effort: Name | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template is given beside the messages."""
        effort = self.reasoning_effort
        own = {} if effort is None else {"reasoning_effort": effort}
        return own | (self.chat_template_kwargs or {})

    @model_validator(mode="after")
    def _few_images(self) -> "ChatBody":
        found = sum(len(message.images) for message in self.messages)
        if found > MAX_IMAGES:
            _refuse("messages", f"have {found} images, and may have {MAX_IMAGES}; leave some out")
        return self

    @model_validator(mode="after")
    def _agree(self) -> "ChatBody":
        if self.top_logprobs is not None and not self.logprobs:
            _refuse("top_logprobs", "needs logprobs: true")
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            _refuse("max_completion_tokens", "and max_tokens differ; give one of them")
        if self.continue_final_message and self.add_generation_prompt:
            _refuse("continue_final_message", "and add_generation_prompt exclude each other")
        return self
