"""Uses of a `PolicyCache` that are refused."""

from collections.abc import Callable
from pathlib import Path

from tiny import shared_model

from kvpolicy import Plan, PolicyCache

TIGHT = Plan.uniform("h2o", budget=8, buffer=4)


def cache() -> PolicyCache:
    return PolicyCache(shared_model(), TIGHT)


CASES: dict[str, Callable[[Path], object]] = {
    "a snapshot before a forward": lambda _: cache().snapshot(3),
    "a snapshot that is none": lambda _: cache().restore([3]),
}
