"""`HookManager`: asks the policies of one stack, and names the one that fails.

What happens when a policy raises, or answers wrongly: `HookManager._checked` says it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import pluggy
from torch import Tensor

from kvpolicy.errors import (
    HookError,
    HookResultError,
    KVPolicyError,
    error_summary,
    error_text,
    type_name,
)
from kvpolicy.hooks.call import HookCall
from kvpolicy.hooks.checks import ValueCheck
from kvpolicy.hooks.declarations import FIRST_RESULT, REFERENCE
from kvpolicy.hooks.defaults import Defaults
from kvpolicy.hooks.late_checks import LateChecks
from kvpolicy.hooks.registration import register

Check = Callable[[object], str | None]


class HookListener(Protocol):
    """Receives every hook call of a stack while it listens."""

    def call_hook(self, hook: str, arguments: dict[str, Any], ask: Callable[[], Any]) -> Any:
        """Call ``ask`` and return its answer."""

    def timed(self, impl: pluggy.HookImpl) -> Callable[..., Any]:
        """A function that is called in place of an implementation, and calls it."""


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
        registered = register(policies, owner)
        self.declared = registered.declared
        self._impls = registered.impls
        self._of_policies = {
            hook: [impl for impl in impls if not isinstance(impl.plugin, Defaults)]
            for hook, impls in self._impls.items()
        }
        self._listener: HookListener | None = None
        self._timed: Mapping[pluggy.HookImpl, Callable[..., Any]] = {}

    @property
    def is_recorded(self) -> bool:
        """Whether a listener receives the calls."""
        return self._listener is not None

    def impls(self, hook: str) -> list[pluggy.HookImpl]:
        """Implementations of a hook in calling order, without the default."""
        return self._of_policies[hook]

    @contextmanager
    def listening(self, listener: HookListener) -> Iterator[None]:
        """Pass every hook call to a listener inside a ``with`` block.

        Raises:
            KVPolicyError: Another listener is active.
        """
        if self._listener is not None:
            msg = "the engine is being recorded already; one recording at a time is possible"
            raise KVPolicyError(msg)
        self._listener = listener
        self._timed = {
            impl: listener.timed(impl) for impls in self._impls.values() for impl in impls
        }
        try:
            yield
        finally:
            self._listener, self._timed = None, {}

    def ask(
        self,
        hook: str,
        layer_idx: int | None,
        check: Check,
        *,
        impls: Sequence[pluggy.HookImpl] | None = None,
        optional: bool = False,
        late: LateChecks | None = None,
        **arguments: Any,
    ) -> Any:
        """Call one hook and check the answer.

        Args:
            hook: Name of the hook.
            layer_idx: The layer, for hooks that are called per layer.
            check: Returns what is wrong with an answer, or ``None``.
            impls: The implementations to call, in calling order; ``None``: all.
            optional: Whether ``None`` is a valid answer.
            late: Keeps the answer for a later check of its values; ``None``: they are checked now.
            arguments: Arguments that policies may name.

        Raises:
            HookError: A policy raises.
            HookResultError: An answer violates the contract.
        """
        if layer_idx is not None:
            arguments["layer_idx"] = layer_idx
        called = self._impls[hook] if impls is None else impls
        call = HookCall(called, arguments, hook in FIRST_RESULT, self._timed)
        if self._listener is None:
            return self._checked(hook, layer_idx, call, check, optional, late)
        ask = partial(self._checked, hook, layer_idx, call, check, optional, late)
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
            call = HookCall([impl], arguments, True, self._timed)
            ask = partial(self._checked, hook, layer_idx, call, check, False, None)
            listener = self._listener
            answers.append(ask() if listener is None else listener.call_hook(hook, arguments, ask))
        return answers

    def _checked(
        self,
        hook: str,
        layer_idx: int | None,
        call: HookCall,
        check: Check,
        optional: bool,
        late: LateChecks | None,
    ) -> Any:
        """The checked answer to a call; with ``late`` its values are not checked yet.

        What a policy raises becomes a `HookError` that names it. An answer that is wrong becomes a
        `HookResultError` that names the innermost policy whose own answer is wrong.
        """
        now = check.structure if late is not None and isinstance(check, ValueCheck) else check
        try:
            answer = call.run()
        except (KVPolicyError, KeyboardInterrupt):
            raise  # an error of a part names that part
        except BaseException as error:
            raise self._error(hook, layer_idx, call, error) from error
        is_right = (optional and answer is None) or _is_default(call)
        problem = None if is_right else _validate(now, answer)
        if problem is not None:
            culprit = _culprit(call, lambda own: _validate(now, own))
            raise self._result_error(hook, layer_idx, culprit, problem)
        if call.change is not None:
            raise self._result_error(hook, layer_idx, *call.change)
        if not is_right and late is not None and isinstance(check, ValueCheck):
            self._check_later(hook, call, answer, check, late)
        return answer

    def _check_later(
        self, hook: str, call: HookCall, answer: object, check: ValueCheck, late: LateChecks
    ) -> None:
        """Keep an answer, of which the host knows all but the values."""
        flag = check.fault(answer)
        if flag is None:
            return

        def problem_of(answer: object, entries: slice) -> str | None:
            some = answer[entries] if isinstance(answer, Tensor) else answer
            return check.structure(answer) or check.of(entries).values(some)

        def recheck(layer_idx: int, entries: slice) -> None:
            problem = problem_of(answer, entries)
            if problem is not None:
                culprit = _culprit(call, lambda own: problem_of(own, entries))
                raise self._result_error(hook, layer_idx, culprit, problem)

        late.add(flag, recheck)

    def _error(
        self, hook: str, layer_idx: int | None, call: HookCall, error: BaseException
    ) -> HookError:
        raiser, reason = self._name(call.raiser), error_text(error)
        msg = (
            f"policy '{raiser}'{self.owner} raised {type_name(error)} in {_place(hook, layer_idx)}"
        )
        return HookError(
            f"{msg}: {reason}" if reason else msg,
            summary=msg,
            policy=raiser,
            hook=hook,
            layer_idx=layer_idx,
        )

    def _result_error(
        self, hook: str, layer_idx: int | None, culprit: pluggy.HookImpl | None, problem: str
    ) -> HookResultError:
        policy, where = self._name(culprit), _place(hook, layer_idx)
        who = f"policy '{policy}'{self.owner}"
        return HookResultError(
            f"{who} {problem}, in {where}. See {REFERENCE}#{hook}",
            summary=f"{who} gave an invalid answer in {where}",
            policy=policy,
            hook=hook,
            layer_idx=layer_idx,
        )

    def _name(self, impl: pluggy.HookImpl | None) -> str:
        return "/".join(self.names) if impl is None else impl.plugin_name


def _is_default(call: HookCall) -> bool:
    """Whether the answer is that of the defaults: it is right, and launches nothing to show it."""
    return bool(call.answers) and isinstance(call.answers[-1][0].plugin, Defaults)


def _culprit(call: HookCall, problem_of: Check) -> pluggy.HookImpl | None:
    """The innermost implementation whose own answer is wrong; ``None``: nobody knows."""
    wrong = (impl for impl, own in call.answers if problem_of(own) is not None)
    return next(wrong, call.impls[0] if len(call.impls) == 1 else None)


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
