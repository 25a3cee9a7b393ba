"""Counts the Python calls of one decode step: ``python tests/support/profile_step.py``.

A 2-layer model decodes two sequences under ``["h2o", "protect"]``, in a step without compaction.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import attrs
from tiny import tiny_model

import kvpolicy
from kvpolicy import Engine, Plan

_PACKAGE = Path(kvpolicy.__file__).parent
_POLICIES = ("kvpolicy_baselines", "kvpolicy_plugins")


@attrs.frozen
class StepProfile:
    """The calls of one decode step into kvpolicy and its policies.

    Attributes:
        calls: File and function of each call, in order.
    """

    calls: tuple[tuple[str, str], ...]

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.calls}

    def __str__(self) -> str:
        counted = Counter(self.calls)
        lines = [f"{num:4} {file} {name}" for (file, name), num in sorted(counted.items())]
        return "\n".join([*lines, f"{len(self.calls)} calls in {len(self.files)} files"])


def profile_step() -> StepProfile:
    plan = Plan.uniform("h2o", "protect", budget=64, buffer=32)
    run = Engine(tiny_model(), plan=plan, slots=4).generate([[1, 2, 3], [4, 5, 6, 7]])
    for _ in range(4):
        run.step()
    calls = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and (path.is_relative_to(_PACKAGE) or path.parent.name in _POLICIES):
            calls.append((f"{path.parent.name}/{path.name}", frame.f_code.co_name))

    sys.setprofile(note)
    try:
        run.step()
    finally:
        sys.setprofile(None)
    return StepProfile(tuple(calls))


if __name__ == "__main__":
    sys.stdout.write(f"{profile_step()}\n")
