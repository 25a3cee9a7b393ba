"""Registers the policies of one stack with pluggy, which puts their hooks in calling order.

pluggy calls the plugin registered last first, and a wrapper runs around those registered before
it. In ``["h2o", "protect"]`` protect wraps h2o; the defaults are called when no policy answered.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pluggy

from kvpolicy import hookspecs
from kvpolicy.errors import PolicyLoadError
from kvpolicy.hooks.declarations import (
    HOOKS,
    Declarations,
    check_hooks,
    check_needed,
    read_declarations,
)
from kvpolicy.hooks.defaults import Defaults
from kvpolicy.markers import PROJECT, hook_options
from kvpolicy.plugin_code import plugin_code


@attrs.frozen(eq=False)
class Registered:
    """The policies of a stack.

    Attributes:
        declared: What each policy declares, by its id.
        impls: Implementations of each hook in calling order, the default last.
    """

    declared: Mapping[int, Declarations]
    impls: Mapping[str, Sequence[pluggy.HookImpl]]


def register(policies: Sequence[tuple[str, object]], owner: str) -> Registered:
    """Register policies.

    Args:
        policies: Names and policies, in order.
        owner: Suffix for messages: which policy these policies are parts of.

    Raises:
        PolicyLoadError: A policy does not fit the hook specs.
    """
    manager = _PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    declared: dict[int, Declarations] = {}
    for index, (name, policy) in enumerate(policies):
        who = f"policy '{name}'{owner}"
        if id(policy) in declared:
            msg = f"{who} is in the stack twice, as the same object; make an object for each place"
            raise PolicyLoadError(msg)
        check_hooks(who, policy)
        with plugin_code(f"{who} cannot be used", PolicyLoadError):
            has_equality = type(policy).__eq__ is not object.__eq__
        if has_equality:
            # pluggy looks plugins up with ==, which fails on policies that hold tensors.
            msg = (
                f"{who} is compared by value; a policy is compared by "
                "identity, write @attrs.define(eq=False)"
            )
            raise PolicyLoadError(msg)
        declared[id(policy)] = read_declarations(who, policy)
        with plugin_code(f"{who} does not fit the hook specs", PolicyLoadError):
            manager.register(policy, f"{name}#{index}" if manager.has_plugin(name) else name)
            manager.check_pending()
        hooks = {caller.name for caller in manager.get_hookcallers(policy) or ()}
        check_needed(who, declared[id(policy)], hooks)
    # Registered last: among `trylast` implementations pluggy calls the newest last.
    manager.register(Defaults(), "the defaults")
    impls = {hook: getattr(manager.hook, hook).get_hookimpls()[::-1] for hook in HOOKS}
    return Registered(declared, impls)


class _PluginManager(pluggy.PluginManager):
    """Finds hooks in policies: those that are there, see `hookimpl`, and no private names.

    Names with two leading underscores would be inspected at some cost.
    """

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        options = None
        if not name.startswith("__"):  # and properties, which older releases of pluggy would run
            options = hook_options(inspect.getattr_static(plugin, name, None))
        if options is None or not _is_there(plugin, options["when"]):
            return None
        return super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)


def _is_there(policy: object, when: Any) -> bool:
    if when is None:
        return True
    return bool(getattr(policy, when) if isinstance(when, str) else when(policy))
