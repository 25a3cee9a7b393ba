"""Comparisons made up for tests, of models of which nothing but a description exists."""

from typing import Any

import attrs

from kvpolicy.lab.models import ModelInfo
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.prepare import prepare
from kvpolicy.lab.sweep.sweep_file import Preset, series_of_stack

BASE = Preset(
    models=("a",),
    tasks=("reasoner",),
    n=2,
    max_new_tokens=9,
    slots=2,
    budgets=(48,),
    buffer=8,
    series=(series_of_stack("full"), series_of_stack("rkv"), series_of_stack("streaming")),
    name="mine",
)


class Catalogue:
    """Describes models; those named alike but for a prime are alike."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        self.asked.append(name)
        same = name.rstrip("'")
        return ModelInfo(name, f"weights of {same}", "cpu", "float32", 2, 1000), None


def prepared(**changes: Any) -> Comparison:
    """The base with changes, prepared without loading anything."""
    return prepare(attrs.evolve(BASE, **changes), Catalogue())
