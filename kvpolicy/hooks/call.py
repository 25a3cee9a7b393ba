"""`HookCall`: one call of one hook, from the first policy to the answer.

Wrappers come first: each runs to its ``yield``, gets the answer of what it wraps, or the error,
and answers in its place. Then the others are called in order: the first answer counts, or all of
them do, as the hook's specification says. ``None`` is no answer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import pluggy

from kvpolicy.hooks.side_effects import SideEffects

_ENDED = object()


@attrs.define(eq=False)
class HookCall:
    """Calls implementations of one hook, and remembers which policy did what.

    Attributes:
        impls: The implementations in calling order.
        answers: The answer of each implementation, the innermost first.
        raiser: The implementation whose code has raised the last error.
        change: The implementation that has changed what it must leave as it is, and the problem.
    """

    impls: Sequence[pluggy.HookImpl]
    _arguments: Mapping[str, Any]
    _first_result: bool
    _timed: Mapping[pluggy.HookImpl, Callable[..., Any]]  # to be called in their place
    _effects: SideEffects = attrs.field(init=False)
    answers: list[tuple[pluggy.HookImpl, object]] = attrs.field(factory=list, init=False)
    raiser: pluggy.HookImpl | None = attrs.field(default=None, init=False)
    change: tuple[pluggy.HookImpl, str] | None = attrs.field(default=None, init=False)

    def run(self) -> Any:
        """The answer, or whatever a policy raises."""
        named = (name for impl in self.impls for name in impl.argnames)
        self._effects = SideEffects({name: self._arguments[name] for name in named})
        return self._answer(0)

    def _answer(self, index: int) -> Any:
        """The answer of the implementations from one on."""
        answers = []
        for impl in self.impls[index:]:
            if impl.wrapper:
                return self._wrapped(impl, index + 1)
            try:
                answer = self._run(impl, self._started, impl)
            except BaseException:
                self.raiser = impl
                raise
            if answer is None:
                continue
            self.answers.append((impl, answer))
            if self._first_result:
                return answer
            answers.append(answer)
        return None if self._first_result else answers

    def _wrapped(self, wrapper: pluggy.HookImpl, index: int) -> Any:
        """The answer of a wrapper around the implementations from one on."""
        answer, error = None, None
        try:
            generator = self._started(wrapper)
            if self._run(wrapper, next, generator, _ENDED) is _ENDED:
                msg = "the wrapper has not yielded"
                raise RuntimeError(msg)
        except BaseException:
            self.raiser = wrapper
            raise
        try:
            answer = self._answer(index)
        except BaseException as caught:
            error = caught
        try:
            if error is None:
                self._run(wrapper, generator.send, answer)
            else:
                self._run(wrapper, generator.throw, error)
            generator.close()
            msg = "the wrapper has yielded twice"
            raise RuntimeError(msg)
        except StopIteration as end:
            self.answers.append((wrapper, end.value))
            return end.value
        except BaseException as raised:
            if not _is_passed_on(error, raised):
                self.raiser = wrapper
                raise
        assert error is not None
        raise error

    def _started(self, impl: pluggy.HookImpl) -> Any:
        """What a function answers; of a wrapper that is a generator, none of whose code has run."""
        function = self._timed.get(impl, impl.function)
        return function(*[self._arguments[name] for name in impl.argnames])

    def _run(self, impl: pluggy.HookImpl, code: Callable[..., Any], *given: Any) -> Any:
        """Run code of one policy, and see what it has changed."""
        try:
            return code(*given)
        finally:
            problem = self._effects.problem()
            if problem is not None and self.change is None:
                self.change = impl, problem


def _is_passed_on(error: BaseException | None, raised: BaseException) -> bool:
    """Whether an error has passed through a generator."""
    if isinstance(error, StopIteration) and isinstance(raised, RuntimeError):
        return raised.__cause__ is error  # Python puts it into a RuntimeError
    return raised is error
