"""Calls of `check_policy` that are refused, and policies that break the contract."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.testing import check_policy


@attrs.define(eq=False)
class Newest:
    """A correct policy."""

    @hookimpl
    def score(self, positions: Tensor) -> Tensor:
        return positions.double()


ONE = Newest()


def checked(policy: Any, **options: Any) -> Callable[[Path], object]:
    return lambda _: check_policy(policy, **options)


def declaring(**attributes: object) -> type:
    return type("Mine", (Newest,), attributes)


CASES: dict[str, Callable[[Path], object]] = {
    "an object instead of a class": checked(3),
    "knobs without a name": checked(Newest, knobs={"a": 1}),
    "a profile that does not exist": checked(Newest, profile="slow"),
    "no cases": checked(Newest, max_examples=0),
    "a policy that is not installed": checked("nonesuch"),
    "a knob that does not exist": checked("streaming", knobs={"n_snik": 1}),
    "the same policy twice": checked(lambda: ONE),
    "no policy": checked(lambda: None),
    "a factory that fails": checked(lambda: 1 / 0),
    "too many protected rows": checked(declaring(protects=(10**8, 0))),
    "a layer that the model lacks": checked(
        declaring(steers=(99,), steer=hookimpl(lambda self, hidden_states: hidden_states * 0))
    ),
    "tracks that are a text": checked(declaring(tracks="abc")),
}
