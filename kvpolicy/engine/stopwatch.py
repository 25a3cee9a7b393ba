"""Measures what one policy does in one hook call, in one or two goes."""

import time
from types import TracebackType

import attrs
import pluggy
import torch

from kvpolicy.engine.hookcall import Part, describe
from kvpolicy.hooks.timing import wait_for


@attrs.define(eq=False)
class ImplTimer:
    """Runs inside its blocks. A wrapper has two: before the answer it wraps, and after it.

    Attributes:
        impl: The implementation.
        device: What to wait for at the ends of a block, so that the time is real.
        us: Microseconds so far.
        answer: What came of it.
        error: What it raised.
        passes_on: An error of somebody else that a wrapper is given and may let through.
    """

    impl: pluggy.HookImpl
    device: torch.device | None
    us: float = 0.0
    answer: object = None
    error: str | None = None
    passes_on: BaseException | None = None
    _start: float = 0.0

    @property
    def name(self) -> str:
        """Name of the policy."""
        return self.impl.plugin_name

    @property
    def is_wrapper(self) -> bool:
        """Whether it wraps others' answers."""
        return self.impl.wrapper or self.impl.hookwrapper

    def __enter__(self) -> None:
        wait_for(self.device)
        self._start = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is None:
            wait_for(self.device)
        self.us += (time.perf_counter() - self._start) * 1e6
        # A generator that is done raises StopIteration.
        if error is not None and error is not self.passes_on and kind is not StopIteration:
            self.error = f"{type(error).__name__}: {error}"

    def done(self) -> Part:
        """What there is to say of it."""
        return Part(self.name, self.us, self.is_wrapper, describe(self.answer), self.error)
