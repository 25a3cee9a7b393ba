"""The state machine: Hypothesis draws what arrives, goes on and is cancelled, and shrinks it."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from kvpolicy.testing.blame import explain
from kvpolicy.testing.clauses import ConformanceError
from kvpolicy.testing.maker import Maker
from kvpolicy.testing.setup import DTYPES, WHERE, World, least_budget
from kvpolicy.testing.toy import NUMBERS
from kvpolicy.testing.trial import Trial

_STEPS = 6  # rules in one case, at most

_few = st.integers(0, 4)
_setups = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 3),
        "buffer": st.integers(1, 4),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 3, 8]),
        "chunk": st.sampled_from([512, 1, 3, 5]),
        # In float64 sequences are compared with themselves alone; elsewhere noise would differ.
        "dtype": st.sampled_from(DTYPES[:1] * 5 + DTYPES),
        "numbers": st.sampled_from(NUMBERS),
        "where": st.sampled_from(WHERE),
        "beneath": st.booleans(),
        "pinned": st.booleans(),
        "seed": st.integers(0, 9999),
    }
)
# Prompts of one row, of the budget, and of the whole slab are the interesting ones.
_prompts = st.tuples(st.sampled_from(["slab", "budget", "nothing", "slab"]), _few)
_new = st.integers(1, 10)


# What Hypothesis may spend on making a failing case smaller; `shorten` does the rest.
_MOST_SHRINKING = 40
_MOST_SHRINKING_S = 5.0


class Found(Exception):  # noqa: N818 - no error of anybody's: it carries one out of Hypothesis
    """A failing trial, on its way through Hypothesis."""

    def __init__(self, trial: Trial, error: ConformanceError) -> None:
        super().__init__(str(error))
        self.trial, self.error = trial, error

    @property
    def size(self) -> tuple[int, int, int]:
        """The smaller, the better to read."""
        numbers = [number for _, arguments in self.trial.actions for number in arguments.values()]
        return len(self.trial.actions), len(self.trial.setup.words()), sum(numbers)


class _Enough(BaseException):
    """Small enough; no `Exception`, which Hypothesis would take for another failure."""


class _Best:
    """The smallest failing case so far, and the runs since the first."""

    def __init__(self) -> None:
        self.found: Found | None = None
        self.is_enough = False
        self._num_runs = 0
        self._since = 0.0

    def begin(self) -> None:
        """Count a run; ends the search when it has been long enough."""
        if self.found is None:
            return
        self._num_runs += 1
        took = time.perf_counter() - self._since
        if self._num_runs > _MOST_SHRINKING or took > _MOST_SHRINKING_S:
            self.is_enough = True
            raise _Enough

    def note(self, found: Found) -> None:
        """Keep it, if it is smaller."""
        if self.found is None:
            self._since = time.perf_counter()
        if self.found is None or found.size <= self.found.size:
            self.found = found


def run_round(
    maker: Maker, world: World, *, examples: int, seed: int, checked: Counter[str]
) -> None:
    """Draw so many cases.

    Args:
        maker: Builds the policy.
        world: What no case changes.
        examples: How many cases.
        seed: Equal seeds draw equal cases.
        checked: Where to count the clauses that were checked.

    Raises:
        ConformanceError: With a minimal example.
    """
    least, hooks = least_budget(maker.build()), maker.hooks()
    options: dict[str, Any] = {"world": world, "checked": checked, "hooks": hooks}
    best = _Best()

    class Serving(RuleBasedStateMachine):
        """One case: an engine is set up, and requests come and go."""

        trial: Trial
        _failed = False

        @initialize(more=_few, setup=_setups, prompt=_prompts, new=_new)
        def begin(self, more: int, setup: dict[str, Any], prompt: Any, new: int) -> None:
            best.begin()
            # Whatever a policy draws from the global generator differs between requests, and
            # is the same when the case is run again.
            torch.manual_seed(setup["seed"])
            self.trial = Trial(maker, budget=least + more, **setup, **options)
            self.arrive(prompt, new)

        @rule(prompt=_prompts, new=_new)
        def arrive(self, prompt: tuple[str, int], new: int) -> None:
            base, more = prompt
            setup = self.trial.setup
            length = {"nothing": 1, "budget": setup.budget, "slab": setup.budget + setup.buffer}
            self._do("arrive", prompt=length[base] + more, new=new)

        @rule(steps=st.integers(1, 5))
        def go(self, steps: int) -> None:
            self._do("go", steps=steps)

        @rule(request=st.integers(0, 2), prompt=_prompts, new=_new)
        def cancel(self, request: int, prompt: tuple[str, int], new: int) -> None:
            if not self.trial.unanswered:
                self._do("go", steps=1)
            if self.trial.unanswered:
                unanswered = self.trial.unanswered
                self._do("cancel", request=unanswered[request % len(unanswered)])
                self.arrive(prompt, new)  # the clause is about what comes after

        def teardown(self) -> None:
            if not self._failed and hasattr(self, "trial"):
                self._do("finish")

        def _do(self, action: str, **arguments: int) -> None:
            try:
                getattr(self.trial, action)(**arguments)
            except ConformanceError as error:
                self._failed = True
                found = Found(self.trial, error)
                best.note(found)
                raise found from error

    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=_STEPS,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    machine = hypothesis.seed(seed)(Serving)
    with torch.random.fork_rng(devices=[]), _one_thread():
        try:
            run_state_machine_as_test(machine, settings=settings)
        except (Found, _Enough, hypothesis.errors.Flaky) as error:
            # Hypothesis, too, calls it flaky when a search is broken off.
            assert best.found is not None
            told = explain(best.found.trial, best.found.error)
            is_fickle = isinstance(error, hypothesis.errors.Flaky) and not best.is_enough
            raise (_fickle(told) if is_fickle else told) from best.found.error


@contextmanager
def _one_thread() -> Iterator[None]:
    """The tensors are tiny: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _fickle(told: ConformanceError) -> ConformanceError:
    """A case that fails once and not again: the policy has a source of chance of its own."""
    came = f"once: {told.came}; and when the same was run again: no failure"
    return ConformanceError("determinism", told.expected, came, told.policy, told.example)
