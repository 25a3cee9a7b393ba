"""Which layers of a model a group of a plan is about, and whether every layer is covered once."""

import re
from collections.abc import Collection, Sequence

from kvpolicy.errors import CoverageError, PlanError
from kvpolicy.plan.spec import LayerGroup

_END = r" *(-?[0-9]{1,9})? *"
#: A text that names layers, for editors, too: a slice as in Python, whose step is not 0.
WHERE = rf"^(all|{_END}:{_END}(: *(-?0{{0,8}}[1-9][0-9]{{0,8}})? *)?)$"


def slice_of(text: str, name: str) -> slice:
    """``"all"``, ``"0:2"``, ``"-2:"`` as a slice of the layers."""
    if text == "all":
        return slice(None)
    if not re.fullmatch(WHERE, text):
        msg = (
            f'{name}: where = "{text:.60}" names no layers; write "all", a slice such as "0:2" '
            'or "-2:", or a list such as [0, 5]'
        )
        raise PlanError(msg)
    return slice(*(int(part) if part.strip() else None for part in text.split(":")))


def layers_of(where: str | tuple[int, ...], num_layers: int, name: str) -> list[int]:
    """The layers a group is about, in the order it names them.

    Args:
        where: What the group says.
        num_layers: Layers of the model.
        name: Name of the plan, for messages.

    Raises:
        PlanError: If it names none, or one that the model does not have.
    """
    if isinstance(where, str):
        found = list(range(num_layers))[slice_of(where, name)]
    else:
        outside = [layer for layer in where if not -num_layers <= layer < num_layers]
        if outside:
            msg = f"{name} names layer {outside[0]}; the model has layers 0 to {num_layers - 1}"
            raise PlanError(msg)
        found = [layer % num_layers for layer in where]
    if not found:
        msg = f"{name}: {where!r} covers none of the model's {num_layers} layers"
        raise PlanError(msg)
    return found


def covered_twice(layers: Sequence[int], group: LayerGroup, name: str) -> CoverageError:
    """What is raised for layers that a group covers although they are covered already."""
    return CoverageError(f"{name} covers {named(layers)} twice, again in {group.where!r}")


def gap_errors(covered: Collection[int], num_layers: int, name: str) -> list[CoverageError]:
    """What is raised for layers that no group covers, one error for layers side by side."""
    gaps: list[list[int]] = []
    for layer_idx in range(num_layers):
        if layer_idx in covered:
            continue
        if gaps and gaps[-1][-1] == layer_idx - 1:
            gaps[-1].append(layer_idx)
        else:
            gaps.append([layer_idx])
    model = f"of 0 to {num_layers - 1}"
    return [CoverageError(f"{name} does not cover {named(gap)} {model}") for gap in gaps]


def coverage_errors(groups: Sequence[LayerGroup], num_layers: int, name: str) -> list[PlanError]:
    """Everything that is wrong with who covers what.

    Gaps are not complained about as long as a group names layers that do not exist: it may be
    meant to fill them.
    """
    found: list[PlanError] = []
    covered: set[int] = set()
    all_clear = True
    for group in groups:
        try:
            layers = layers_of(group.where, num_layers, name)
        except PlanError as error:
            found.append(error)
            all_clear = False
            continue
        twice = [layer for i, layer in enumerate(layers) if layer in covered.union(layers[:i])]
        if twice:
            found.append(covered_twice(twice, group, name))
        covered.update(layers)
    return [*found, *(gap_errors(covered, num_layers, name) if all_clear else [])]


def named(layers: Sequence[int]) -> str:
    """``[0, 1, 2]``, rising, as "layers 0 to 2"."""
    first, last = layers[0], layers[-1]
    if first == last:
        return f"layer {first}"
    if list(layers) == list(range(first, last + 1)):
        return f"layers {first} to {last}"
    return f"layers {', '.join(map(str, layers))}"
