"""A model split over two devices, as with a ``device_map``, gives the same tokens."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import attrs
import pytest
import torch
from families import family_model
from second_device import SECOND_DEVICE, SecondDeviceTensor, second_device, spread
from tiny import tiny_model
from torch import Tensor, nn

from kvpolicy import Engine, Plan, Sampling, hookimpl
from kvpolicy.devices import as_current
from kvpolicy.model import adapter
from kvpolicy.state import Registers

PROMPTS = [[5, 9, 40, 2, 2, 7, 11], [1, 2], [3, 8] * 10]


def tokens(model: nn.Module, plan: Plan, sampling: Sampling = Sampling()) -> list:  # noqa: B008
    engine = Engine(model, plan=plan, slots=2, chunk=7)
    run = engine.generate(PROMPTS, max_new_tokens=7, sampling=sampling)
    return [(result.tokens, result.rows_evicted) for result in run.results()]


def model_on_two_devices(**options: object) -> nn.Module:
    model = tiny_model(num_layers=3, **options)
    spread(model, first_moved=1)
    return model


def test_the_device_of_a_model_is_the_current_one_in_each_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels of Triton run on the current GPU, and graphs are captured there."""
    current, seen = [], []

    @contextmanager
    def noted(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    monkeypatch.setattr(adapter, "as_current", noted)
    model = tiny_model()
    model.model.norm.register_forward_pre_hook(lambda *_: seen.append([*current]))
    tokens(model, Plan.uniform("full"))
    assert len(seen) > 7
    assert all(one == [torch.device("cpu")] for one in seen)


def test_only_gpus_are_made_current(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device", lambda one: made.append(one) or nullcontext())
    for device in map(torch.device, ("cpu", "meta", "cuda:1")):
        with as_current(device):
            pass
    assert made == [torch.device("cuda:1")]


def test_mixing_tensors_of_two_devices_raises() -> None:
    with second_device():
        cpu_tensor, other_tensor = torch.ones(2), torch.ones(2, device=SECOND_DEVICE)
        with pytest.raises(RuntimeError, match="two devices"):
            cpu_tensor + other_tensor
        with pytest.raises(RuntimeError, match="two devices"):
            other_tensor[:1] = cpu_tensor[:1] * other_tensor[:1]
        assert isinstance(other_tensor * 2 + torch.tensor(1.0), SecondDeviceTensor)
        assert other_tensor.cpu().tolist() == [1, 1]


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["full", "h2o", "rkv", "snapkv", "streaming"])
def test_two_devices_give_the_tokens_of_one(policy: str) -> None:
    plan = Plan.uniform(policy, budget=12, buffer=4)
    expected = tokens(tiny_model(num_layers=3), plan)
    with second_device():
        assert tokens(model_on_two_devices(), plan) == expected


@pytest.mark.nightly
def test_two_devices_give_the_sampled_tokens_of_one() -> None:
    plan, sampling = Plan.uniform("full"), Sampling(temperature=0.9, top_p=0.9, seed=3)
    expected = tokens(tiny_model(num_layers=3), plan, sampling)
    with second_device():
        assert tokens(model_on_two_devices(), plan, sampling) == expected


@pytest.mark.nightly
@pytest.mark.parametrize("policy", ["full", "h2o"])
def test_windows_softcaps_and_sinks_work_on_two_devices(policy: str) -> None:
    plan = Plan.uniform(policy, budget=12, buffer=2)
    for family in ("gpt_oss", "gemma2"):
        expected = tokens(family_model(family, window=9), plan)
        model = family_model.__wrapped__(family, window=9)  # not the cached one: `spread` moves it
        spread(model, first_moved=1)
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


@pytest.mark.nightly
def test_registers_are_on_the_device_of_the_steered_layer() -> None:
    expected = tokens(tiny_model(num_layers=3), Plan.uniform("full", Counts()))
    policy = Counts()
    with second_device():
        assert tokens(model_on_two_devices(), Plan.uniform("full", policy)) == expected
    assert policy.devices == {torch.device("cpu"), SECOND_DEVICE}
    assert expected != tokens(tiny_model(num_layers=3), Plan.uniform("full"))
