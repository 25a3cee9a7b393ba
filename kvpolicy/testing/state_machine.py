"""The state machine from which Hypothesis draws and shrinks cases."""

import gc
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
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

from kvpolicy.errors import KVPolicyError
from kvpolicy.testing.cases import (
    DTYPES,
    WHERE,
    Environment,
    PolicyFactory,
    least_budget,
    not_built,
)
from kvpolicy.testing.clauses import ConformanceError
from kvpolicy.testing.toy_model import KINDS, NUMBERS
from kvpolicy.testing.trial import Trial, explain, refusal

_MAX_STEPS = 6  # rules in one case
MAX_SHRINKS = 100  # cases run to make a failing case smaller

_few = st.integers(0, 4)
_setups = st.fixed_dictionaries(
    {
        "slots": st.integers(1, 3),
        "buffer": st.integers(1, 4),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 3),
        "head_dim": st.sampled_from([2, 3, 8]),
        "chunk": st.sampled_from([512, 1, 3, 5]),
        # Often float64: only there is every request compared with itself alone.
        "dtype": st.sampled_from(DTYPES[:1] * 5 + DTYPES),
        "numbers": st.sampled_from(NUMBERS),
        "where": st.sampled_from(WHERE),
        "beneath": st.booleans(),
        "protected": st.booleans(),
        # Where prompts are evicted, prefills are compacted, too.
        "prompt": st.sampled_from(["evict", "evict", "evict", "keep"]),
        "heads": st.sampled_from(["own", "shared"]),
        "model": st.sampled_from(KINDS[:1] * 2 + KINDS[1:]),
        "seed": st.integers(0, 9999),
    }
)
# Prompts as long as the slab, as the budget, or of one token, and a few tokens more.
_prompts = st.tuples(st.sampled_from(["slab", "budget", "one", "slab"]), _few)
_new = st.integers(1, 10)


class _ClauseBroken(Exception):  # noqa: N818 - a signal to Hypothesis
    """A trial failed. Each clause has a subclass: Hypothesis shrinks within one type of error."""


class _ShrinkLimitReached(KeyboardInterrupt):
    """Ends the search for smaller cases.

    Hypothesis has no setting for its length, and stops at once for a KeyboardInterrupt only.
    """


@lru_cache
def _broken(clause: str) -> type[_ClauseBroken]:
    return type(clause, (_ClauseBroken,), {})


def run_cases(
    factory: PolicyFactory,
    environment: Environment,
    *,
    num_cases: int,
    seed: int,
    checked: Counter[str],
    refused: dict[str, str],
) -> None:
    """Draw and run cases.

    Args:
        factory: Builds the policy.
        environment: What is the same in all cases.
        num_cases: How many cases.
        seed: Equal seeds draw equal cases.
        checked: Counts the checks of each clause.
        refused: Kinds of models that refuse the policy, with the sentence; others are added.

    Raises:
        ConformanceError: With a minimal example.
    """
    least = least_budget(factory.build())
    options: dict[str, Any] = {"environment": environment, "checked": checked}
    failures: list[tuple[Trial, ConformanceError]] = []
    not_begun: list[ConformanceError] = []
    shrinks = itertools.count()

    class Case(RuleBasedStateMachine):
        """One case: requests arrive in an engine, are decoded, and cancelled."""

        trial: Trial
        _has_ended = False

        @initialize(more=_few, setup=_setups, prompt=_prompts, new=_new)
        def begin(
            self, more: int, setup: dict[str, Any], prompt: tuple[str, int], new: int
        ) -> None:
            if failures and next(shrinks) == MAX_SHRINKS:
                raise _ShrinkLimitReached
            # Numbers that a policy draws from the global generator differ between requests,
            # but not when the case is run again.
            torch.manual_seed(setup["seed"])
            # Rows of prompts stay in layers whose heads have the budget for themselves only.
            shares = factory.is_ragged and setup["prompt"] == "evict"
            setup = setup if shares else setup | {"heads": "own"}
            try:
                self.trial = self._trial(more, setup)
            except ConformanceError as error:  # there is no trial to show
                broken = not_built(factory, error.expected, error.came, error.clause)
                not_begun.append(broken)
                raise
            self.arrive(prompt, new)

        @rule(prompt=_prompts, new=_new)
        def arrive(self, prompt: tuple[str, int], new: int) -> None:
            base, more = prompt
            setup = self.trial.setup
            # A prompt that stays is not in the budget, which the answer has to fill then.
            new += setup.budget if setup.prompt == "keep" else 0
            length = {"one": 1, "budget": setup.budget, "slab": setup.budget + setup.buffer}
            self._run("arrive", prompt=length[base] + more, new=new)

        @rule(steps=st.integers(1, 5))
        def go(self, steps: int) -> None:
            self._run("go", steps=steps)

        @rule(request=st.integers(0, 2), prompt=_prompts, new=_new)
        def cancel(self, request: int, prompt: tuple[str, int], new: int) -> None:
            if not self.trial.unanswered:
                self._run("go", steps=1)
            if self.trial.unanswered:
                unanswered = self.trial.unanswered
                self._run("cancel", request=unanswered[request % len(unanswered)])
                self.arrive(prompt, new)  # a later request, which must not be affected

        def teardown(self) -> None:
            if hasattr(self, "trial"):
                self._run("finish")

        def _trial(self, more: int, setup: dict[str, Any]) -> Trial:
            kind, sizes = setup["model"], {"budget": least + more, **setup}
            if kind != "attention" and kind not in refused:
                try:
                    return Trial(factory, **sizes, **options)
                except ConformanceError:
                    raise
                except KVPolicyError as error:
                    refused[kind] = f"refused: {error}"
            return Trial(factory, **sizes | {"model": "attention"}, **options)

        def _run(self, action: str, **arguments: int) -> None:
            if self._has_ended:
                return
            try:
                getattr(self.trial, action)(**arguments)
            except ConformanceError as error:
                self._has_ended = True
                kind, sentence = self.trial.setup.model, refusal(error)
                if kind != "attention" and sentence is not None:
                    refused[kind] = sentence
                    return
                failures.append((self.trial, error))
                raise _broken(error.clause) from error

    settings = hypothesis.settings(
        max_examples=num_cases,
        stateful_step_count=_MAX_STEPS,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
        suppress_health_check=list(hypothesis.HealthCheck),
        verbosity=hypothesis.Verbosity.quiet,
    )
    with undisturbed():
        try:
            try:
                run_state_machine_as_test(hypothesis.seed(seed)(Case), settings=settings)
            except (ConformanceError, hypothesis.errors.Flaky):
                if not_begun:
                    raise not_begun[0] from None
                raise
        except _ClauseBroken:
            # Hypothesis runs the minimal case last.
            raise explain(*failures[-1]) from failures[-1][1]
        except _ShrinkLimitReached:
            trial, error = _shortest(failures)
            torch.manual_seed(trial.setup.seed)
            reproduced = trial.repeat() is not None
            explained = explain(trial, error)
            raise (explained if reproduced else _not_reproducible(explained)) from error
        except hypothesis.errors.Flaky:
            raise _not_reproducible(explain(*failures[-1])) from failures[-1][1]


def _shortest(failures: list[tuple[Trial, ConformanceError]]) -> tuple[Trial, ConformanceError]:
    """The failure with the shortest example, of those that break the same clause as the first."""
    clause = failures[0][1].clause
    same_clause = [failure for failure in reversed(failures) if failure[1].clause == clause]
    return min(same_clause, key=lambda failure: len(failure[0].source()))


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run trials: quickly, and without a trace in torch's random state."""
    with torch.random.fork_rng(devices=[]), _one_thread(), _short_collections():
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: for tiny tensors, more of them are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _short_collections() -> Iterator[None]:
    """Exempt all present objects from garbage collections: a search for leaks collects often."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _not_reproducible(error: ConformanceError) -> ConformanceError:
    """The error of a case that fails in some runs only: the policy is not deterministic."""
    came = f"once: {error.came}; and when the same was run again: no failure"
    return ConformanceError("determinism", error.expected, came, error.policy, error.example)
