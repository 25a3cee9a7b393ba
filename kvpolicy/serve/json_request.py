"""Bodies are read with limits on size, time and type before they are parsed."""

import asyncio
from concurrent.futures import Executor
from email.message import Message as Headers
from typing import Any

from starlette.requests import Request

from kvpolicy.files import parse_json
from kvpolicy.quantities import format_bytes
from kvpolicy.serve.api_errors import ApiError
from kvpolicy.serve.settings import ServerSettings

_SMALL = 64 << 10  # bytes that are parsed within a millisecond or two


class JsonRequest(Request):
    """A request whose body is read with limits, and is JSON that every reader understands alike.

    Attributes:
        settings: The limits.
        parser: A thread that parses large bodies, one after another, so that streams go on.
    """

    settings: ServerSettings
    parser: Executor
    _content: bytes | None = None

    async def body(self) -> bytes:
        """The body.

        Raises:
            ApiError: It is not sent as JSON, or is too large, or does not come in time.
        """
        if self._content is None:
            self._check_head()
            timeout_s = self.settings.body_timeout_s
            try:
                async with asyncio.timeout(timeout_s):
                    self._content = await self._read()
            except TimeoutError as error:
                message = f"the body has not come within {timeout_s:g} s; send it faster"
                raise ApiError(408, message) from error
        return self._content

    async def json(self) -> Any:
        """The value of the body.

        Raises:
            ApiError: It is not JSON, or has a key twice, or is nested too deeply.
        """
        content = await self.body()
        try:
            if len(content) <= _SMALL:
                return parse_json(content)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self.parser, parse_json, content)
        except ValueError as error:
            raise ApiError(400, f"the body cannot be read: {error}", code="invalid_json") from error

    async def _read(self) -> bytes:
        content = bytearray()
        async for part in self.stream():
            content += part
            if len(content) > self.settings.max_body:
                raise self._too_large()
        return bytes(content)

    def _check_head(self) -> None:
        given = Headers()
        given["content-type"] = self.headers.get("content-type", "application/octet-stream")
        if given.get_content_type() != "application/json":
            message = "the body has another type; send JSON with Content-Type: application/json"
            raise ApiError(415, message)
        if self.headers.get("content-encoding", "identity").lower() != "identity":
            message = "the body is compressed, which this server does not read; send it as it is"
            raise ApiError(415, message)
        length = self.headers.get("content-length", "0")  # h11 has checked it
        if int(length) > self.settings.max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        most = format_bytes(self.settings.max_body)
        return ApiError(
            413, f"the body has more than {most}; send a shorter prompt or smaller images"
        )
