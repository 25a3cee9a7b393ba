"""`check_policy` finds and names every broken clause, and correct policies pass."""

import builtins
import json
import sys
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from broken_policies import BROKEN, Budget, Determinism
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.errors import KVPolicyError
from kvpolicy.testing import CLAUSES, ConformanceError, Trial, check_policy, state_machine

CASES = [(clause, policy) for clause, policies in BROKEN.items() for policy in policies]


def error_of(policy: Callable[[], object]) -> ConformanceError:
    with pytest.raises(AssertionError) as caught:
        check_policy(policy)
    assert isinstance(caught.value, ConformanceError)
    return caught.value


@pytest.mark.parametrize(("clause", "policy"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_a_broken_clause_is_named_with_an_example_that_fails(clause: str, policy: type) -> None:
    error = error_of(policy)
    assert error.clause == clause
    message = str(error)
    assert f"breaks the clause '{clause}': {CLAUSES[clause]}" in message
    assert all(part in message for part in ("expected: ", "came: ", "minimal example: "))
    assert f"Trial({policy.__name__}, " in message
    assert error.example is not None
    # A trial does not check knobs and building; a random policy need not fail again.
    if clause not in ("knobs", "building", "determinism"):
        with pytest.raises(ConformanceError):
            exec(error.example.code, {policy.__name__: policy})


def test_every_clause_has_a_policy_that_breaks_it() -> None:
    assert set(BROKEN) == set(CLAUSES)


@pytest.mark.parametrize("policy", [Budget, Determinism])
def test_the_search_for_a_smaller_example_is_limited(
    policy: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = []
    for limit in (2, 30):
        monkeypatch.setattr(state_machine, "_MAX_SHRINKS", limit)
        count = 0

        def factory() -> object:
            nonlocal count
            count += 1
            return policy()

        assert error_of(factory).clause == policy.__name__.lower()
        built.append(count)
    assert built[0] < built[1]


def test_an_example_is_minimal() -> None:
    example = error_of(Budget).example
    assert example is not None
    # A row more than the budget has to leave, and that is all it takes.
    assert example.setup == "budget=3"
    assert example.code.count("trial.arrive") == 1


@attrs.define(eq=False)
class Quiet:
    """Lets an observer's notes decide, and cleans up after itself: sound."""

    tracks = ("seen",)
    registers = ("tokens",)

    @hookimpl
    def observe(self, token_ids: Tensor, registers: Any, memory: Any) -> None:
        registers.of(self)["tokens"].add_(len(token_ids))
        notes = memory.of(self)[0]
        notes["sum"] = notes.get("sum", 0) + int(token_ids.sum())

    @hookimpl
    def score(self, positions: Tensor, tracks: Any, memory: Any) -> Tensor:
        tracks["seen"] = tracks["seen"] + 1
        sums = torch.tensor([notes["sum"] for notes in memory.of(self)])
        return (positions * 7919 + sums[:, None, None]) % 101 + tracks["seen"]


@attrs.define(eq=False)
class Pushes:
    """Steers only, by a size that depends on the token."""

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor:
        return hidden_states * (token_ids % 3)[:, None].to(hidden_states.dtype) * 0.1


def test_a_sound_policy_passes_and_the_report_says_what_was_checked() -> None:
    report = check_policy(Quiet, max_examples=30)
    assert (report.policy, report.cases) == ("quiet", 30)
    assert {"tracks", "memory", "budget", "order"} <= set(report.clauses)
    assert set(report.skipped) == {"eviction", "schedule"}
    assert "policy 'quiet' keeps the contract: 18 clauses, 30 cases" in str(report)
    assert set(json.loads(json.dumps(report.to_dict()))["checked"]) == set(report.clauses)


def test_clauses_that_do_not_apply_are_skipped_and_the_report_says_why() -> None:
    report = check_policy(Pushes, max_examples=20)
    assert {"budget", "order", "protected", "tracks", "schedule"} <= set(report.skipped)
    assert "budget           skipped: it does not choose which rows stay" in str(report)
    assert {"answers", "nan", "read_only", "neighbours"} <= set(report.clauses)


def test_equal_seeds_find_equal_examples() -> None:
    examples = []
    for seed in (3, 3):
        with pytest.raises(ConformanceError) as caught:
            check_policy(Budget, seed=seed)
        examples.append(str(caught.value))
    assert examples[0] == examples[1]


def test_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    check_policy(Pushes, max_examples=3, progress=lambda *now: told.append(now))
    assert told == [(3, 3)]


def test_the_global_generator_is_left_as_it_was() -> None:
    before = torch.random.get_rng_state()
    check_policy(Pushes, max_examples=3)
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize(
    ("factory", "options", "says"),
    [
        (Pushes(), {}, "class"),
        (Pushes, {"knobs": {"a": 1}}, "lambda"),
        (Pushes, {"profile": "slow"}, "quick, ci, thorough"),
        (Pushes, {"max_examples": 0}, "max_examples=0"),
        ("nonesuch", {}, "nonesuch"),
        ("streaming", {"knobs": {"n_snik": 1}}, "n_sink"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_sentence(
    factory: Any, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(KVPolicyError, match=says) as caught:
        check_policy(factory, **options)
    assert not isinstance(caught.value, ConformanceError)


def test_without_hypothesis_a_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "hypothesis":
            raise ModuleNotFoundError(name=name)
        return honest(name, *rest, **more)

    monkeypatch.delitem(sys.modules, "kvpolicy.testing.state_machine", raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KVPolicyError, match=r"pip install 'kvpolicy\[testing\]'"):
        check_policy(Pushes)


def test_a_factory_that_always_gives_the_same_policy_is_found() -> None:
    one = Pushes()
    with pytest.raises(ConformanceError, match="a new policy each time"):
        check_policy(lambda: one)


def test_a_trial_may_be_told_step_by_step() -> None:
    trial = Trial("streaming", {"n_sink": 1}, budget=4, buffer=2, slots=2, kv_heads=2)
    trial.arrive(prompt=9, new=5)
    trial.arrive(prompt=1, new=4)
    trial.go(2)
    assert trial.unanswered == [0, 1]
    trial.cancel(0)
    trial.finish()
    assert trial.unanswered == []
