"""Steering adds the sum of all policies' changes to a layer's input, in decode steps only."""

from collections.abc import Generator
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from strategies import costly, prompts, seeds
from tiny import greedy_tokens, shared_model, tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.hooks.stack import Stack
from kvpolicy.plan.spec import LayerGroup, PolicySpec
from kvpolicy.state import Memory, Parts

HIDDEN = 32
DOUBLE = {"dtype": torch.float64}


@attrs.define(eq=False)
class Push:
    """Adds one vector to every sequence."""

    vector: Tensor

    @hookimpl
    def steer(self, hidden_states: Tensor) -> Tensor:
        return self.vector.expand_as(hidden_states)


def vectors(seed: int, count: int, scale: float = 0.5) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(HIDDEN, generator=rng, **DOUBLE) for _ in range(count)]


def tokens(model: nn.Module, prompts: list[list[int]], *stack: object) -> list[tuple[int, ...]]:
    plan = Plan.uniform("full", *stack)
    results = Engine(model, plan=plan, slots=2).generate(prompts, max_new_tokens=12).results()
    return [result.tokens for result in results]


@pytest.mark.slow
@costly
@given(prompts(count=3), seeds)
def test_steering_changes_are_summed_in_any_order(prompts: list[list[int]], seed: int) -> None:
    model = shared_model(**DOUBLE)
    a, b, c = vectors(seed, 3)
    summed = tokens(model, prompts, Push(a + b + c))
    assert tokens(model, prompts, Push(a), Push(b), Push(c)) == summed
    assert tokens(model, prompts, Push(c), Push(a), Push(b)) == summed


@costly
@given(prompts(count=2))
def test_zero_steering_changes_nothing(prompts: list[list[int]]) -> None:
    model = shared_model(**DOUBLE)
    assert tokens(model, prompts, Push(torch.zeros(HIDDEN, **DOUBLE))) == tokens(model, prompts)


def test_first_token_is_not_steered() -> None:
    model, prompt = shared_model(**DOUBLE), [4, 8, 15, 16, 23]
    (steered,) = tokens(model, [prompt], Push(vectors(0, 1, scale=5.0)[0]))
    plain = greedy_tokens(model, prompt, 12)
    assert steered[0] == plain[0]
    assert list(steered[1:]) != plain[1:]


@attrs.define(eq=False)
class RecordsAndPushes:
    """Records the arguments of steer() and adds a vector."""

    vector: Tensor
    seen: list[tuple[int, Tensor]] = attrs.field(factory=list)

    @hookimpl
    def steer(
        self, layer_idx: int, hidden_states: Tensor, token_ids: Tensor, memory: Memory
    ) -> Tensor:
        assert token_ids.dtype == torch.int64
        assert token_ids.shape == hidden_states.shape[:1]
        for token, notes in zip(token_ids.tolist(), memory.of(self), strict=True):
            notes.setdefault("token_ids", []).append(token)
            self.seen.append((layer_idx, notes["token_ids"]))
        return self.vector.expand_as(hidden_states)


@pytest.mark.parametrize("slots", [1, 2, 4])
def test_memory_and_token_ids_match_the_sequence_in_the_slot(slots: int) -> None:
    policy = RecordsAndPushes(torch.zeros(HIDDEN))
    prompts = [[1, 2, 3], [4] * 9, [5], [6, 7]]
    plan = Plan(
        layers=(
            LayerGroup("0:1", (PolicySpec.of("full"), PolicySpec.of(policy))),
            LayerGroup("1:", (PolicySpec.of("full"),)),
        )
    )
    engine = Engine(shared_model(), plan=plan, slots=slots)
    results = engine.generate(prompts, max_new_tokens=9, stop_ids=[3, 28, 45]).results()
    assert {layer_idx for layer_idx, _ in policy.seen} == {0}
    recorded = {tuple(token_ids) for _, token_ids in policy.seen}
    assert recorded == {result.tokens[:-1] for result in results if len(result.tokens) > 1}


def test_layer_input_is_hidden_states_plus_change() -> None:
    model = tiny_model(**DOUBLE)
    received: list[Tensor] = []
    recorded: list[Tensor] = []
    vector = vectors(1, 1)[0]

    @attrs.define(eq=False)
    class Notes:
        @hookimpl
        def steer(self, layer_idx: int, hidden_states: Tensor) -> Tensor | None:
            recorded.append(hidden_states.clone())
            return vector.expand_as(hidden_states)

    def note(_: nn.Module, arguments: tuple, output: object) -> None:
        received.append(arguments[0][:, -1].clone())

    plan = Plan(
        layers=(
            LayerGroup("0:1", (PolicySpec.of("full"),)),
            LayerGroup("1:", (PolicySpec.of("full"), PolicySpec.of(Notes()))),
        )
    )
    model.model.layers[1].register_forward_hook(note)
    Engine(model, plan=plan).generate([[1, 2], [3] * 5], max_new_tokens=6).results()
    assert len(recorded) == 5
    for states, entered in zip(recorded, received[-5:], strict=True):
        assert torch.equal(entered, states + vector)


def test_steer_returning_none_changes_nothing() -> None:
    class ReturnsNone:
        @hookimpl
        def steer(self) -> None:
            return None

    model = shared_model(**DOUBLE)
    assert tokens(model, [[1, 2, 3]], ReturnsNone()) == tokens(model, [[1, 2, 3]])


@pytest.mark.few(1)
@pytest.mark.parametrize("slots", [2, 3])
def test_steering_does_not_depend_on_other_sequences(slots: int) -> None:
    @attrs.define(eq=False)
    class ByLastToken:
        @hookimpl
        def steer(self, hidden_states: Tensor, token_ids: Tensor) -> Tensor:
            return hidden_states * (token_ids % 3)[:, None] * 0.3

    prompts = [[1, 2, 3], [4] * 9, [5], [6, 7]]
    plan = Plan.uniform("rkv", ByLastToken(), budget=10, buffer=3)
    engine = Engine(shared_model(**DOUBLE), plan=plan, slots=slots)
    batch = engine.generate(prompts, max_new_tokens=9).results()
    for prompt, result in zip(prompts, batch, strict=True):
        (alone,) = engine.generate([prompt], max_new_tokens=9).results()
        assert result.tokens == alone.tokens


@attrs.define(eq=False)
class PushesSomeLayers:
    """Adds 1 to what enters the layers that it declares; notes where it is called."""

    steers: tuple[int, ...] | None
    calls: list[int] = attrs.field(factory=list)

    @hookimpl
    def steer(self, layer_idx: int, hidden_states: Tensor) -> Tensor:
        self.calls.append(layer_idx)
        return torch.ones_like(hidden_states)


@attrs.define(eq=False)
class ScoresToo(PushesSomeLayers):
    """One that may be a part."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return positions.float()


@attrs.define(eq=False)
class MadeOf:
    """A policy made of another."""

    parts: tuple[tuple[str, object], ...]

    @hookimpl
    def score(self, parts: Parts) -> Tensor:
        return parts.of(self)[0]


@attrs.define(eq=False)
class Doubles:
    """A wrapper that doubles the changes of the policies before it."""

    steers: tuple[int, ...] | None
    calls: list[int] = attrs.field(factory=list)

    @hookimpl(wrapper=True)
    def steer(self, layer_idx: int) -> Generator[None, list[Tensor], list[Tensor]]:
        self.calls.append(layer_idx)
        return [2 * change for change in (yield)]


def test_a_policy_steers_the_layers_that_it_declares_and_no_others() -> None:
    one, two, every = PushesSomeLayers((1,)), PushesSomeLayers((0, 2)), PushesSomeLayers(None)
    part, doubles = ScoresToo((3,)), Doubles((2, 3))
    policies = {
        "one": one,
        "two": two,
        "every": every,
        "doubles": doubles,
        "made": MadeOf((("part", part),)),
    }
    stack = Stack([*policies.items()])
    states = torch.zeros(2, HIDDEN)
    others: dict[str, Any] = {"tokenizer": None, "registers": None, "memory": None}
    changes = [
        stack.steer(layer_idx, states, torch.zeros(2, dtype=torch.int64), **others)
        for layer_idx in range(5)
    ]
    assert [float(change[0, 0]) for change in changes] == [2, 2, 4, 3, 1]
    where = [policy.calls for policy in (one, two, every, doubles, part)]
    assert where == [[1], [0, 2], [0, 1, 2, 3, 4], [2, 3], [3]]


def test_neighbours_in_the_stack_steer_layers_of_their_own() -> None:
    model, prompt = shared_model(**DOUBLE), [4, 8, 15, 16, 23]
    plain = tokens(model, [prompt])
    both = tokens(model, [prompt], PushesSomeLayers((0,)), PushesSomeLayers((1,)))
    assert both == tokens(model, [prompt], PushesSomeLayers((0, 1))) != plain
