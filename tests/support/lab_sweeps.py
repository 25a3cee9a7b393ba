"""Sweeps for tests, with models that are only described."""

from typing import Any

import attrs

from kvpolicy.lab.models import Lengths, ModelInfo
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.prepare import build_sweep
from kvpolicy.lab.sweep.sweep_file import Series, SweepConfig
from kvpolicy.plan.resolved import ResolvedPlan

BASE = SweepConfig(
    models=("a",),
    tasks=("reasoner",),
    n=2,
    max_new_tokens=9,
    slots=2,
    budgets=(48,),
    buffer=8,
    series=(Series.from_stack("full"), Series.from_stack("rkv"), Series.from_stack("streaming")),
    name="mine",
)


class Catalogue:
    """Provides model descriptions; ``a`` and ``a'`` are two names of one model."""

    def __init__(self) -> None:
        self.described: list[str] = []

    def describe(self, name: str) -> tuple[ModelInfo, Any]:
        self.described.append(name)
        same = name.rstrip("'")
        return ModelInfo(name, f"weights of {same}", "cpu", "float32", 2, 1000), _Letters()

    def bytes_per_sequence(self, name: str, plan: ResolvedPlan, lengths: Lengths) -> int:
        """A hundred bytes for each row of the layers in the model's precision, else twenty."""
        return sum(
            layer.capacity(lengths.longest) * (20 if layer.rows.key_bits else 100)
            for layer in plan.layers
        )


class _Letters:
    """A tokenizer whose tokens are letters."""

    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}


def built(**changes: Any) -> Sweep:
    """Build the base sweep with changes; nothing is loaded."""
    return build_sweep(attrs.evolve(BASE, **changes), Catalogue())
