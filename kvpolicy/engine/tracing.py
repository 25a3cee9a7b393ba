"""Recording hook calls: who was asked what about whom, who answered, and how long it took.

    with recording(engine) as trace:
        results = engine.generate(prompts).results()
    for call in trace.calls:
        print(call.hook, call.layer, call.answered_by, call.answer, call.us)

Outside of such a block nothing of this is in a run's way, and inside of it tokens are the same.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import attrs
import pluggy
import torch
from torch import Tensor

from kvpolicy.engine.hookcall import HookCall, Left, describe, rows_leaving
from kvpolicy.engine.stopwatch import ImplTimer
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks.manager import HOOKS

if TYPE_CHECKING:
    from kvpolicy.engine.engine import Engine

# `allocate` is asked when a plan is resolved, before there is an engine.
_RECORDED = tuple(hook for hook in HOOKS if hook != "allocate")


@contextmanager
def recording(
    engine: "Engine",
    *,
    hooks: Collection[str] | None = None,
    layers: Collection[int] | None = None,
    kept: bool = False,
    last: int | None = None,
    on_call: Callable[[HookCall], None] | None = None,
) -> "Iterator[Trace]":
    """Record the hook calls of an engine's runs for the length of a block.

    Args:
        engine: The engine.
        hooks: Record these hooks only.
        layers: Record calls about these layers only, counted from 0.
        kept: Whether to note which rows leave at a compaction, and what their tokens say.
        last: Keep no more than the last so many calls; totals are of all.
        on_call: Is given each call as soon as it is done.

    Yields:
        The trace, which grows.

    Raises:
        KVPolicyError: There is no such hook or layer, or the engine is being recorded already.
    """
    wanted = tuple(_RECORDED if hooks is None else hooks)
    unknown = [hook for hook in wanted if hook not in _RECORDED]
    if unknown:
        msg = f"there is no hook '{unknown[0]}' to record; the hooks are {', '.join(_RECORDED)}"
        raise KVPolicyError(msg)
    last_layer = len(engine.stacks) - 1
    outside = [layer for layer in sorted(layers or ()) if not 0 <= layer <= last_layer]
    if outside:
        msg = f"there is no layer {outside[0]} to record; the model has layers 0 to {last_layer}"
        raise KVPolicyError(msg)
    trace = Trace(engine, wanted, layers, kept=kept, last=last, on_call=on_call)
    with ExitStack() as watched:
        for stack in dict.fromkeys([*engine.stacks, engine.scheduling]):
            watched.enter_context(stack.listening(trace))
        try:
            yield trace
        finally:
            trace.end()


@attrs.frozen
class Total:
    """What one policy's part in one hook came to.

    Attributes:
        hook: The hook.
        policy: The policy.
        calls: Times it was asked.
        total_ms: Milliseconds in all.
        p50_us: Microseconds that half of the calls did not exceed.
        p95_us: Microseconds that 95 % of the calls did not exceed.
        share: Part of the time that the recording took.
    """

    hook: str
    policy: str
    calls: int
    total_ms: float
    p50_us: float
    p95_us: float
    share: float


class Trace:
    """Hook calls as they are made; see `recording`.

    Attributes:
        calls: The calls recorded, or the last of them, if only so many are kept.
        num_calls: How many were recorded.
    """

    def __init__(
        self,
        engine: "Engine",
        hooks: Collection[str],
        layers: Collection[int] | None,
        *,
        kept: bool,
        last: int | None,
        on_call: Callable[[HookCall], None] | None,
    ) -> None:
        self.calls: deque[HookCall] = deque(maxlen=last)
        self.num_calls = 0
        self._engine = engine
        self._hooks, self._layers, self._kept, self._on_call = hooks, layers, kept, on_call
        self._open: list[ImplTimer] | None = None  # parts of the call under way
        self._device: torch.device | None = None
        self._us: dict[tuple[str, str], list[float]] = {}
        self._begun = time.perf_counter()
        self._ended: float | None = None

    def end(self) -> None:
        """Stop the clock."""
        self._ended = time.perf_counter()

    def totals(self) -> list[Total]:
        """What each policy's part in each hook came to, in the order of the hooks."""
        elapsed_us = 1e6 * ((self._ended or time.perf_counter()) - self._begun)
        found = []
        for (hook, policy), us in sorted(self._us.items(), key=lambda one: HOOKS.index(one[0][0])):
            ranked, total = sorted(us), sum(us)
            p50, p95 = (ranked[-(-len(us) * percent // 100) - 1] for percent in (50, 95))
            found.append(
                Total(hook, policy, len(us), total / 1e3, p50, p95, share=total / elapsed_us)
            )
        return found

    # What relays call

    def question(self, hook: str, arguments: dict[str, Any], ask: Callable[[], Any]) -> Any:
        """Pass a question on to the policies, and note what becomes of it."""
        layer = arguments.get("layer_idx")
        if hook not in self._hooks or (self._layers is not None and layer not in self._layers):
            return ask()
        # A policy that asks its parts is itself being asked.
        outer = self._open, self._device
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        parts: list[ImplTimer] = []
        self._open = parts
        answer, error = None, None
        start = time.perf_counter()
        try:
            answer = ask()
        except BaseException as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            us = (time.perf_counter() - start) * 1e6
            self._open, self._device = outer
            self._note(hook, arguments, parts, answer, us, error)
        return answer

    def timed(self, impl: pluggy.HookImpl) -> Callable[..., Any]:
        """The same implementation, but what it takes and answers is noted."""
        function: Callable[..., Any] = impl.function

        def answers(*arguments: Any, **others: Any) -> Any:
            part = self._begin(impl)
            with part:
                part.answer = function(*arguments, **others)
            return part.answer

        def wraps_answers(*arguments: Any, **others: Any) -> Generator[None, Any, Any]:
            part, generator = self._begin(impl), function(*arguments, **others)
            with part:
                next(generator)
            try:
                answer = yield
            except BaseException as error:
                part.passes_on = error
                go_on = partial(generator.throw, error)
            else:
                go_on = partial(generator.send, answer)
            try:
                with part:
                    go_on()
            except StopIteration as stop:
                part.answer = stop.value
                return stop.value
            yield  # a second time, as it did: pluggy refuses that

        is_wrapper = impl.wrapper or impl.hookwrapper
        return wraps(function)(wraps_answers if is_wrapper else answers)

    def _begin(self, impl: pluggy.HookImpl) -> ImplTimer:
        part = ImplTimer(impl, self._device)
        # Not noted: calls of hooks that are not recorded; and those that find out who has
        # answered wrongly, for which every policy is asked once more.
        if self._open is not None and all(part.impl is not other.impl for other in self._open):
            self._open.append(part)
        return part

    def _note(
        self,
        hook: str,
        arguments: dict[str, Any],
        parts: list[ImplTimer],
        answer: object,
        us: float,
        error: str | None,
    ) -> None:
        about = self._engine.asking.sequences
        named = {name for part in parts for name in part.impl.argnames}
        described = {name: describe(arguments[name]) for name in arguments if name in named}
        by = [part.name for part in parts if part.answer is not None and not part.is_wrapper]
        left: tuple[Left, ...] = ()
        if self._kept and hook == "select" and isinstance(answer, Tensor):
            left = rows_leaving(arguments["positions"], answer, about, self._engine.tokenizer)
        call = HookCall(
            number=self.num_calls,
            hook=hook,
            layer=arguments.get("layer_idx"),
            requests=tuple(sequence.id for sequence in about),
            tokens=tuple(len(sequence.tokens) for sequence in about),
            arguments={name: value for name, value in described.items() if value is not None},
            answered_by="+".join([*by, *(p.name for p in parts if p.is_wrapper)]) if by else None,
            answer=describe(answer),
            us=us,
            parts=tuple(part.done() for part in parts),
            error=error,
            left=left,
        )
        for part in parts:
            self._us.setdefault((hook, part.name), []).append(part.us)
        self.num_calls += 1
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)
