"""Decode steps on a CPU without the Python of the model: modules that call modules.

A step of a small model spends an eighth of its time there, more on a busy machine. So a step
that has run some times is recorded as the operators that it runs (`kvpolicy.model.fused.record`),
and these are run from then on, on tensors at the same addresses. With plain weights, they are the
same operators in the same order: numbers do not change, to the last bit.

With packed weights, whose products are rounded in another order anyway, groups of operators become
one each (`kvpolicy.model.fused`): norms with the sum before them, rotations, gates.

What a recording cannot know of, it must not outlive: before each step the modules of the model are
looked at, as are the addresses of its weights and of the cache.
"""

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from kvpolicy.cache.static_step import StaticStep
from kvpolicy.model.fused.record import NotRecordableError, record
from kvpolicy.model.fused.step import Output, fused
from kvpolicy.model.seen import Seen
from kvpolicy.model.static_forward import module_of, static_forward

# Recording takes as long as some tens of steps.
STEPS_BEFORE = 64


class RecordedSteps:
    """Runs static steps of one batch on a CPU, those that come often from recordings.

    Attributes:
        problem: Why steps are not recorded; ``None``: they are, or none came often enough yet.
        fuses: Whether groups of operators become one, which changes the order of sums.
        waits: Steps that a batch of one size runs as they are before it is recorded.
        num_replayed: Steps that were run from recordings.
    """

    problem: str | None = None
    num_replayed: int = 0

    def __init__(self, *, fuses: bool = False) -> None:
        self.fuses = fuses
        self.waits = STEPS_BEFORE
        self._programs: dict[tuple[object, ...], Callable[[], Output]] = {}
        self._num_steps: Counter[tuple[object, ...]] = Counter()
        self._seen: Seen | None = None

    def __call__(self, call: Callable[..., Any], given: Any) -> Output:
        """As `static_forward`."""
        if self.problem is not None:
            return static_forward(call, given)
        step: StaticStep = given.step
        seen = self._seen
        if self._programs and not (seen and seen.holds(module_of(call), step.addresses)):
            self.forget()
        # A process that was forked lacks the threads that a recording may ask for.
        kind = (os.getpid(), step.width, given.draws, given.wants_states, *step.drawn_by)
        program = self._programs.get(kind)
        if program is None:
            self._num_steps[kind] += 1
            if self._num_steps[kind] <= self.waits or not self._record(kind, call, given):
                return static_forward(call, given)
            program = self._programs[kind]
        self.num_replayed += 1
        return program()

    def forget(self) -> None:
        """Record every step again, because what was recorded is not what runs now."""
        self._programs.clear()
        self._seen = None

    def _record(self, kind: tuple[object, ...], call: Callable[..., Any], given: Any) -> bool:
        """Record a step in which no slot takes part; whether that was possible."""
        step: StaticStep = given.step

        def run() -> Output:
            return static_forward(call, given)

        with step.idle(step.width):
            program = self._fused(run) if self.fuses else None
            program = program or self._recorded(run)
        if program is None:
            return False
        if self._seen is None:
            self._seen = Seen(module_of(call), step.addresses)
        self._programs[kind] = program
        return True

    def _fused(self, run: Callable[[], Output]) -> Callable[[], Output] | None:
        """The step in fewer kernels, if that can be had."""
        found = fused(run, binds=True)
        return found.run if found.problem is None else None

    def _recorded(self, run: Callable[[], Output]) -> Callable[[], Output] | None:
        """The step as it is; ``None``: it cannot be recorded."""
        try:
            recording = record(run)
            program = recording.program()
            is_equal = torch.equal(program()[0], recording.output[0])
        except NotRecordableError as error:
            self.problem = str(error)
            return None
        if not is_equal:
            self.problem = "other numbers would be computed"
            return None
        return program
