"""Select runs and cells by the names that users type, and label cells unambiguously."""

from collections.abc import Callable, Sequence
from os.path import realpath
from pathlib import Path

import attrs

from kvpolicy.entry_points import nearest
from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.pooling import Keep, PooledCell, blocks_of
from kvpolicy.lab.store.read import RunFolder, find_runs, read_run
from kvpolicy.lab.store.records import CellRecord, EvalSettingRecord
from kvpolicy.quantities import exact_bytes

RUNS = Path("kvpolicy-ablate")  # the default output folder of `kvpolicy ablate`

# Settings that follow from others, or that tables show in another way.
_IGNORED_SETTINGS = frozenset(
    {"group", "seed", "prompt_hash", "n", "columns", "measure", "temperature", "top_p"}
)
_MIN_ID_DIGITS = 4  # fewer may be the beginning of a name


def open_runs(names: Sequence[str], *, warn: Callable[[str], None]) -> list[RunFolder]:
    """Read runs.

    Args:
        names: Folders of runs, folders that contain some, or names of folders in
            ``kvpolicy-ablate``.
        warn: Is called with a sentence for everything that is missing or cannot be read.

    Raises:
        ResultsError: One of them has no run, or a run cannot be read.
    """
    found: dict[str, RunFolder] = {}
    for name in names:
        folder = Path(name)
        if not folder.exists() and (RUNS / name).exists():
            folder = RUNS / name
        inside = find_runs(folder, warn=warn) if folder.is_dir() else []
        for path in inside or [folder]:
            found.setdefault(realpath(path), read_run(path))
    for run in found.values():
        for problem in run.problems:
            warn(problem)
    return list(found.values())


def select(
    runs: Sequence[RunFolder],
    *,
    series: Sequence[str] | None = None,
    budgets: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
) -> Keep:
    """Build a filter of cells from what the user typed; options not given keep all cells.

    Args:
        runs: The runs to select from.
        series: Names of series, in upper or lower case.
        budgets: Numbers, or ``"all"`` for cells that evict nothing; bytes, such as ``"256KiB"``,
            for those that were run for bytes.
        models: Models as the user typed them for the run.
        tasks: Tasks with their options.
        seeds: Seeds.

    Raises:
        ResultsError: The runs have nothing of such a name, or no cell of all these names.
    """
    cells = [cell for run in runs for cell in run.cells.values()]
    groups = [group for run in runs for group in run.groups.values()]
    folded = [name.casefold() for name in series or ()]
    _check_known("series", folded, [cell.series.casefold() for cell in cells])
    _check_known("budget", budgets, [size for cell in cells for size in _sizes(cell)])
    _check_known("model", models, [group.model for group in groups])
    _check_known("task", tasks, [group.task for group in groups])
    _check_known("seed", seeds, [group.seed for group in groups])

    def keep(group: EvalSettingRecord, cell: CellRecord) -> bool:
        return (
            (not folded or cell.series.casefold() in folded)
            and (not budgets or any(size in budgets for size in _sizes(cell)))
            and (not models or group.model in models)
            and (not tasks or group.task in tasks)
            and (not seeds or group.seed in seeds)
        )

    if cells and not any(
        keep(run.groups[cell.group], cell) for run in runs for cell in run.cells.values()
    ):
        msg = "no cell of the runs has all that was selected; leave out one of the options"
        raise ResultsError(msg)
    return keep


def check_facet(cells: Sequence[PooledCell], facet: str | None) -> None:
    """Refuse a facet that no sample has.

    Args:
        cells: The cells to break down.
        facet: Name of the facet, if one was given.

    Raises:
        ResultsError: No sample of the cells has it.
    """
    found = {name for cell in cells for sample in cell.samples for name in sample.facet_names}
    known = sorted(found)
    if facet is not None and facet not in known:
        msg = f"no sample of the runs has a facet {facet!r}{nearest(facet, known)}"
        raise ResultsError(msg)


def find_cell(cells: Sequence[PooledCell], text: str) -> PooledCell:
    """Find the cell that a user names.

    Args:
        cells: The cells.
        text: ``SERIES@BUDGET`` or ``SERIES@BYTES``, ``SERIES`` if it has one budget only, an
            unambiguous beginning of either, or the first digits of an id; each optionally after
            ``RUN:``, the name of the run's folder.

    Raises:
        ResultsError: No cell or several cells have this name.
    """
    found = _matches(cells, text)
    if len(found) == 1:
        return found[0]
    if found:
        labels = unique_labels(found)
        msg = (
            f"{text!r} may be any of {len(found)} cells: {'; '.join(labels[:4])}"
            f"{'; ...' if len(labels) > 4 else ''}; give SERIES@BUDGET, narrow it with --model, "
            "--task or --seed, or write RUN:CELL."
        )
        raise ResultsError(msg)
    hint = nearest(text, list(dict.fromkeys(cell.name for cell in cells)))
    msg = f"the runs have no cell {text!r}{hint}; give SERIES@BUDGET or the first digits of an id."
    raise ResultsError(msg)


def pairs_with(
    cells: Sequence[PooledCell],
    texts: Sequence[str],
    is_compared: Keep,
) -> list[tuple[PooledCell, PooledCell]]:
    """Pair every cell with the baselines of the same model and task.

    Args:
        cells: The cells.
        texts: The baselines. Each is a cell, as in `find_cell`, or a series: a cell is then
            compared with that series at its own budget, or at the bytes that it was run for. Each
            model and task has its own.
        is_compared: Which cells are compared with a baseline, see `select`.

    Returns:
        Pairs of a cell and its baseline, no two cells twice. A cell without a baseline has none.

    Raises:
        ResultsError: No model and task has a baseline, one of them has several at a budget, or
            no cell has a baseline.
    """
    found: dict[frozenset[PooledCell], tuple[PooledCell, PooledCell]] = {}
    for text in texts:
        blocks = [block for block in blocks_of(cells) if _matches(block, text)]
        if not blocks:
            find_cell(cells, text)  # raises
        for block in blocks:
            for cell, baseline in _with_baseline(block, text):
                if is_compared(cell.group, cell.record):
                    found.setdefault(frozenset({cell, baseline}), (cell, baseline))
    if not found:
        msg = (
            f"no other cell can be compared with {' or '.join(map(repr, texts))}: a series is "
            "compared at its own budgets; name one cell, SERIES@BUDGET, or select more cells."
        )
        raise ResultsError(msg)
    return list(found.values())


def format_budget(budget: float | None) -> str:
    """A budget as users write it."""
    return "all" if budget is None else f"{budget:g}"


def _sizes(cell: CellRecord) -> list[str]:
    """What a user may select a cell by."""
    return [format_budget(cell.budget), *map(exact_bytes, cell.byte_limits)]


def differing_settings(cells: Sequence[PooledCell]) -> list[str]:
    """Names of the settings in which cells differ, besides their plans.

    Args:
        cells: The cells.
    """
    names = [f.name for f in attrs.fields(EvalSettingRecord) if f.name not in _IGNORED_SETTINGS]
    found = [
        name
        for name in (*names, "version")
        if len({format_setting(cell, name) for cell in cells}) > 1
    ]
    models = {cell.group.model for cell in cells}
    if len({(cell.group.model, cell.group.model_fingerprint) for cell in cells}) == len(models):
        found = [name for name in found if name != "model_fingerprint"]  # the name is enough
    if any(len(cell.seeds) > 1 for cell in cells) or len({cell.seeds for cell in cells}) > 1:
        found.append("seeds")
    return found


def format_setting(cell: PooledCell, name: str) -> str:
    """The value of a setting as text.

    Args:
        cell: The cell.
        name: A name from `differing_settings`.
    """
    if name == "seeds":
        return ",".join(map(str, cell.seeds))
    return cell.version if name == "version" else str(getattr(cell.group, name))


def unique_labels(cells: Sequence[PooledCell]) -> list[str]:
    """Names of cells, each with the settings in which the cells differ.

    Args:
        cells: The cells.
    """
    names = [
        name
        for name in differing_settings(cells)
        if len({format_setting(cell, name) for cell in cells}) > 1
    ]
    return [
        ", ".join([cell.name, *(f"{name} {format_setting(cell, name)}" for name in names)])
        for cell in cells
    ]


def _with_baseline(block: Sequence[PooledCell], text: str) -> list[tuple[PooledCell, PooledCell]]:
    """The other cells of a model and task, each with its baseline."""
    baselines = _matches(block, text)
    if len(baselines) == 1:
        return [(cell, baselines[0]) for cell in block if cell is not baselines[0]]
    sizes = [size for cell in baselines for size in cell.sizes]
    is_series = len({cell.series for cell in baselines}) == 1
    if not is_series or len(set(sizes)) < len(sizes):
        find_cell(block, text)  # raises: the name is ambiguous
    of_size = {size: cell for cell in baselines for size in cell.sizes}
    others = [cell for cell in block if cell not in baselines]
    return [(cell, of_size[size]) for cell in others for size in cell.sizes if size in of_size]


def _check_known(kind: str, selected: Sequence[object] | None, known: Sequence[object]) -> None:
    for name in selected or ():
        if name not in known:
            hint = nearest(str(name), map(str, dict.fromkeys(known)))
            msg = f"the runs have no {kind} {name!r}{hint}"
            raise ResultsError(msg)


def _matches(cells: Sequence[PooledCell], text: str) -> list[PooledCell]:
    """The cells that fit a name, by the first rule under which any fits."""
    run, colon, rest = text.partition(":")
    in_run = [cell for cell in cells if run in cell.runs] if colon else []
    # Without such a run, the colon belongs to the name of a series.
    name, candidates = (rest, in_run) if in_run else (text, list(cells))
    folded = name.casefold()
    is_id = len(name) >= _MIN_ID_DIGITS
    series, _, size = folded.rpartition("@")
    rules: tuple[Callable[[PooledCell], bool], ...] = (
        lambda cell: cell.is_of(series) and size in map(str.casefold, cell.sizes),
        lambda cell: cell.is_of(series) and size == format_budget(cell.budget),
        lambda cell: cell.is_of(name),
        lambda cell: is_id and any(one.startswith(name) for one in cell.cells),
        lambda cell: bool(name) and cell.name.casefold().startswith(folded),
    )
    for rule in rules:
        found = [cell for cell in candidates if rule(cell)]
        if found:
            return found
    return []
