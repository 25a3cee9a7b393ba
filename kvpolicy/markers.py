"""The decorators `hookspec` and `hookimpl`, importable without torch."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import pluggy

PROJECT = "kvpolicy"

hookspec = pluggy.HookspecMarker(PROJECT)

_hookimpl = pluggy.HookimplMarker(PROJECT)

_Function = TypeVar("_Function", bound=Callable[..., Any])

# When a hook is there: where an attribute of the policy is true, or a function of the policy is.
When = str | Callable[[Any], object]


@overload
def hookimpl(function: _Function) -> _Function: ...
@overload
def hookimpl(
    *,
    when: When | None = None,
    wrapper: bool = False,
    tryfirst: bool = False,
    trylast: bool = False,
    specname: str | None = None,
) -> Callable[[_Function], _Function]: ...
def hookimpl(
    function: Any = None,
    *,
    when: When | None = None,
    wrapper: bool = False,
    tryfirst: bool = False,
    trylast: bool = False,
    specname: str | None = None,
) -> Any:
    """Make a method of a policy the implementation of a hook.

    Args:
        function: The method, where it is decorated without arguments.
        when: The hook is there only where this is true when a stack is built: the attribute of the
            policy of this name, as in ``@hookimpl(when="every")``, or what a function of the
            policy returns. A hook that is not there costs nothing.
        wrapper: Whether it is a generator that yields once, and gets the answer of those beneath.
        tryfirst: Whether it is called before those of the policies listed after this one.
        trylast: Whether it is called after those of all other policies.
        specname: The hook; by default that of the name of the method.
    """

    def decorate(method: Any) -> Any:
        _hookimpl(method, wrapper=wrapper, tryfirst=tryfirst, trylast=trylast, specname=specname)
        setattr(method, f"{PROJECT}_when", when)
        return method

    return decorate if function is None else decorate(function)


def hook_options(attribute: object) -> Mapping[str, Any] | None:
    """What `hookimpl` was given for an attribute of a class; ``None`` if it is not decorated.

    No code of the attribute runs: properties and objects with a `__getattr__` are left alone.
    """
    holders = [attribute]
    if type(attribute) in (staticmethod, classmethod):
        holders.append(attribute.__func__)  # type: ignore[attr-defined]
    for holder in holders:
        options = inspect.getattr_static(holder, f"{PROJECT}_impl", None)
        if type(options) is dict:
            when = inspect.getattr_static(holder, f"{PROJECT}_when", None)
            return {**options, "when": when}
    return None
