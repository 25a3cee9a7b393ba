"""What a policy that was made in Python holds is part of the digest, whatever its class is."""

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tiny import shared_model

from kvpolicy import Engine, Plan, PrefixStore, Request, hookimpl
from kvpolicy.plan.resolved import ResolvedPlan


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held

    @hookimpl
    def score(self, positions):
        return positions.double() * self.held


class Slotted:
    __slots__ = ("_held",)

    def __init__(self, held: Any) -> None:
        self._held = held

    @hookimpl
    def score(self, positions):
        return positions


@attrs.define(eq=False)
class OfAttrs:
    held: Any

    @hookimpl
    def score(self, positions):
        return positions


@attrs.frozen
class Table:
    numbers: Any


def tensor(value: int) -> torch.Tensor:
    numbers = torch.zeros(3000)  # the text of so many shows a few
    numbers[1500] = value
    return numbers


def gate(value: int) -> torch.nn.Module:
    layer = torch.nn.Linear(40, 40)
    for weight in layer.parameters():
        weight.data.fill_(0.5)
    layer.weight.data[7, 9] = value
    return layer


def itself(value: int) -> Plain:
    held = Plain([value])
    held.held.append(held)
    return held


HELD: dict[str, Callable[[int], Any]] = {
    "number": lambda value: value,
    "tensor": tensor,
    "array": lambda value: tensor(value).numpy(),
    "of a bool": lambda value: np.array([True, value == 2]),
    "table": lambda value: {3: (value, "a")},
    "object": lambda value: Plain(tensor(value)),
    "object of attrs": lambda value: Table(tensor(value)),
    "module": gate,
    "itself": itself,
}


def resolved(policy: object) -> ResolvedPlan:
    return Plan.uniform(policy, budget=8, buffer=4).resolve(2)


@pytest.mark.parametrize("kind", [Plain, Slotted, OfAttrs])
@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
def test_what_differs_by_a_number_is_another_plan(kind: Any, held: Any) -> None:
    first, same, other = (resolved(kind(held(value))) for value in (1, 1, 2))
    assert first.digest() == same.digest() != other.digest()
    assert first.to_dict()["layers"][0]["stack"][0]["policy"]


def test_what_a_wrapper_calls_policy_is_no_name() -> None:
    wrapper = Plain(1)
    wrapper.policy = Plain(2)
    (stack, _) = (layer["stack"] for layer in resolved(wrapper).to_dict()["layers"])
    assert stack[0]["policy"] == "plain"


def test_rows_and_snapshots_of_what_holds_something_else_are_not_taken() -> None:
    prompt, store = [5, 9, 40, 2, 2, 7, 11, 30, 3, 3, 8, 1] * 3, PrefixStore(2**30, block_tokens=4)
    requests = [Request(prompt, 8, stop_ids=(), snapshot=True)]
    snapshots = []
    for held in (1, -1):
        plan = Plan.uniform(Plain(held), budget=8, buffer=4)
        stored = Engine(shared_model(), None, plan, prefix_store=store)
        alone = Engine(shared_model(), None, plan)
        (found,), (expected,) = (one.generate(requests).results() for one in (stored, alone))
        assert found.tokens == expected.tokens
        snapshots.append(found.snapshot)
    (resumed,) = alone.generate([Request([7], 8, resume=snapshots[0])]).results()
    assert resumed.error is not None
