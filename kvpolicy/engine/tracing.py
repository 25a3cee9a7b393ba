"""Recording of hook calls: arguments, answers, and the time of each policy.

    with recording(engine) as trace:
        results = engine.generate(prompts).results()
    for call in trace.calls:
        print(call.hook, call.layer, call.answered_by, call.answer, call.us)

A recording does not change the tokens, and a run that is not recorded does not pay for it.
"""

import time
from collections import abc, deque
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import attrs
import numpy as np
import pluggy
import torch
from torch import Tensor

from kvpolicy.engine.engine import Engine
from kvpolicy.engine.requests.detokenize import decode_after
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.hooks.checks import mask_of
from kvpolicy.hooks.declarations import HOOKS
from kvpolicy.hooks.timing import synchronize
from kvpolicy.state import Lookahead, WaitingRequest

# The others are called before there is an engine that can be recorded.
_RECORDED = tuple(hook for hook in HOOKS if hook not in ("allocate", "bind"))


_DESCRIBED = (Tensor, WaitingRequest, Lookahead, dict, list, tuple, bool, int, float, str)

# Records


@attrs.frozen
class TensorInfo:
    """Dtype, shape and device of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    device: str

    def __str__(self) -> str:
        device = "" if self.device == "cpu" else f" on {self.device}"
        return f"{self.dtype}{list(self.shape)}{device}"


@attrs.frozen
class ImplCall:
    """The call of one policy's implementation of a hook.

    Attributes:
        policy: Name of the policy.
        us: Microseconds; of a wrapper, without the implementations that it wraps.
        wrapper: Whether it wraps the answers of others.
        answer: Its answer, described; ``None`` for no opinion.
        error: The error it raised, as text.
    """

    policy: str
    us: float
    wrapper: bool
    answer: object = None
    error: str | None = None


@attrs.frozen
class EvictedRows:
    """Rows that a compaction removes from one sequence in one layer.

    Attributes:
        request: Number of the request in its run.
        heads: KV heads from which exactly these rows are removed.
        ranges: First and last position of each range of consecutive rows.
        texts: The text of each range, if the engine has a tokenizer.
    """

    request: int
    heads: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    texts: tuple[str, ...] | None

    @property
    def num_rows(self) -> int:
        """Rows removed from each of the heads."""
        return sum(last - first + 1 for first, last in self.ranges)


@attrs.frozen
class HookCall:
    """One hook call.

    Attributes:
        number: Its index among all calls of the recording.
        hook: The hook.
        layer: The layer; ``None`` for hooks that are not called for a layer.
        requests: Numbers of the requests, in the order of the batch axis.
        tokens: Tokens that each of them has generated.
        arguments: Arguments that some implementation names: tensors as `TensorInfo`, numbers
            as they are.
        answered_by: Policies that answered; ``None`` if none did.
        answer: The answer after all wrappers, described like the arguments.
        us: Microseconds in all, including the check of the answer.
        parts: The call of each implementation, in the order in which they were called.
        error: Why the call failed, if it did.
        left: Rows that are removed, for `select`, if the recording includes them.
    """

    number: int
    hook: str
    layer: int | None
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    arguments: abc.Mapping[str, object]
    answered_by: str | None
    answer: object
    us: float
    parts: tuple[ImplCall, ...]
    error: str | None = None
    left: tuple[EvictedRows, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return attrs.asdict(self)


@attrs.frozen
class Total:
    """All calls of one policy's implementation of one hook.

    Attributes:
        hook: The hook.
        policy: The policy.
        calls: Number of calls.
        total_ms: Milliseconds in all.
        p50_us: Median of the microseconds of a call.
        p95_us: 95th percentile of the microseconds of a call.
        share: Fraction of the duration of the recording.
    """

    hook: str
    policy: str
    calls: int
    total_ms: float
    p50_us: float
    p95_us: float
    share: float


# Recording


@contextmanager
def recording(
    engine: Engine,
    *,
    hooks: abc.Collection[str] | None = None,
    layers: abc.Collection[int] | None = None,
    kept: bool = False,
    last: int | None = None,
    on_call: abc.Callable[[HookCall], None] | None = None,
) -> "abc.Iterator[Trace]":
    """Record the hook calls of an engine's runs within a block.

    Args:
        engine: The engine.
        hooks: Record these hooks only.
        layers: Record calls for these layers only, counted from 0.
        kept: Whether to record which rows each compaction removes, and their text.
        last: Keep the last ``last`` calls only; totals are of all calls.
        on_call: Called with each record as soon as it is complete.

    Yields:
        The trace, which grows.

    Raises:
        KVPolicyError: There is no such hook or layer, or the engine is recorded already.
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
    trace = Trace(engine, wanted, layers, kept, on_call, deque(maxlen=last))
    with ExitStack() as listening:
        for stack in dict.fromkeys([*engine.stacks, engine.scheduling]):
            listening.enter_context(stack.listening(trace))
        try:
            yield trace
        finally:
            trace.end()


@attrs.define(eq=False)
class Trace:
    """The hook calls of a recording, and the listener that records them.

    Attributes:
        calls: The recorded calls, or the last of them.
        num_calls: Number of recorded calls.
    """

    _engine: Engine
    _hooks: abc.Collection[str]
    _layers: abc.Collection[int] | None
    _kept: bool
    _on_call: abc.Callable[[HookCall], None] | None
    calls: deque[HookCall]
    num_calls: int = 0
    _parts: "list[_Part] | None" = None  # of the current call
    _device: torch.device | None = None  # of the current call
    _us: dict[tuple[str, str], list[float]] = attrs.field(factory=dict)
    _started: float = attrs.field(factory=lambda: time.perf_counter())
    _ended: float | None = None

    def end(self) -> None:
        """End the recording; `Total.share` refers to the time until now."""
        self._ended = time.perf_counter()

    def totals(self) -> list[Total]:
        """Totals by hook and policy, in the order of the hooks."""
        elapsed_us = 1e6 * ((self._ended or time.perf_counter()) - self._started)
        totals = []
        for (hook, policy), us in sorted(self._us.items(), key=lambda one: HOOKS.index(one[0][0])):
            p50, p95 = np.percentile(us, [50, 95], method="inverted_cdf").tolist()
            total = sum(us)
            totals.append(Total(hook, policy, len(us), total / 1e3, p50, p95, total / elapsed_us))
        return totals

    def call_hook(self, hook: str, arguments: dict[str, Any], ask: abc.Callable[[], Any]) -> Any:
        """Call a hook and record it; called by the hook manager."""
        layer = arguments.get("layer_idx")
        if hook not in self._hooks or (self._layers is not None and layer not in self._layers):
            return ask()
        # A policy may call its parts from within a hook: calls are nested.
        outer = self._parts, self._device
        tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
        self._device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        parts: list[_Part] = []
        self._parts = parts
        answer, error = None, None
        start = time.perf_counter()
        try:
            answer = ask()
        except BaseException as caught:
            error = str(caught) or type(caught).__name__
            raise
        finally:
            us = (time.perf_counter() - start) * 1e6
            self._parts, self._device = outer
            self._record(hook, arguments, parts, answer, us, error)
        return answer

    def timed(self, impl: pluggy.HookImpl) -> abc.Callable[..., Any]:
        """Wrap an implementation so that its calls are timed; called by the hook manager."""
        function: abc.Callable[..., Any] = impl.function

        def call(*arguments: Any, **others: Any) -> Any:
            part = self._new_part(impl)
            part.answer = self._run(part, partial(function, *arguments, **others))
            return part.answer

        def call_wrapper(*arguments: Any, **others: Any) -> abc.Generator[None, Any, Any]:
            part, generator = self._new_part(impl), function(*arguments, **others)
            self._run(part, partial(next, generator))
            passes_on = None
            try:
                answer = yield
            except BaseException as error:
                passes_on = error
                resume = partial(generator.throw, error)
            else:
                resume = partial(generator.send, answer)
            try:
                self._run(part, resume, passes_on)
            except StopIteration as stop:
                part.answer = stop.value
                return stop.value
            yield  # the wrapper yielded twice: let pluggy report it

        return wraps(function)(call_wrapper if _is_wrapper(impl) else call)

    def _new_part(self, impl: pluggy.HookImpl) -> "_Part":
        part = _Part(impl)
        # Not recorded: hooks that are not selected, and the second calls by which the hook
        # manager finds the policy whose answer is wrong.
        if self._parts is not None and all(impl is not other.impl for other in self._parts):
            self._parts.append(part)
        return part

    def _run(
        self,
        part: "_Part",
        function: abc.Callable[[], Any],
        passes_on: BaseException | None = None,
    ) -> Any:
        """Run a policy's code; add its time, and note its error.

        ``passes_on`` is the error of another implementation, which a wrapper may let through.
        """
        synchronize(self._device)
        start = time.perf_counter()
        try:
            return function()
        except BaseException as error:
            # A wrapper ends with StopIteration.
            if error is not passes_on and not isinstance(error, StopIteration):
                part.error = error_summary(error)
            raise
        finally:
            synchronize(self._device)
            part.us += (time.perf_counter() - start) * 1e6

    def _record(
        self,
        hook: str,
        arguments: dict[str, Any],
        called: abc.Sequence["_Part"],
        answer: object,
        us: float,
        error: str | None,
    ) -> None:
        sequences = self._engine.errors.sequences
        named = {name for part in called for name in part.impl.argnames}
        described = {name: describe(arguments[name]) for name in arguments if name in named}
        parts = tuple(part.to_record() for part in called)
        answered = [part.policy for part in parts if part.answer is not None and not part.wrapper]
        wrappers = [part.policy for part in parts if part.wrapper]
        left: tuple[EvictedRows, ...] = ()
        if self._kept and hook == "select" and isinstance(answer, Tensor):
            tokenizer = self._engine.tokenizer
            left = evicted_rows(arguments["positions"], answer, sequences, tokenizer)
        call = HookCall(
            number=self.num_calls,
            hook=hook,
            layer=arguments.get("layer_idx"),
            requests=tuple(sequence.id for sequence in sequences),
            tokens=tuple(len(sequence.tokens) for sequence in sequences),
            arguments={name: value for name, value in described.items() if value is not None},
            answered_by="+".join([*answered, *wrappers]) if answered else None,
            answer=describe(answer),
            us=us,
            parts=parts,
            error=error,
            left=left,
        )
        for part in parts:
            self._us.setdefault((hook, part.policy), []).append(part.us)
        self.num_calls += 1
        self.calls.append(call)
        if self._on_call is not None:
            self._on_call(call)


@attrs.define(eq=False)
class _Part:
    """One call of an implementation while it runs; see `ImplCall`."""

    impl: pluggy.HookImpl
    us: float = 0.0
    answer: object = None
    error: str | None = None

    def to_record(self) -> ImplCall:
        """The call as a record."""
        is_wrapper = _is_wrapper(self.impl)
        answer = describe(self.answer)
        return ImplCall(self.impl.plugin_name, self.us, is_wrapper, answer, self.error)


def _is_wrapper(impl: pluggy.HookImpl) -> bool:
    return impl.wrapper or impl.hookwrapper


def describe(value: object) -> object:
    """A short description of an argument or answer; ``None`` if there is none."""
    if not issubclass(type(value), _DESCRIBED):  # `isinstance` would ask the object
        return None
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return TensorInfo(dtype, tuple(value.shape), str(value.device))
    if isinstance(value, WaitingRequest):
        return value.id
    if isinstance(value, dict):
        return {str(name): describe(one) for name, one in value.items()}
    if isinstance(value, Lookahead):
        return f"{value.num_tokens} {'greedy' if value.token_ids is None else 'given'} tokens"
    if isinstance(value, list | tuple):
        return [describe(one) for one in value]
    return value


def evicted_rows(
    positions: Tensor, keep: Tensor, sequences: abc.Sequence[Sequence], tokenizer: Any
) -> tuple[EvictedRows, ...]:
    """The rows that an answer to `select` removes; heads with equal rows are in one record.

    Args:
        positions: Positions of the rows held, ``[B, H_kv, T]``.
        keep: Indices of the rows that stay, ``[B, H_kv, K]``, or a mask ``[B, H_kv, T]``.
        sequences: The B sequences.
        tokenizer: The engine's tokenizer, if there is one.
    """
    removed = ~mask_of(keep, positions) & (positions >= 0)
    found = []
    for b, sequence in enumerate(sequences):
        heads_of: dict[tuple[int, ...], list[int]] = {}
        for head in range(positions.shape[1]):
            rows = tuple(positions[b, head][removed[b, head]].tolist())
            heads_of.setdefault(rows, []).append(head)
        for rows, heads in heads_of.items():
            ranges = _ranges(rows)
            texts = None
            if tokenizer is not None:
                texts = tuple(
                    decode_after(
                        tokenizer,
                        sequence.token_ids(0, first),
                        sequence.token_ids(first, last + 1),
                    )
                    for first, last in ranges
                )
            found.append(EvictedRows(sequence.id, tuple(heads), ranges, texts))
    return tuple(found)


def _ranges(rising: abc.Sequence[int]) -> tuple[tuple[int, int], ...]:
    """First and last number of each range of consecutive numbers."""
    rows = np.asarray(rising, dtype=np.int64)
    ranges = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
    return tuple((int(one[0]), int(one[-1])) for one in ranges if len(one))
