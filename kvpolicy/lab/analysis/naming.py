"""What users call cells, and what tells cells apart."""

from collections.abc import Sequence

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.hooks.discovery import nearest
from kvpolicy.lab.analysis.pooling import PooledCell
from kvpolicy.lab.store.records import EvalSettingRecord

# What follows from other settings, or is told in another way.
_UNTOLD = ("group", "seed", "prompt_hash", "n", "columns", "measure", "temperature", "top_p")
_FEWEST_DIGITS = 4  # of an id; fewer may well be a word


def find_cell(cells: Sequence[PooledCell], text: str) -> PooledCell:
    """The cell that a user means.

    Args:
        cells: What there is.
        text: ``SERIES@BUDGET``, ``SERIES`` if it has one budget only, the beginning of either if
            it can be no other, or the first digits of an id; each with ``RUN:`` before it, if
            need be, the name of the run's folder.

    Raises:
        ResultsError: It is none, or several.
    """
    found = _meant(cells, text)
    if len(found) == 1:
        return found[0]
    if found:
        raise ResultsError(_ambiguous(text, found))
    hint = nearest(text, list(dict.fromkeys(cell.name for cell in cells)))
    msg = (
        f"the runs have no cell {text!r}{hint}; SERIES@BUDGET or the first digits of an id will do."
    )
    raise ResultsError(msg)


def pairs_with(cells: Sequence[PooledCell], text: str) -> list[tuple[PooledCell, PooledCell]]:
    """Every cell with the one that a user means, of the same model and task.

    Args:
        cells: What there is.
        text: As for `find_cell`; a series may be there once for each model and task.

    Returns:
        Pairs of another cell and the one that is meant. A model or task that has none has no
        pair.

    Raises:
        ResultsError: No model or task has one, or one of them several.
    """
    blocks: dict[object, list[PooledCell]] = {}
    for cell in cells:
        blocks.setdefault(cell.block, []).append(cell)
    having = [block for block in blocks.values() if _meant(block, text)]
    if not having:
        find_cell(cells, text)  # says what there is
    found = [(block, find_cell(block, text)) for block in having]
    return [(cell, one) for block, one in found for cell in block if cell is not one]


def budget_word(budget: float | None) -> str:
    """A budget as users write it."""
    return "all" if budget is None else f"{budget:g}"


def differing(cells: Sequence[PooledCell]) -> list[str]:
    """Names of the settings by which cells differ, beyond their plans.

    Args:
        cells: The cells.
    """
    names = [field.name for field in attrs.fields(EvalSettingRecord) if field.name not in _UNTOLD]
    told = [name for name in (*names, "version") if len({setting(c, name) for c in cells}) > 1]
    models = {cell.group.model for cell in cells}
    if len({(cell.group.model, cell.group.model_fingerprint) for cell in cells}) == len(models):
        told = [name for name in told if name != "model_fingerprint"]  # the name tells as much
    several_seeds = any(len(cell.seeds) > 1 for cell in cells)
    return [*told, "seeds"] if several_seeds or len({c.seeds for c in cells}) > 1 else told


def setting(cell: PooledCell, name: str) -> str:
    """What a cell has for a setting, in a word.

    Args:
        cell: The cell.
        name: A name that `differing` gave.
    """
    if name == "seeds":
        return ",".join(map(str, cell.seeds))
    return cell.version if name == "version" else str(getattr(cell.group, name))


def told_apart(cells: Sequence[PooledCell]) -> list[str]:
    """Names of cells, each with the settings by which some of them differ.

    Args:
        cells: The cells.
    """
    names = [one for one in differing(cells) if len({setting(cell, one) for cell in cells}) > 1]
    return [
        ", ".join([cell.name, *(f"{name} {setting(cell, name)}" for name in names)])
        for cell in cells
    ]


def _of_run(cells: Sequence[PooledCell], text: str) -> tuple[str, list[PooledCell]]:
    """Take the name of a run off; a colon may also belong to a series."""
    run, colon, name = text.partition(":")
    among = [cell for cell in cells if run in cell.runs] if colon else []
    return (name, among) if among else (text, list(cells))


def _meant(cells: Sequence[PooledCell], text: str) -> list[PooledCell]:
    name, among = _of_run(cells, text)
    for means in (_has_name, _has_series, _has_id, _begins):
        found = [cell for cell in among if means(cell, name)]
        if found:
            return found
    return []


def _has_name(cell: PooledCell, text: str) -> bool:
    return text.casefold() in (
        cell.name.casefold(),
        f"{cell.series}@{budget_word(cell.budget)}".casefold(),
    )


def _has_series(cell: PooledCell, text: str) -> bool:
    return cell.series.casefold() == text.casefold()


def _has_id(cell: PooledCell, text: str) -> bool:
    return len(text) >= _FEWEST_DIGITS and any(id.startswith(text) for id in cell.cells)


def _begins(cell: PooledCell, text: str) -> bool:
    return bool(text) and cell.name.casefold().startswith(text.casefold())


def _ambiguous(text: str, found: Sequence[PooledCell]) -> str:
    said = told_apart(found)
    return (
        f"{text!r} may be any of {len(found)} cells: {'; '.join(said[:4])}"
        f"{'; ...' if len(said) > 4 else ''}; say SERIES@BUDGET, narrow it with --model, --task "
        "or --seed, or write RUN:CELL."
    )
