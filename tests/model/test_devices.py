"""A model split over two devices, as with a ``device_map``, gives the same tokens."""

import attrs
import pytest
import torch
from families import family_model
from second_device import THERE, There, second_device, spread
from tiny import tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, Sampling, hookimpl
from kvpolicy.state import Registers

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 16]


def tokens(model: nn.Module, plan: Plan, sampling: Sampling = Sampling()) -> list:  # noqa: B008
    engine = Engine(model, plan=plan, slots=2, chunk=7)
    run = engine.generate(PROMPTS, max_new_tokens=20, sampling=sampling)
    return [(result.tokens, result.rows_evicted) for result in run.results()]


def model_on_two_devices(**options: object) -> nn.Module:
    model = tiny_model(num_layers=3, **options)
    spread(model, first_there=1)
    return model


def test_mixing_tensors_of_two_devices_raises() -> None:
    with second_device():
        here, there = torch.ones(2), torch.ones(2, device=THERE)
        with pytest.raises(RuntimeError, match="two devices"):
            here + there
        with pytest.raises(RuntimeError, match="two devices"):
            there[:1] = here[:1] * there[:1]
        assert isinstance(there * 2 + torch.tensor(1.0), There)
        assert there.cpu().tolist() == [1, 1]


@pytest.mark.parametrize("policy", ["full", "h2o", "rkv", "snapkv", "streaming"])
def test_two_devices_give_the_tokens_of_one(policy: str) -> None:
    plan = Plan.uniform(policy, budget=24, buffer=4)
    expected = tokens(tiny_model(num_layers=3), plan)
    with second_device():
        assert tokens(model_on_two_devices(), plan) == expected


def test_two_devices_give_the_sampled_tokens_of_one() -> None:
    plan, sampling = Plan.uniform("full"), Sampling(temperature=0.9, top_p=0.9, seed=3)
    expected = tokens(tiny_model(num_layers=3), plan, sampling)
    with second_device():
        assert tokens(model_on_two_devices(), plan, sampling) == expected


@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_windows_softcaps_and_sinks_work_on_two_devices(policy: str) -> None:
    plan = Plan.uniform(policy, budget=20, buffer=2)
    for family in ("gpt_oss", "gemma2"):
        expected = tokens(family_model(family, window=9), plan)
        model = family_model.__wrapped__(family, window=9)  # not the cached one: `spread` moves it
        spread(model, first_there=1)
        with second_device():
            assert tokens(model, plan) == expected


@attrs.define(eq=False)
class Counts:
    """Counts its calls in a register and steers by the count."""

    registers: tuple[str, ...] = ("calls",)
    devices: set = attrs.field(factory=set)

    @hookimpl
    def observe(self, hidden_states: Tensor, registers: Registers) -> None:
        registers.of(self)["calls"] += hidden_states.mean(dim=(0, 1), keepdim=True)[0] * 0 + 1

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor, registers: Registers) -> Tensor:
        calls = registers.of(self)["calls"]
        self.devices |= {hidden_states.device, calls.device, token_ids.device}
        calls += token_ids % 3
        return hidden_states * 0.01 * calls[:, None]


def test_registers_are_on_the_device_of_the_steered_layer() -> None:
    expected = tokens(tiny_model(num_layers=3), Plan.uniform("full", Counts()))
    policy = Counts()
    with second_device():
        assert tokens(model_on_two_devices(), Plan.uniform("full", policy)) == expected
    assert policy.devices == {torch.device("cpu"), THERE}
    assert expected != tokens(tiny_model(num_layers=3), Plan.uniform("full"))
