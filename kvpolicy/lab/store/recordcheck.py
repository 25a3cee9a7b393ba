"""Records read from files, checked against the classes they are to be."""

from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import attrs

from kvpolicy.errors import ResultsError

Record = TypeVar("Record")

_Kinds = dict[str, tuple[type, ...]]


def record_of(cls: type[Record], record: Any, where: str) -> Record:
    """Make an attrs object of plain data that somebody may have edited.

    Args:
        cls: A class whose fields are plain types; what is in a dict or tuple is not looked at.
        record: What a file has there.
        where: Where it stands, for the message.

    Raises:
        ResultsError: It is no object, lacks a field or has one more, or one of another type.
    """
    problem = _problem(_kinds(cast(Any, cls)), record)
    if problem is not None:
        msg = f"{where}, is damaged or of another version of kvpolicy: {problem}."
        raise ResultsError(msg)
    return cls(**record)


def _problem(kinds: _Kinds, record: Any) -> str | None:
    if not isinstance(record, dict):
        return f"{type(record).__name__} stands there where an object is wanted"
    if record.keys() != kinds.keys():
        names = ", ".join(sorted(record.keys() ^ kinds.keys()))
        return f"it has other fields ({names})"
    for name, wanted in kinds.items():
        if type(record[name]) not in wanted:
            return f"{name} is {record[name]!r:.60}"
    return None


@lru_cache
def _kinds(cls: Any) -> _Kinds:
    hints = get_type_hints(cls)
    return {field.name: _allowed(hints[field.name]) for field in attrs.fields(cls)}


def _allowed(hint: Any) -> tuple[type, ...]:
    """The types of which a value may be; JSON writes whole floats as integers at times."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for part in get_args(hint) for kind in _allowed(part))
    kind = get_origin(hint) or hint
    return (float, int) if kind is float else (kind,)
