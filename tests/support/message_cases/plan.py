"""Plans that are refused."""

from collections.abc import Callable
from pathlib import Path

from kvpolicy import Plan

CASES: dict[str, Callable[[Path], object]] = {
    "a policy that is not installed": lambda _: Plan.uniform("snapvk", budget=8),
}
