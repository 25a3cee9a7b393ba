"""Policies that do not fit the hook specifications, or answer wrongly."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pluggy
import torch
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.hooks.discovery import load_policy_file
from kvpolicy.hooks.stack import Stack


class Scores:
    """Answers `score` with what a function makes of the positions."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        self.answer = answer

    @hookimpl
    def score(self, positions: Tensor) -> Any:
        return self.answer(positions)


class Protects:
    """Answers `protect` with the positions."""

    @hookimpl
    def protect(self, positions: Tensor) -> Tensor:
        return positions


class Writes:
    """Changes its argument."""

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        return keys.zero_().sum(dim=-1)


class SetsDefault:
    """Changes how torch works for everybody."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        return positions.float()


class NoHooks:
    """Implements nothing."""


class Misspelt:
    """Names an argument that does not exist."""

    @hookimpl
    def score(self, keyz: Tensor) -> Tensor:
        return keyz


class OtherHook:
    """Implements a hook that does not exist."""

    @hookimpl
    def scores(self, keys: Tensor) -> Tensor:
        return keys


class Absent:
    """Has a hook that is there where an attribute is true that does not exist."""

    every = None

    @hookimpl(when="evry")
    def due(self, num_rows: Tensor) -> Tensor:
        return num_rows > 0


class OldStyle:
    """Wraps as pluggy did once."""

    @pluggy.HookimplMarker("kvpolicy")(hookwrapper=True)
    def score(self) -> Iterator[None]:
        yield


def declaring(**attributes: object) -> object:
    return type("Declares", (Scores,), attributes)(lambda positions: positions.float())


def run(*policies: object) -> Callable[[Path], object]:
    def generate(_: Path) -> object:
        plan = Plan.uniform(*policies, budget=6, buffer=2)
        return Engine(shared_model(), None, plan).generate([[1] * 12], max_new_tokens=2).results()

    return generate


def scored(answer: Callable[[Tensor], Any]) -> Callable[[Path], object]:
    return run(Scores(answer))


def listed(policy: object) -> Callable[[Path], object]:
    return lambda _: Stack([("mine", policy)])


def file(text: str) -> Callable[[Path], object]:
    def register(folder: Path) -> object:
        (folder / "mine.py").write_text(text)
        return load_policy_file(folder / "mine.py")

    return register


CASES: dict[str, Callable[[Path], object]] = {
    "scores of another shape": scored(lambda p: p[:, :, 1:].float()),
    "scores that are integers": scored(lambda p: p),
    "scores that are NaN": scored(lambda p: p * torch.nan),
    "scores that are a list": scored(lambda p: p.tolist()),
    "a policy that fails": scored(lambda p: [][0]),
    "protected rows that are positions": run("h2o", Protects()),
    "an argument that is changed": run(Writes()),
    "a default of torch that is changed": run(SetsDefault()),
    "a policy without hooks": listed(NoHooks()),
    "an argument that does not exist": listed(Misspelt()),
    "a hook that does not exist": listed(OtherHook()),
    "tracks that are a text": listed(declaring(tracks="abc")),
    "hooks that are inactive": listed(declaring(inactive_hooks=("due",))),
    "layers that are declared alike": listed(declaring(layers_alike=True)),
    "a hook that is there when nobody knows": listed(Absent()),
    "a wrapper of the old style": listed(OldStyle()),
    "a window that is no number": listed(declaring(window_size="8")),
    "protected rows below 0": listed(declaring(protects=(-1, 0))),
    "a file without a policy": file("x = 1"),
    "a file that imports what is not there": file("import no_such_module"),
    "a file that is no Python": file("def ("),
    "a file that is not there": lambda folder: load_policy_file(folder / "nothing.py"),
    "what to do about errors": lambda _: Engine(
        shared_model(), plan=Plan.uniform("full"), on_hook_error="ignore"
    ),
}
