"""Every invalid return value raises an error naming policy, hook, layer and value."""

from collections.abc import Callable, Generator
from typing import Any

import attrs
import pytest
import torch
from recorder import Scores, Selects
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.errors import HookError, HookResultError, PolicyLoadError
from kvpolicy.plan.spec import PolicySpec

BUDGET, BUFFER, NUM_KV_HEADS, HIDDEN = 8, 4, 2, 32
ROWS = BUDGET + BUFFER  # rows at every compaction
SHAPE = f"[1, {NUM_KV_HEADS}, {ROWS}]"


def run(*stack: object) -> None:
    plan = Plan.uniform(*stack, budget=BUDGET, buffer=BUFFER)
    Engine(shared_model(), plan=plan).generate([[1, 2, 3]], max_new_tokens=24).results()


def assert_named(message: str, *parts: str) -> None:
    for part in parts:
        assert part in message, f"{part!r} is missing in: {message}"


BAD_SCORES: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "one missing row": (lambda p: p[:, :, 1:].float(), f"[1, {NUM_KV_HEADS}, {ROWS - 1}]"),
    "no head axis": (lambda p: p[:, 0].float(), f"[1, {ROWS}]"),
    "broadcastable": (lambda p: p[:, :1].float(), f"[1, 1, {ROWS}]"),
    "an extra axis": (lambda p: p[..., None].float(), f"[1, {NUM_KV_HEADS}, {ROWS}, 1]"),
    "integers": (lambda p: p, "int64"),
    "booleans": (lambda p: p > 3, "bool"),
    "one NaN": (lambda p: p.float().masked_fill(p == 2, torch.nan), "NaN"),
    "a list": (lambda p: p.tolist(), "list"),
    "a number": (lambda p: 1.0, "float"),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("case", BAD_SCORES)
def test_bad_scores_raise(case: str) -> None:
    answer, got = BAD_SCORES[case]
    with pytest.raises(HookResultError) as caught:
        run(Scores(answer))
    assert_named(str(caught.value), "'scores'", "score()", "layer 0", got)
    if "shape" in str(caught.value):
        assert_named(str(caught.value), SHAPE)


def test_infinite_scores_are_allowed() -> None:
    run(Scores(lambda p: torch.where(p % 2 == 0, torch.inf, -torch.inf)))


def test_half_and_double_precision_scores_are_allowed() -> None:
    run(Scores(lambda p: p.half()))
    run(Scores(lambda p: p.double()))


def best(scores: Tensor, budget: int) -> Tensor:
    return scores.topk(budget, dim=2).indices.sort(dim=2).values


BAD_ROWS: dict[str, tuple[Callable[[Tensor, int], Any], str]] = {
    "int32": (lambda s, b: best(s, b).int(), "int32"),
    "floats": (lambda s, b: best(s, b).float(), "float32"),
    "decreasing": (lambda s, b: best(s, b).flip(2), "strictly increasing"),
    "two swapped": (lambda s, b: best(s, b)[:, :, [0, 2, 1, 3]], "strictly increasing"),
    "one duplicate": (lambda s, b: best(s, b)[:, :, [0, 1, 1, 2]], "strictly increasing"),
    "negative": (lambda s, b: best(s, b) - ROWS, "-"),
    "beyond the end": (lambda s, b: best(s, b) + 1, str(ROWS)),
    "one over the budget": (lambda s, b: best(s, b + 1), str(BUDGET + 1)),
    "none": (lambda s, b: best(s, b)[:, :, :0], "0 rows"),
    "one head": (lambda s, b: best(s, b)[:, :1], f"[1, 1, {BUDGET}]"),
    "no head axis": (lambda s, b: best(s, b)[:, 0], f"[1, {BUDGET}]"),
    "a mask": (lambda s, b: s > 0, "bool"),
    "a list": (lambda s, b: best(s, b).tolist(), "list"),
}


@pytest.mark.few(7)
@pytest.mark.parametrize("case", BAD_ROWS)
def test_bad_row_indices_raise(case: str) -> None:
    answer, got = BAD_ROWS[case]
    with pytest.raises(HookResultError) as caught:
        run("h2o", Selects(answer))
    assert_named(str(caught.value), "'selects'", "select()", "layer 0", got)


def test_fewer_rows_than_the_budget_are_allowed() -> None:
    run("h2o", Selects(lambda s, b: best(s, b - 3)))


class Due:
    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        self.of = of

    @hookimpl
    def due(self, num_rows: Tensor) -> Any:
        return self.of(num_rows)


BAD_DUE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "integers": (lambda n: n, "int64"),
    "a scalar": (lambda n: torch.tensor(True), "[]"),
    "one too many": (lambda n: torch.ones(len(n) + 1, dtype=torch.bool), "[2]"),
    "a Python bool": (lambda n: True, "bool"),
}


@pytest.mark.parametrize("case", BAD_DUE)
def test_bad_due_answers_raise(case: str) -> None:
    answer, got = BAD_DUE[case]
    with pytest.raises(HookResultError) as caught:
        run("streaming", Due(answer))
    assert_named(str(caught.value), "'due'", "due()", "layer 0", got)


class Steer:
    def __init__(self, of: Callable[[Tensor], Any]) -> None:
        self.of = of

    @hookimpl
    def steer(self, hidden_states: Tensor) -> Any:
        return self.of(hidden_states)


BAD_STEER: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another width": (lambda x: x[:, 1:], f"[1, {HIDDEN - 1}]"),
    "one vector for all": (lambda x: x[0], f"[{HIDDEN}]"),
    "a token axis": (lambda x: x[:, None], f"[1, 1, {HIDDEN}]"),
    "another dtype": (lambda x: x.double(), "float64"),
    "a number": (lambda x: 0.0, "float"),
}


@pytest.mark.parametrize("case", BAD_STEER)
def test_bad_steering_changes_raise(case: str) -> None:
    answer, got = BAD_STEER[case]
    with pytest.raises(HookResultError) as caught:
        run("full", Steer(answer))
    assert_named(str(caught.value), "'steer'", "steer()", "layer 0", got)


def test_wrong_one_of_several_steering_policies_is_named() -> None:
    class Correct(Steer):
        pass

    with pytest.raises(HookResultError, match="'steer'"):
        run("full", Correct(torch.zeros_like), Steer(lambda x: x[:, 1:]), Correct(torch.ones_like))


class Evict:
    def __init__(self, of: Callable[[Any, Tensor], Any]) -> None:
        self.of = of

    @hookimpl
    def evict(self, rows: Any, keep: Tensor) -> Any:
        return self.of(rows, keep)


BAD_EVICT: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "True without calling keep": (lambda rows, keep: True, "rows.keep"),
    "other rows kept": (lambda rows, keep: rows.keep(keep[:, :, 1:]) or True, "rows.keep"),
    "other rows of the same number": (
        lambda rows, keep: rows.keep(torch.arange(BUDGET).expand_as(keep)) or True,
        "rows.keep",
    ),
    "False instead of None": (lambda rows, keep: False, "False"),
    "the rows": (lambda rows, keep: keep, "tensor"),
}


@pytest.mark.parametrize("case", BAD_EVICT)
def test_bad_evictions_raise(case: str) -> None:
    answer, got = BAD_EVICT[case]
    with pytest.raises(HookResultError) as caught:
        run("streaming", Evict(answer))
    assert_named(str(caught.value), "'evict'", "evict()", "layer 0", got)


@pytest.mark.parametrize("times", [1, 2])
def test_rows_are_evicted_once(times: int) -> None:
    def without_an_answer(rows: Any, keep: Tensor) -> None:
        for _ in range(times):
            rows.keep(keep)

    with pytest.raises(HookError, match=r"rows\.keep\(\)"):
        run("streaming", Evict(without_an_answer))


def test_evict_may_change_kept_values() -> None:
    run("streaming", Evict(lambda rows, keep: rows.keep(keep, values=halved(rows, keep)) or True))


def halved(rows: Any, keep: Tensor) -> Tensor:
    return rows.values.gather(2, keep[..., None].expand(-1, -1, -1, 8)) / 2


class Schedule:
    def __init__(self, of: Callable[[list[int], int], Any]) -> None:
        self.of = of

    @hookimpl
    def schedule(self, waiting: Any, num_free: int) -> Any:
        return self.of([request.id for request in waiting], num_free)


BAD_SCHEDULES: dict[str, tuple[Callable[[list[int], int], Any], str]] = {
    "no request": (lambda ids, free: [], "0 requests"),
    "an empty group": (lambda ids, free: [[ids[0]], []], "group"),
    "more than free slots": (lambda ids, free: [ids[: free + 1]], "3 requests"),
    "an unknown request": (lambda ids, free: [[99]], "99"),
    "a duplicate request": (lambda ids, free: [[ids[0]], [ids[0]]], "twice"),
    "a flat list": (lambda ids, free: ids[:1], "list of lists"),
    "a tuple": (lambda ids, free: ((ids[0],),), "list of lists"),
    "names instead of ids": (lambda ids, free: [["first"]], "first"),
}


@pytest.mark.parametrize("case", BAD_SCHEDULES)
def test_bad_schedules_raise(case: str) -> None:
    answer, got = BAD_SCHEDULES[case]
    plan = Plan(stack=(PolicySpec.of("full"),), schedule=(PolicySpec.of(Schedule(answer)),))
    engine = Engine(shared_model(), plan=plan, slots=2)
    with pytest.raises(HookResultError) as caught:
        engine.generate([[1, 2]] * 4, max_new_tokens=2).results()
    assert_named(str(caught.value), "'schedule'", "schedule()", got)


class PassThrough:
    @hookimpl(wrapper=True)
    def score(self) -> Generator[None, Tensor, Tensor]:
        scores = yield
        return scores


class Raises:
    @hookimpl
    def score(self) -> Tensor:
        msg = "no such head"
        raise IndexError(msg)


def test_hook_exception_names_the_policy_and_keeps_its_cause() -> None:
    with pytest.raises(HookError) as caught:
        run("h2o", Raises(), PassThrough())
    assert_named(str(caught.value), "'raises'", "score()", "layer 0", "IndexError", "no such head")
    assert isinstance(caught.value.__cause__, IndexError)


class DropsRow:
    @hookimpl(wrapper=True)
    def score(self) -> Generator[None, Tensor, Tensor]:
        scores = yield
        return scores[:, :, 1:]


def test_wrapper_that_makes_an_answer_invalid_is_named() -> None:
    with pytest.raises(HookResultError, match="'drops_row'"):
        run("h2o", DropsRow())


def test_error_names_the_layer_index() -> None:
    plan = Plan.from_dict(
        {
            "budget": BUDGET,
            "buffer": BUFFER,
            "layers": [{"where": "0:1", "stack": ["h2o"]}, {"where": "1:", "stack": ["full"]}],
        }
    )
    good, bad = plan.layers
    bad_stack = (PolicySpec.of(Scores(lambda p: p)),)
    plan = attrs.evolve(plan, layers=(good, attrs.evolve(bad, stack=bad_stack)))
    with pytest.raises(HookResultError, match="layer 1"):
        Engine(shared_model(), plan=plan).generate([[1, 2, 3]], max_new_tokens=24).results()


class NoHooks:
    pass


class UnknownArgument:
    @hookimpl
    def score(self, key: Tensor) -> Tensor:
        return key.norm(dim=-1)


class UnknownHook:
    @hookimpl
    def scores(self, keys: Tensor) -> Tensor:
        return keys.norm(dim=-1)


@pytest.mark.parametrize(
    ("policy", "message"),
    [(NoHooks(), "no hook"), (UnknownArgument(), "key"), (UnknownHook(), "scores")],
    ids=["no hooks", "unknown argument", "unknown hook"],
)
def test_policy_with_wrong_hook_signatures_is_refused_before_the_run(
    policy: object, message: str
) -> None:
    with pytest.raises(PolicyLoadError, match=message):
        Engine(shared_model(), plan=Plan.uniform(policy, budget=BUDGET))


@pytest.mark.parametrize("when", ["every", lambda self: self.every is not None])
def test_a_hook_is_called_only_when_it_is_there(when: Any) -> None:
    @attrs.define(eq=False)
    class WithKnob:
        every: int | None = 1

        @hookimpl(specname="due", when=when)
        def at_every_row(self, num_rows: Tensor) -> Tensor:
            return num_rows > 6

        @hookimpl
        def score(self, positions: Tensor) -> Tensor:
            return positions.float()

    def peak_rows(policy: object) -> int:
        plan = Plan.uniform(policy, budget=6, buffer=4)
        run = Engine(shared_model(), plan=plan).generate([[1] * 6], max_new_tokens=12)
        return run.results()[0].peak_rows

    assert peak_rows(WithKnob()) == 7
    assert peak_rows(WithKnob(every=None)) == 10
