"""kvpress, as a contender: ``DecodingPress`` within ``generate``.

A policy is compared with the press of its name: ``x_y`` with ``XYPress``. Knobs with equal names
have equal values. While decoding, kvpress compresses every ``compression_interval`` steps.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import attrs
from transformers import PreTrainedModel

from kvpolicy.errors import error_summary
from kvpolicy.lab.bench.contenders.contender import KVPRESS, Contender
from kvpolicy.lab.bench.contenders.generate import generate_within
from kvpolicy.lab.sweep.grid import Cell


def presses_for(
    model: PreTrainedModel, cells: Sequence[Cell]
) -> tuple[dict[str, Contender], str | None]:
    """Find the press of each cell's policy.

    Args:
        model: The model.
        cells: The engine's plans.

    Returns:
        The presses by digest of the cell with the same policy, and the reason if there are none.
    """
    try:
        import kvpress

        _check_transformers()
    except ImportError as error:
        return {}, (
            f"{KVPRESS} cannot be imported ({error_summary(error)}); in a new environment, from a "
            "clone of kvpolicy: pip install -e '.[benchmarks]'"
        )
    presses = {
        cell.digest: press
        for cell in cells
        if (press := _press_for(kvpress, model, cell)) is not None
    }
    if not presses:
        return {}, f"{KVPRESS} has no press with the name of one of these policies"
    # Plans that differ only in knobs have presses with the same name.
    counts = Counter(press.name for press in presses.values())
    for cell in cells:
        press = presses.get(cell.digest)
        if press is not None and counts[press.name] > 1:
            presses[cell.digest] = attrs.evolve(press, name=f"{press.name} ({cell.series})")
    return presses, None


def _check_transformers() -> None:
    """Raise `ImportError` if the installed kvpress needs another transformers: it fails late."""
    from packaging.requirements import Requirement  # installed with kvpress

    try:
        lines = requires(KVPRESS) or ()
    except PackageNotFoundError:
        return
    installed = version("transformers")
    for requirement in map(Requirement, lines):
        if requirement.name == "transformers" and not requirement.specifier.contains(
            installed, prereleases=True
        ):
            msg = f"it needs {requirement}, and {installed} is installed"
            raise ImportError(msg)


def _press_for(library: Any, model: PreTrainedModel, cell: Cell) -> Contender | None:
    """The press for a plan that has the same single policy in all layers.

    Presses that compress while decoding have no prompts that stay.
    """
    layer = cell.resolved.layers[0]
    if any(attrs.evolve(one, layer_idx=0) != layer for one in cell.resolved.layers):
        return None
    if len(layer.stack) != 1 or layer.budget is None or not layer.bounded or layer.keeps_prompt:
        return None
    (spec,) = layer.stack
    names = {name.casefold(): name for name in dir(library)}
    press: Any = getattr(library, names.get(f"{spec.policy.replace('_', '')}press", ""), None)
    if not isinstance(press, type) or not issubclass(press, library.ScorerPress):
        return None
    fields = {field.name for field in dataclasses.fields(press)}
    knobs = {name: value for name, value in spec.knobs.items() if name in fields}
    budget, interval = layer.budget, layer.buffer

    def decoding() -> AbstractContextManager[None]:
        press_while_decoding = library.DecodingPress(
            base_press=press(**knobs), compression_interval=interval, target_size=budget
        )
        context: AbstractContextManager[None] = press_while_decoding(model)
        return context

    return generate_within(
        f"{KVPRESS} {press.__name__}",
        model,
        decoding,
        budget=budget,
        policy=spec.policy,
        period=interval,
    )
