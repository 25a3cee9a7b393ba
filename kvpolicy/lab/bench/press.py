"""kvpress beside the engine, where it is installed: the same policy, budget and interval.

A policy is compared with the press of its name, whatever that is: ``x_y`` with ``XYPress``.
Knobs of the same name get the same values. kvpress compresses while decoding by a
``DecodingPress`` around such a press, once every ``compression_interval`` steps.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import attrs
from transformers import PreTrainedModel

from kvpolicy.errors import error_summary
from kvpolicy.lab.bench.baselines import timed_generate
from kvpolicy.lab.bench.contender import Contender
from kvpolicy.lab.sweep.grid import Cell

LIBRARY = "kvpress"

_HOW = "in a new environment, from a clone of kvpolicy: pip install -e '.[benchmarks]'"


@attrs.frozen
class Presses:
    """The presses that take part.

    Attributes:
        contenders: By the digest of the cell whose policy they share.
        absent: Why there are none, if there are none.
    """

    contenders: dict[str, Contender]
    absent: str | None = None


def presses_for(model: PreTrainedModel, cells: list[Cell]) -> Presses:
    """Find the press of each cell's policy.

    Args:
        model: The model.
        cells: The engine's plans.

    Returns:
        Those that there are.
    """
    try:
        import kvpress
    except ImportError as error:
        return Presses({}, f"{LIBRARY} cannot be imported ({error_summary(error)}); {_HOW}")
    unmet = _unmet(LIBRARY, "transformers")
    if unmet is not None:
        return Presses({}, f"{LIBRARY} needs {unmet}; {_HOW}")
    found = {
        cell.digest: contender
        for cell in cells
        if (contender := _press_for(kvpress, model, cell)) is not None
    }
    absent = None if found else f"{LIBRARY} has no press of these policies' names"
    return Presses(_told_apart(found, cells), absent)


def _told_apart(found: dict[str, Contender], cells: list[Cell]) -> dict[str, Contender]:
    """Presses of one name with the series of their plan: plans may differ in knobs alone."""
    known = Counter(one.name for one in found.values())
    series = {cell.digest: cell.series for cell in cells}
    return {
        digest: one
        if known[one.name] == 1
        else attrs.evolve(one, name=f"{one.name} ({series[digest]})")
        for digest, one in found.items()
    }


def _unmet(library: str, package: str) -> str | None:
    """What an installed library wants of a package and does not get, in words."""
    from packaging.requirements import Requirement  # comes with the extra

    try:
        wanted = [Requirement(line) for line in requires(library) or ()]
    except PackageNotFoundError:
        return None
    here = version(package)
    for one in wanted:
        if one.name == package and not one.specifier.contains(here, prereleases=True):
            return f"{one}, and {here} is installed"
    return None


def _press_for(library: Any, model: PreTrainedModel, cell: Cell) -> Contender | None:
    """The press of a plan that does the same in all layers, by one policy."""
    layer = cell.resolved.layers[0]
    if any(attrs.evolve(one, layer_idx=0) != layer for one in cell.resolved.layers):
        return None
    if len(layer.stack) != 1 or layer.budget is None or not layer.bounded:
        return None
    (spec,) = layer.stack
    press = _named(library, spec.policy)
    if press is None:
        return None
    shared = {field.name for field in _fields(press)} & spec.knobs.keys()
    knobs = {name: spec.knobs[name] for name in sorted(shared)}
    budget, interval = layer.budget, layer.buffer

    def around() -> AbstractContextManager[None]:
        decoding = library.DecodingPress(
            base_press=press(**knobs), compression_interval=interval, target_size=budget
        )
        block: Callable[..., AbstractContextManager[None]] = decoding
        return block(model)

    return Contender(f"{LIBRARY} {press.__name__}", timed_generate(model, around), budget)


def _named(library: Any, policy: str) -> Any:
    """The scoring press with a policy's name, if there is one."""
    wanted = f"{policy.replace('_', '')}press".casefold()
    for name in dir(library):
        press = getattr(library, name)
        is_scorer = isinstance(press, type) and issubclass(press, library.ScorerPress)
        if name.casefold() == wanted and is_scorer:
            return press
    return None


def _fields(theirs: Any) -> list[Any]:
    return list(theirs.__dataclass_fields__.values())
