"""Groups of options that commands have in common: classes whose fields are options."""

import inspect
from collections.abc import Callable, Iterator
from functools import wraps
from inspect import Parameter
from typing import Any

import attrs


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of its groups.

    A group is an attrs class whose fields are options, or groups. In place of a parameter of such a
    type, the command has the options of its fields in their order; it is called with an instance
    of the class.

    Args:
        command: A function whose parameters are options, or groups.
    """
    own = inspect.signature(command).parameters.values()

    @wraps(command)
    def wrapped(**values: Any) -> None:
        command(**{one.name: _value(one, values) for one in own})

    options = [option for one in own for option in _options(one)]
    parameters = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in options]
    # typer reads both.
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {one.name: one.annotation for one in parameters}
    return wrapped


def _fields(parameter: Parameter) -> list[Parameter] | None:
    """The fields of a group; ``None``: the parameter is an option."""
    kind = parameter.annotation
    if isinstance(kind, type) and attrs.has(kind):
        return list(inspect.signature(kind).parameters.values())
    return None


def _options(parameter: Parameter) -> Iterator[Parameter]:
    fields = _fields(parameter)
    if fields is None:
        yield parameter
        return
    for one in fields:
        yield from _options(one)


def _value(parameter: Parameter, values: dict[str, Any]) -> Any:
    fields = _fields(parameter)
    if fields is None:
        return values[parameter.name]
    return parameter.annotation(**{one.name: _value(one, values) for one in fields})
