"""`HookManager`: calls the hooks of one stack and names the policy that fails.

pluggy calls the plugin registered last first, and a wrapper runs around those registered before
it. In ``["h2o", "protect"]`` protect wraps h2o; the defaults are called when no policy answered.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import pluggy
from torch import Tensor

from kvpolicy import hookspecs
from kvpolicy.errors import (
    HookError,
    HookResultError,
    KVPolicyError,
    PolicyLoadError,
    error_summary,
    error_text,
    type_name,
)
from kvpolicy.hooks.checks import ValueCheck
from kvpolicy.hooks.declarations import (
    HOOKS,
    REFERENCE,
    Declarations,
    check_hooks,
    read_declarations,
)
from kvpolicy.hooks.defaults import Defaults
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.side_effects import SideEffects
from kvpolicy.markers import PROJECT, hook_options
from kvpolicy.plugin_code import plugin_code

Check = Callable[[object], str | None]


class HookListener(Protocol):
    """Receives every hook call of a stack while it listens."""

    def call_hook(self, hook: str, arguments: dict[str, Any], ask: Callable[[], Any]) -> Any:
        """Call ``ask`` and return its answer."""

    def timed(self, impl: pluggy.HookImpl) -> Callable[..., Any]:
        """A function that replaces an implementation for the time being and calls it."""


class HookManager:
    """Calls hooks, checks the answers and finds the policy to blame for an error.

    Attributes:
        names: Names of the policies, in order.
        owner: Suffix for messages: which policy these policies are parts of.
        declared: What each policy declares, by its id.
    """

    def __init__(self, policies: Sequence[tuple[str, object]], owner: str = "") -> None:
        """Register the policies.

        Raises:
            PolicyLoadError: A policy does not fit the hook specs.
        """
        self.owner = owner
        self.names = [name for name, _ in policies]
        self._listener: HookListener | None = None
        self.declared: dict[int, Declarations] = {}
        self._manager = _PluginManager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        for index, (name, policy) in enumerate(policies):
            is_taken = self._manager.has_plugin(name)
            self._register(f"{name}#{index}" if is_taken else name, policy)
        # Registered last: among `trylast` implementations pluggy calls the newest last.
        self._manager.inactive_hooks = ()
        self._manager.register(Defaults(), "the defaults")

    def _register(self, name: str, policy: object) -> None:
        who = f"policy '{name}'{self.owner}"
        if id(policy) in self.declared:
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
        self.declared[id(policy)] = read_declarations(who, policy)
        self._manager.inactive_hooks = self.declared[id(policy)].inactive_hooks
        with plugin_code(f"{who} does not fit the hook specs", PolicyLoadError):
            self._manager.register(policy, name)
            self._manager.check_pending()
        impls: list[Any] = [
            impl
            for caller in self._manager.get_hookcallers(policy) or ()
            for impl in caller.get_hookimpls()
            if impl.plugin is policy and "bound" in impl.argnames
        ]
        for impl in impls:
            impl.function = _given_its_own(impl)

    @property
    def is_recorded(self) -> bool:
        """Whether a listener receives the calls."""
        return self._listener is not None

    def impls(self, hook: str) -> list[pluggy.HookImpl]:
        """Implementations of a hook in calling order, without the default."""
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        return [impl for impl in reversed(impls) if not isinstance(impl.plugin, Defaults)]

    def ask(
        self,
        hook: str,
        layer_idx: int | None,
        check: Check,
        *,
        optional: bool = False,
        late: LateChecks | None = None,
        **arguments: Any,
    ) -> Any:
        """Call one hook and check the answer.

        Args:
            hook: Name of the hook.
            layer_idx: The layer, for hooks that are called per layer.
            check: Returns what is wrong with an answer, or ``None``.
            optional: Whether ``None`` is a valid answer.
            late: Keeps the answer for a later check of its values; ``None``: they are checked now.
            arguments: Arguments that policies may name.

        Raises:
            HookError: A policy raises.
            HookResultError: An answer violates the contract.
        """
        if layer_idx is not None:
            arguments["layer_idx"] = layer_idx
        if late is not None:
            assert isinstance(check, ValueCheck)
            return self._call_and_keep(hook, layer_idx, check, late, arguments)
        if self._listener is None:
            return self._call(hook, layer_idx, check, optional, arguments)
        ask = partial(self._call, hook, layer_idx, check, optional, arguments)
        return self._listener.call_hook(hook, arguments, ask)

    def ask_each(
        self,
        hook: str,
        layer_idx: int | None,
        checks: Sequence[tuple[pluggy.HookImpl, Check]],
        **arguments: Any,
    ) -> list[Any]:
        """Call several implementations of one hook, one after the other.

        Args:
            hook: Name of the hook.
            layer_idx: The layer, for hooks that are called per layer.
            checks: The implementations, each with the check of its answer.
            arguments: Arguments that policies may name.

        Returns:
            Their answers.

        Raises:
            HookError: A policy raises.
            HookResultError: An answer violates the contract.
        """
        if layer_idx is not None:
            arguments["layer_idx"] = layer_idx
        answers = []
        for impl, check in checks:
            ask = partial(self._call_one, hook, layer_idx, impl, check, arguments)
            listener = self._listener
            answer = ask() if listener is None else listener.call_hook(hook, arguments, ask)
            answers.append(answer)
        return answers

    @contextmanager
    def listening(self, listener: HookListener) -> Iterator[None]:
        """Pass every hook call to a listener inside a ``with`` block.

        Raises:
            KVPolicyError: Another listener is active.
        """
        if self._listener is not None:
            msg = "the engine is being recorded already; one recording at a time is possible"
            raise KVPolicyError(msg)
        callers = [getattr(self._manager.hook, hook) for hook in HOOKS]
        functions = [(impl, impl.function) for caller in callers for impl in caller.get_hookimpls()]
        self._listener = listener
        try:
            for impl, _ in functions:
                impl.function = listener.timed(impl)
            yield
        finally:
            self._listener = None
            for impl, function in functions:
                impl.function = function

    def _call(
        self,
        hook: str,
        layer_idx: int | None,
        check: Check,
        optional: bool,
        arguments: dict[str, Any],
    ) -> Any:
        call = partial(getattr(self._manager.hook, hook), **arguments)
        answer = self._answer(hook, layer_idx, call, effects := SideEffects(arguments))
        is_valid = optional and answer is None
        problem = (None if is_valid else _validate(check, answer)) or effects.problem()
        if problem is None:
            return answer
        offender = self._find_offender(hook, check, arguments)
        raise self._result_error(hook, layer_idx, offender, problem)

    def _call_one(
        self,
        hook: str,
        layer_idx: int | None,
        impl: pluggy.HookImpl,
        check: Check,
        arguments: dict[str, Any],
    ) -> Any:
        """Call one implementation of a hook."""
        effects = SideEffects(arguments)
        call = partial(impl.function, *(arguments[name] for name in impl.argnames))
        answer = self._answer(hook, layer_idx, call, effects)
        problem = _validate(check, answer) or effects.problem()
        if problem is not None:
            raise self._result_error(hook, layer_idx, impl.plugin_name, problem)
        return answer

    def _call_and_keep(
        self,
        hook: str,
        layer_idx: int | None,
        check: ValueCheck,
        late: LateChecks,
        arguments: dict[str, Any],
    ) -> Any:
        """Call a hook, and check what the host knows of the answer."""
        with self._noting_answers(hook) as given:
            answer = self._call(hook, layer_idx, check.structure, False, arguments)

        def problem_of(answer: object, entries: slice) -> str | None:
            some = answer[entries] if isinstance(answer, Tensor) else answer
            return check.structure(answer) or check.of(entries).values(some)

        def recheck(layer_idx: int, entries: slice) -> None:
            problem = problem_of(answer, entries)
            if problem is not None:
                is_wrong = [impl for impl, own in given if problem_of(own, entries) is not None]
                offender = is_wrong[0].plugin_name if is_wrong else self._outermost(hook)
                raise self._result_error(hook, layer_idx, offender, problem)

        flag = check.fault(answer)
        if flag is not None:
            late.add(flag, recheck)
        return answer

    @contextmanager
    def _noting_answers(self, hook: str) -> Iterator[list[tuple[pluggy.HookImpl, object]]]:
        """Note what each policy answers to a call of a hook, besides wrappers."""
        given: list[tuple[pluggy.HookImpl, object]] = []
        plain: list[Any] = [
            impl for impl in self.impls(hook) if not (impl.wrapper or impl.hookwrapper)
        ]
        functions = [impl.function for impl in plain]

        def noting(impl: pluggy.HookImpl, function: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(function)
            def call(*arguments: Any) -> Any:
                answer = function(*arguments)
                given.extend([] if answer is None else [(impl, answer)])
                return answer

            return call

        try:
            for impl, function in zip(plain, functions, strict=True):
                impl.function = noting(impl, function)
            yield given
        finally:
            for impl, function in zip(plain, functions, strict=True):
                impl.function = function

    def _answer(
        self,
        hook: str,
        layer_idx: int | None,
        call: Callable[[], Any],
        effects: SideEffects,
    ) -> Any:
        """The answer of policies, not checked."""
        try:
            return call()
        except BaseException as error:
            effects.problem()  # puts torch's defaults back
            if isinstance(error, (KVPolicyError, KeyboardInterrupt)):
                raise
            raiser = self._find_raiser(hook, error)
            reason = error_text(error)
            where = _place(hook, layer_idx)
            msg = f"policy '{raiser}'{self.owner} raised {type_name(error)} in {where}"
            raise HookError(
                f"{msg}: {reason}" if reason else msg,
                summary=msg,
                policy=raiser,
                hook=hook,
                layer_idx=layer_idx,
            ) from error

    def _result_error(
        self, hook: str, layer_idx: int | None, offender: str, problem: str
    ) -> HookResultError:
        who, where = f"policy '{offender}'{self.owner}", _place(hook, layer_idx)
        return HookResultError(
            f"{who} {problem}, in {where}. See {REFERENCE}#{hook}",
            summary=f"{who} gave an invalid answer in {where}",
            policy=offender,
            hook=hook,
            layer_idx=layer_idx,
        )

    def _find_raiser(self, hook: str, error: BaseException) -> str:
        """The policy whose code is innermost in the traceback."""
        functions = [(inspect.unwrap(impl.function), impl) for impl in self.impls(hook)]
        codes = {getattr(function, "__code__", None): impl for function, impl in functions}
        trace, raiser = error.__traceback__, "/".join(self.names)
        while trace is not None:
            impl = codes.get(trace.tb_frame.f_code)
            raiser = impl.plugin_name if impl is not None else raiser
            trace = trace.tb_next
        return raiser

    def _find_offender(self, hook: str, check: Check, arguments: dict[str, Any]) -> str:
        """The policy that returned the invalid answer, else the outermost wrapper.

        Calls the policies once more, one by one. The run has failed already, so the second
        call cannot change a result; a policy that raises now is blamed, too.
        """
        impls = self.impls(hook)
        for impl in impls:
            if not (impl.wrapper or impl.hookwrapper):
                effects = SideEffects(arguments)
                try:
                    answer = impl.function(*(arguments[name] for name in impl.argnames))
                except KeyboardInterrupt:
                    raise
                except BaseException:
                    return impl.plugin_name
                is_invalid = answer is not None and _validate(check, answer) is not None
                if effects.problem() is not None or is_invalid:
                    return impl.plugin_name
        return self._outermost(hook)

    def _outermost(self, hook: str) -> str:
        """The policy that has the last word on an answer, as far as one has."""
        impls = self.impls(hook)
        wrappers = [impl.plugin_name for impl in impls if impl.wrapper or impl.hookwrapper]
        return wrappers[0] if wrappers else "/".join(self.names)


def _given_its_own(impl: pluggy.HookImpl) -> Callable[..., Any]:
    """An implementation that is given what its own policy has bound, and not that of others.

    pluggy gives all implementations the same arguments.
    """
    function, policy, place = impl.function, impl.plugin, impl.argnames.index("bound")

    @wraps(function)
    def call(*arguments: Any) -> Any:
        own = arguments[place].of(policy)
        return function(*arguments[:place], own, *arguments[place + 1 :])

    return call


def _place(hook: str, layer_idx: int | None) -> str:
    return f"{hook}()" if layer_idx is None else f"{hook}() at layer {layer_idx}"


def _validate(check: Check, answer: object) -> str | None:
    """Run a check; an answer on which the check itself fails is invalid."""
    try:
        return check(answer)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return f"returned {type_name(answer)}, which cannot be checked: {error_summary(error)}"


class _PluginManager(pluggy.PluginManager):
    """Registers hook implementations of policies and specs.

    Skips names with two leading underscores, which pluggy would inspect at some cost, and the
    hooks that a policy lists in ``inactive_hooks``.

    Attributes:
        inactive_hooks: Those of the policy that is registered next.
    """

    inactive_hooks: Sequence[str] = ()

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        if name.startswith("__"):
            return None
        if hook_options(inspect.getattr_static(plugin, name, None)) is None:
            return None  # older releases of pluggy would run properties
        opts = super().parse_hookimpl_opts(plugin, name)
        if opts is None or (opts.get("specname") or name) in self.inactive_hooks:
            return None
        return opts

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)
