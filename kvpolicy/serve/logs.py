"""Logs of a server: one line for each request, as JSON or as text, without what was said.

A line has ids, names and numbers. Prompts, answers and keys are never logged, nor are messages of
unexpected exceptions, which could hold parts of them: those are logged by class and place.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

from kvpolicy.errors import error_origin
from kvpolicy.text import visible

LOGGER = logging.getLogger("kvpolicy.serve")
# They report connections that are not HTTP, for example, and files of a prefix store.
_OTHERS = ("uvicorn.error", "asyncio", "kvpolicy.engine.reuse")


@contextmanager
def logging_to(stream: TextIO, *, as_json: bool) -> Iterator[None]:
    """Write the logs of a server to a stream within a block.

    Args:
        stream: Such as standard error.
        as_json: Whether lines are JSON.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if as_json else TextFormatter())
    with ExitStack() as before:
        for logger in (LOGGER, *map(logging.getLogger, _OTHERS)):
            before.callback(logger.setLevel, logger.level)
            before.callback(setattr, logger, "propagate", logger.propagate)
            before.callback(logger.removeHandler, handler)
            logger.addHandler(handler)
            logger.propagate = False
            logger.setLevel(logging.INFO if logger is LOGGER else logging.WARNING)
        yield


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event.

    Args:
        event: What has happened, such as ``"request"``.
        level: A level of `logging`.
        fields: Names and numbers.
    """
    LOGGER.log(level, event, extra={"fields": fields})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    if record.exc_info is not None and record.exc_info[1] is not None:
        fields |= error_origin(record.exc_info[1])
    return fields


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")


class JsonFormatter(logging.Formatter):
    """One object a line: ``time``, ``level``, ``event`` and the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        head = {"time": _time(record), "level": record.levelname.lower()}
        return json.dumps({**head, "event": record.getMessage(), **_fields(record)})


class TextFormatter(logging.Formatter):
    """Time, level and event, and the fields that have a value as ``name=value``."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        fields = _fields(record).items()
        values = [f"{name}={value}" for name, value in fields if value not in (None, "")]
        head = [_time(record), record.levelname.lower(), record.getMessage()]
        return visible(" ".join([*head, *values]))
