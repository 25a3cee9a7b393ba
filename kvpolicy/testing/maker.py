"""How new policies are built, whatever the author gave: a class, a function, or a name."""

import inspect
from collections.abc import Callable
from typing import Any

import attrs

from kvpolicy import hookspecs
from kvpolicy.errors import KVPolicyError, PolicyLoadError
from kvpolicy.hooks.discovery import load_policy, policy_names, snake_case
from kvpolicy.hooks.stack import Stack

HOOKS = [name for name, value in vars(hookspecs).items() if hasattr(value, "kvpolicy_spec")]


@attrs.frozen
class Maker:
    """Builds new policies, and knows how to write that down.

    Attributes:
        name: What messages call the policy.
        words: How a few lines of code name the factory.
        build: Builds one.
        knobs: Knobs of a policy that was given by name.
    """

    name: str
    words: str
    build: Callable[[], object]
    knobs: dict[str, Any] | None = None

    def hooks(self) -> frozenset[str]:
        """The hooks it implements."""
        stack = Stack([(self.name, self.build())])
        return frozenset(hook for hook in HOOKS if stack.implements(hook))

    @classmethod
    def of(cls, factory: Any, knobs: dict[str, Any] | None = None) -> "Maker":
        """Understand what was given.

        Raises:
            KVPolicyError: If it is no factory, or knobs are given without a name.
        """
        if isinstance(factory, Maker):
            return factory
        if isinstance(factory, str):
            given = dict(knobs or {})
            words = f"{factory!r}, {given!r}" if given else repr(factory)
            built = type(load_policy(factory, **given))  # looked up once, with all its messages
            return cls(factory, words, lambda: built(**given), given)
        if not callable(factory):
            msg = (
                f"check_policy was given {factory!r:.60}; give the policy's class, a function "
                f"that builds one, or a name: {', '.join(policy_names())}"
            )
            raise KVPolicyError(msg)
        if knobs:
            msg = (
                f"check_policy was given the knobs {knobs} and no name; write "
                "check_policy(lambda: MyPolicy(...))"
            )
            raise KVPolicyError(msg)
        is_class = inspect.isclass(factory)
        words = factory.__name__ if is_class or _is_named(factory) else "factory"
        name = snake_case(factory.__name__) if is_class else snake_case(type(factory()).__name__)
        return cls(name, words, lambda: _build(factory))


def _is_named(factory: Any) -> bool:
    return getattr(factory, "__name__", "<lambda>") != "<lambda>"


def _build(factory: Callable[[], object]) -> object:
    try:
        return factory()
    except TypeError as error:
        msg = f"{factory!r:.80} cannot be called without arguments: {error}"
        raise PolicyLoadError(msg) from error
