"""Parts of a composite policy get arguments, state and errors like any policy."""

from typing import Any, ClassVar

import attrs
import pytest
import torch
from recorder import Scores, Selects
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.cache.rows import Tracks
from kvpolicy.errors import HookError, HookResultError, PolicyLoadError
from kvpolicy.hooks.stack import Stack
from kvpolicy.state import Memory, Parts, Registers

HIDDEN = 32


@attrs.define(eq=False)
class First:
    """Calls all parts and returns the scores of the first."""

    parts: Any

    @hookimpl
    def score(self, parts: Parts) -> Tensor:
        return parts.of(self)[0]


def first(*policies: object) -> First:
    return First([(type(policy).__name__.lower(), policy) for policy in policies])


def run(*stack: object, num_tokens: int = 17) -> list[tuple[int, ...]]:
    plan = Plan.uniform(*stack, budget=8, buffer=4)
    engine = Engine(shared_model(), plan=plan, slots=2)
    results = engine.generate([[1, 2, 3], [4, 5] * 8, [7]], max_new_tokens=num_tokens).results()
    assert all(result.compactions for result in results)
    return [result.tokens for result in results]


@attrs.define(eq=False)
class Survivors:
    """Counts calls in a track and in memory; keeps old rows."""

    tracks: ClassVar[tuple[str, ...]] = ("age",)
    least: float = 0.0
    calls: list[int] = attrs.field(factory=list)

    @hookimpl
    def score(self, positions: Tensor, tracks: Tracks, memory: Memory) -> Tensor:
        tracks["age"] = tracks["age"] + 1
        for notes in memory.of(self):
            notes["calls"] = notes.get("calls", 0) + 1
            self.calls.append(notes["calls"])
        return tracks["age"] + self.least * positions


def test_each_part_has_its_own_tracks_and_memory() -> None:
    alone, other = Survivors(), Survivors()
    assert run(first(alone)) == run(Survivors())
    assert max(alone.calls) > 1, "memory must persist between compactions"
    # Two parts with the same track name do not share it.
    assert run(first(Survivors(), other)) == run(Survivors())
    stack = Stack([("both", first(Survivors(), Survivors()))])
    assert stack.tracks == ("both.0.age", "both.1.age")


def test_nested_parts_have_their_own_tracks() -> None:
    inner = first(Survivors())
    stack = Stack([("outer", First([("inner", inner), ("age", Survivors())]))])
    assert stack.tracks == ("outer.0.inner.0.age", "outer.1.age")
    assert run(First([("inner", inner), ("age", Survivors())])) == run(Survivors())


def test_duplicate_track_names_raise() -> None:
    with pytest.raises(PolicyLoadError, match=r"'survivors'.*'a\.0\.age'"):
        Stack([("a", first(Survivors())), ("a", first(Survivors()))])


@attrs.define(eq=False)
class Pushes:
    """Steers by the number of observed tokens; scores rows by position."""

    registers: ClassVar[tuple[str, ...]] = ("seen",)

    @hookimpl
    def observe(self, token_ids: Tensor, registers: Registers) -> None:
        registers.of(self)["seen"] += len(token_ids)

    @hookimpl
    def steer(self, hidden_states: Tensor, registers: Registers) -> Tensor:
        return registers.of(self)["seen"][:, None] * torch.ones_like(hidden_states)

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return positions.float()


@attrs.define(eq=False)
class Never(Scores):
    """Never due before the slab is full."""

    @hookimpl
    def due(self, num_rows: Tensor) -> Tensor:
        return torch.zeros_like(num_rows, dtype=torch.bool)


@attrs.define(eq=False)
class Always(Scores):
    """Due after every forward."""

    @hookimpl
    def due(self, num_rows: Tensor, budget: int) -> Tensor:
        return num_rows > budget


def newest(positions: Tensor) -> Tensor:
    return positions.float()


@pytest.mark.slow
def test_part_observes_and_steers_like_a_policy_of_the_stack() -> None:
    plain = run(Scores(newest))
    pushed = run(Pushes())
    assert run(first(Pushes())) == pushed != plain
    assert run(first(Scores(newest), Pushes())) == pushed
    assert run(Pushes(), first(Pushes())) == run(Pushes(), Pushes())


def test_first_part_that_implements_due_decides() -> None:
    plan = [first(Always(newest), Never(newest)), first(Never(newest), Always(newest))]
    peaks = []
    for policy in plan:
        engine = Engine(shared_model(), plan=Plan.uniform(policy, budget=8, buffer=4))
        (result,) = engine.generate([[1, 2, 3]], max_new_tokens=20).results()
        peaks.append(result.peak_rows)
    assert peaks == [9, 12]


@attrs.define(eq=False)
class Divides(Scores):
    """Gives one layer more rows than the other, or has no opinion."""

    budgets: list[int] | None = None

    @hookimpl
    def allocate(self) -> list[int] | None:
        return self.budgets


@pytest.mark.parametrize(
    ("stack", "budgets"),
    [
        ([first(Divides(newest, [11, 5]), Divides(newest, [4, 12]))], [11, 5]),
        ([first(Divides(newest), Divides(newest, [4, 12]))], [4, 12]),
        ([first(Divides(newest))], [8, 8]),
        ([first(first(Divides(newest, [11, 5])))], [11, 5]),
        ([Divides(newest, [3, 13]), first(Divides(newest, [4, 12]))], [3, 13]),
        ([Divides(newest), first(Divides(newest, [4, 12]))], [4, 12]),
    ],
    ids=[
        "the first part",
        "the next part",
        "no part",
        "a part of a part",
        "the stack",
        "no policy",
    ],
)
def test_parts_divide_the_budget_where_no_policy_of_the_stack_does(
    stack: list[object], budgets: list[int]
) -> None:
    resolved = Plan.uniform(*stack, budget=8, buffer=4).resolve(2)
    assert [layer.budget for layer in resolved.layers] == budgets


def test_a_part_that_divides_the_budget_wrongly_is_named() -> None:
    plan = Plan.uniform(first(Divides(newest, [8, 9])), budget=8, buffer=4)
    with pytest.raises(HookResultError, match=r"'divides' in 'first'.*17.*allocate"):
        plan.resolve(2)


@attrs.define(eq=False)
class DropsRow:
    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return positions[:, :, 1:].float()


@attrs.define(eq=False)
class Raises:
    @hookimpl
    def score(self) -> Tensor:
        msg = "no idea"
        raise ValueError(msg)


def test_error_names_the_part_and_its_owners() -> None:
    with pytest.raises(HookResultError, match=r"'dropsrow' in 'first'.*shape"):
        run(first(Scores(newest), DropsRow()))
    with pytest.raises(HookError, match=r"'raises' in 'first'.*ValueError.*score"):
        run(first(Raises()))
    nested = First([("inner", first(Raises()))])
    with pytest.raises(HookError, match="'raises' in 'inner' in 'first'"):
        run(nested)


@attrs.define(eq=False)
class Misspelt:
    @hookimpl
    def score(self, keyz: Tensor) -> Tensor:
        return keyz


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Selects(None), r"'selects' in 'first'.*select"),
        (Misspelt(), "'misspelt' in 'first'"),
        (object(), "'object' in 'first'"),
    ],
)
def test_invalid_parts_are_refused(part: object, message: str) -> None:
    with pytest.raises(PolicyLoadError, match=message):
        Stack([("first", first(part))])
