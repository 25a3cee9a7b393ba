"""A hook that changes what it was given, or torch's defaults, is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.errors import HookError, HookResultError

DEFAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: torch.set_default_dtype(torch.float64), "default dtype to torch.float64"),
    "device": (lambda: torch.set_default_device("meta"), "default device to meta"),
    "autocast": (lambda: torch.autocast("cpu").__enter__(), "autocast of cpu to True"),
}

CHANGES: dict[str, Callable[[Any], None]] = {
    "score keys": lambda keys: keys.zero_(),
    "score positions": lambda positions: positions.add_(1),
    "select scores": lambda scores: scores.neg_(),
    "observe token_ids": lambda token_ids: token_ids.zero_(),
    "due num_rows": lambda num_rows: num_rows.zero_(),
    "steer hidden_states": lambda hidden_states: hidden_states.zero_(),
}


class Bystander:
    @hookimpl
    def score(self, positions: Tensor) -> None:
        del positions


class SetsDefault:
    def __init__(self, change: Callable[[], Any], fails: bool) -> None:
        self.change = change
        self.fails = fails

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        self.change()
        if self.fails:
            raise ValueError
        return torch.ones(positions.shape, dtype=torch.float32, device="cpu")


def run(*stack: object, **options: bool) -> list[tuple[int, ...]]:
    plan = Plan.uniform(*stack, budget=6, buffer=2)
    prompts = [[1, 2, 3] * 5, [4, 5]]
    engine = Engine(shared_model(), None, plan, **options)
    results = engine.generate(prompts, max_new_tokens=12).results()
    return [result.tokens for result in results]


@pytest.mark.few(1)
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("change", "message"), DEFAULTS.values(), ids=DEFAULTS)
def test_a_default_of_torch_is_put_back(
    change: Callable[[], Any], message: str, fails: bool
) -> None:
    before = run("streaming")
    with pytest.raises(HookError, match="'sets_default'" if fails else message):
        run(SetsDefault(change, fails), Bystander())
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device() == torch.device("cpu")
    assert not torch.is_autocast_enabled("cpu")
    assert run("streaming") == before


@pytest.mark.parametrize(("what", "change"), CHANGES.items(), ids=CHANGES)
def test_an_argument_that_is_changed_in_place_is_named(
    what: str, change: Callable[[Any], None]
) -> None:
    hook, argument = what.split()
    namespace: dict[str, Any] = {"change": change}
    exec(f"def {hook}(self, {argument}):\n    change({argument})", namespace)
    writer = type("Writer", (), {hook: hookimpl(namespace[hook])})()
    message = rf"'writer'.*'{argument}'"
    with pytest.raises(HookResultError, match=message):
        run("h2o", writer, Bystander(), eager=False)
    if hook == "steer":
        with pytest.raises(HookResultError, match=message):
            run("h2o", writer, Bystander(), eager=True)
