"""The relay of hooks between the engine and the policies of a stack.

pluggy asks the policy that was registered last first, and a wrapper runs around those
registered before it. So in ``["h2o", "protect"]`` protect wraps h2o, and the defaults are
asked when nobody else has answered.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import pluggy

from kvpolicy import hookspecs
from kvpolicy.errors import HookError, HookResultError, KVPolicyError, PolicyLoadError
from kvpolicy.hooks.defaults import Defaults
from kvpolicy.markers import PROJECT

Problem = Callable[[object], str | None]
_REFERENCE = "docs/reference/hooks.md"

# In the order in which the engine asks them.
HOOKS = tuple(name for name, value in vars(hookspecs).items() if hasattr(value, "kvpolicy_spec"))


class HookListener(Protocol):
    """Whoever wants to see questions and answers go by."""

    def question(self, hook: str, arguments: dict[str, Any], ask: Callable[[], Any]) -> Any:
        """Ask, and hand the answer on."""

    def timed(self, impl: pluggy.HookImpl) -> Callable[..., Any]:
        """What is to be called instead of an implementation, and calls it."""


class HookManager:
    """Passes a question to the policies, and blames whoever answers wrongly.

    Attributes:
        names: Names of the policies, in order.
        owner: What messages add to a name to tell whose part the policy is.
    """

    def __init__(self, policies: Sequence[tuple[str, object]], owner: str = "") -> None:
        """Register the policies; raises `PolicyLoadError` if one does not fit the hook specs."""
        self.owner = owner
        self.names = [name for name, _ in policies]
        self._watcher: HookListener | None = None
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(hookspecs)
        for place, (name, policy) in enumerate(policies):
            taken = self._manager.has_plugin(name)
            self._register(f"{name}#{place}" if taken else name, policy)
        # Last of all: of those that want to be asked last, pluggy asks the newest last.
        self._manager.register(Defaults(), "the defaults")

    def _register(self, name: str, policy: object) -> None:
        if type(policy).__eq__ is not object.__eq__:
            # pluggy looks policies up with ==, and tensors have no single truth value.
            msg = (
                f"policy '{name}'{self.owner} is compared by value; a policy is compared by "
                "identity, write @attrs.define(eq=False)"
            )
            raise PolicyLoadError(msg)
        try:
            self._manager.register(policy, name)
            self._manager.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            msg = f"policy '{name}'{self.owner} does not fit the hook specs: {_one_line(error)}"
            raise PolicyLoadError(msg) from error
        if not self._manager.get_hookcallers(policy):
            msg = (
                f"policy '{name}'{self.owner} implements no hook; decorate at least one method "
                f"with @kvpolicy.hookimpl, see {_REFERENCE}"
            )
            raise PolicyLoadError(msg)

    def impls(self, hook: str) -> list[pluggy.HookImpl]:
        """Implementations of a hook in the order they are called, defaults left out."""
        impls = getattr(self._manager.hook, hook).get_hookimpls()
        return [impl for impl in reversed(impls) if not isinstance(impl.plugin, Defaults)]

    def ask(
        self,
        hook: str,
        layer_idx: int | None,
        problem: Problem,
        *,
        optional: bool = False,
        **arguments: Any,
    ) -> Any:
        """Ask one question.

        Args:
            hook: Name of the hook.
            layer_idx: Layer it is about, if it is about one.
            problem: Says what is wrong with an answer, if anything is.
            optional: Whether no answer at all is fine.
            arguments: What policies may name.

        Raises:
            HookError: If a policy raises.
            HookResultError: If an answer breaks the contract.
        """
        if layer_idx is not None:
            arguments["layer_idx"] = layer_idx
        if self._watcher is None:
            return self._ask(hook, layer_idx, problem, optional, arguments)
        ask = partial(self._ask, hook, layer_idx, problem, optional, arguments)
        return self._watcher.question(hook, arguments, ask)

    @contextmanager
    def listening(self, watcher: HookListener) -> Iterator[None]:
        """Let a watcher see all questions and answers in a block.

        Raises:
            KVPolicyError: Somebody is watching already.
        """
        if self._watcher is not None:
            msg = "the engine is being recorded already; one recording at a time is possible"
            raise KVPolicyError(msg)
        callers = [getattr(self._manager.hook, hook) for hook in HOOKS]
        functions = [(impl, impl.function) for one in callers for impl in one.get_hookimpls()]
        self._watcher = watcher
        try:
            for impl, _ in functions:
                impl.function = watcher.timed(impl)
            yield
        finally:
            self._watcher = None
            for impl, function in functions:
                impl.function = function

    def _ask(
        self,
        hook: str,
        layer_idx: int | None,
        problem: Problem,
        optional: bool,
        arguments: dict[str, Any],
    ) -> Any:
        where = "" if layer_idx is None else f" at layer {layer_idx}"
        try:
            answer = getattr(self._manager.hook, hook)(**arguments)
        except KVPolicyError:
            raise
        except (Exception, SystemExit) as error:
            guilty = self._find_raiser(hook, error)
            said = f": {_one_line(error)}" if str(error) else ""
            msg = (
                f"policy '{guilty}'{self.owner} raised {type(error).__name__} in "
                f"{hook}(){where}{said}"
            )
            raise HookError(msg) from error
        if optional and answer is None:
            return None
        wrong = _looked_at(problem, answer)
        if wrong is None:
            return answer
        guilty = self._find_offender(hook, problem, arguments)
        msg = f"policy '{guilty}'{self.owner} {wrong}, in {hook}(){where}. See {_REFERENCE}#{hook}"
        raise HookResultError(msg)

    def _find_raiser(self, hook: str, error: BaseException) -> str:
        """The policy whose code the error went through."""
        codes = {inspect.unwrap(impl.function).__code__: impl for impl in self.impls(hook)}
        trace, guilty = error.__traceback__, "/".join(self.names)
        while trace is not None:
            impl = codes.get(trace.tb_frame.f_code)
            guilty = impl.plugin_name if impl is not None else guilty
            trace = trace.tb_next
        return guilty

    def _find_offender(self, hook: str, problem: Problem, arguments: dict[str, Any]) -> str:
        """The policy whose own answer is wrong, or else the outermost wrapper.

        Asks the policies once more, one by one: the run is lost already, and only now does
        it matter who said what. One that raises now is as good a suspect.
        """
        impls = self.impls(hook)
        for impl in impls:
            if not (impl.wrapper or impl.hookwrapper):
                try:
                    answer = impl.function(*(arguments[name] for name in impl.argnames))
                except Exception:
                    return impl.plugin_name
                if answer is not None and _looked_at(problem, answer) is not None:
                    return impl.plugin_name
        wrappers = [impl.plugin_name for impl in impls if impl.wrapper or impl.hookwrapper]
        return wrappers[0] if wrappers else "/".join(self.names)


def _looked_at(problem: Problem, answer: object) -> str | None:
    """What is wrong with an answer, if only that nobody can look at it."""
    try:
        return problem(answer)
    except Exception as error:
        return f"answered with {type(answer).__name__}, which cannot be checked: {_one_line(error)}"


class _Manager(pluggy.PluginManager):
    """Looks for hooks where they can be: what Python itself gives every object is none.

    pluggy looks at every attribute of a policy and of the specs, the long way; nine of ten
    begin with two underscores.
    """

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> Any:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
