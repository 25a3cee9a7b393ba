"""Plans that are refused."""

from collections.abc import Callable
from pathlib import Path

from kvpolicy import Plan, load_policy

CASES: dict[str, Callable[[Path], object]] = {
    "a policy that is not installed": lambda _: load_policy("snapvk"),
    "a budget of nothing": lambda _: Plan.uniform("h2o", budget=0),
}
