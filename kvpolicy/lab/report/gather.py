"""Merging runs: groups that occur in several runs become one group."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.pooling import PooledCell, pool
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import CellRecord, CellTiming, EvalSettingRecord, ItemRecord, Sample


@attrs.frozen
class CellView:
    """A cell with its samples.

    Attributes:
        cell: The cell.
        samples: Its samples so far, in order of item and attempt.
        timing: Its timing; ``None`` if it was interrupted.
        timings: The timing of each seed.
        label: Its name, unique within the group.
    """

    cell: CellRecord
    samples: tuple[Sample, ...] = attrs.field(repr=False)
    timing: CellTiming | None
    timings: tuple[CellTiming, ...]
    label: str

    @property
    def id(self) -> str:
        """Its id in samples."""
        return self.cell.cell

    @property
    def series(self) -> str:
        """Line of a plot that it belongs to."""
        return self.cell.series

    @property
    def budget(self) -> float | None:
        """Rows that stay after a compaction; ``None`` if nothing is evicted."""
        return self.cell.budget

    @property
    def buffer(self) -> float | None:
        """Rows that may join before the next compaction; ``None`` if nothing is evicted."""
        return self.cell.buffer

    @property
    def digest(self) -> str:
        """Digest of the resolved plan."""
        return self.cell.plan

    @cached_property
    def by_item(self) -> dict[int, list[Sample]]:
        """Samples of each item, in order of items."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.item, []).append(sample)
        return found


@attrs.frozen
class GroupView:
    """A group with its cells from all runs.

    Attributes:
        group: The group, or the first of several that differ in their seed only.
        groups: Ids of these groups.
        version: Version of kvpolicy that computed it.
        seeds: Seeds of these groups.
        cells: Its cells that have samples.
        items: Its items, by number.
        num_expected: Number of samples once all runs are complete.
    """

    group: EvalSettingRecord
    groups: tuple[str, ...]
    version: str
    seeds: tuple[int, ...]
    cells: list[CellView]
    items: Mapping[int, ItemRecord] = attrs.field(repr=False)
    num_expected: int

    @property
    def is_pooled(self) -> bool:
        """Whether several seeds are pooled."""
        return len(self.seeds) > 1

    @cached_property
    def numbers(self) -> list[int]:
        """Numbers of the items that have samples, rising."""
        return sorted({item for cell in self.cells for item in cell.by_item})

    @cached_property
    def samples(self) -> list[Sample]:
        """Samples of all cells."""
        return [sample for cell in self.cells for sample in cell.samples]


def gather(runs: Sequence[RunFolder]) -> list[GroupView]:
    """Merge runs.

    Args:
        runs: The runs. A cell that occurs in several runs has the samples of all; cells of
            different versions of kvpolicy stay separate.

    Returns:
        The groups with at least one sample, each once, in the order of the runs. Groups that
        differ in their seed only follow one that pools them.

    Raises:
        ResultsError: No run has a sample, or one is damaged.
    """
    found: list[GroupView] = []
    single = _single(runs)
    for block in _blocks(runs):
        together = _pooled(block, runs)
        if together.is_pooled:
            found.append(together)
        # A group is in two blocks if its model was given under two names.
        keys = [(together.version, name) for name in together.groups]
        found += [single.pop(key) for key in keys if key in single]
    if not found:
        names = ", ".join(str(run.path) for run in runs)
        msg = f"{names}: no sample is done yet; try again when the first one is."
        raise ResultsError(msg)
    return found


def pooled(runs: Sequence[RunFolder]) -> list[GroupView]:
    """Merge runs and pool seeds.

    Args:
        runs: The runs.

    Returns:
        A group for each model, task and settings with samples.
    """
    return [_pooled(block, runs) for block in _blocks(runs)]


def _blocks(runs: Sequence[RunFolder]) -> list[list[PooledCell]]:
    """Pooled cells by equal task and settings, where at least one has samples."""
    blocks: dict[object, list[PooledCell]] = {}
    for cell in pool(runs):
        blocks.setdefault(cell.block, []).append(cell)
    return [block for block in blocks.values() if any(cell.samples for cell in block)]


def _pooled(block: Sequence[PooledCell], runs: Sequence[RunFolder]) -> GroupView:
    version, ids = block[0].version, {name for one in block for name in one.cells}
    mine = [run for run in runs if run.version == version]
    timings = {name: one for run in mine for name, one in run.timings.items()}
    done = [one for one in block if one.samples]
    views = [
        CellView(
            cell=one.cell,
            samples=tuple(sorted(one.samples, key=_item_and_attempt)),
            timing=one.timing,
            timings=tuple(timings[name] for name in one.cells) if one.timing else (),
            label=label,
        )
        for one, label in zip(done, _labels([one.cell for one in done]), strict=True)
    ]
    cells = [cell for run in mine for cell in run.cells.values()]
    return GroupView(
        group=done[0].group,
        groups=tuple(dict.fromkeys(cell.group for cell in cells if cell.cell in ids)),
        version=version,
        seeds=tuple(sorted({sample.seed for one in done for sample in one.samples})),
        cells=views,
        items={number: item for one in done for number, item in one.items.items()},
        num_expected=sum(one.num_expected for one in block),
    )


def _single(runs: Sequence[RunFolder]) -> dict[tuple[str, str], GroupView]:
    """The groups with samples, by version and id; ids do not depend on the version."""
    sharing: dict[tuple[str, str], list[RunFolder]] = {}
    for run in runs:
        for name in run.groups:
            sharing.setdefault((run.version, name), []).append(run)
    views = {
        key: _group(group_runs[0].groups[key[1]], group_runs) for key, group_runs in sharing.items()
    }
    return {key: view for key, view in views.items() if view.cells}


def _group(group: EvalSettingRecord, runs: Sequence[RunFolder]) -> GroupView:
    """A group from all runs of one version that have it."""
    cells: dict[str, CellRecord] = {}
    samples: dict[str, dict[str, Sample]] = {}
    items: dict[int, ItemRecord] = {}
    timings: dict[str, CellTiming] = {}
    for run in runs:
        mine = {name: cell for name, cell in run.cells.items() if cell.group == group.group}
        cells |= mine
        for name in mine:
            cell_samples = {sample.key: sample for sample in run.samples_of[name]}
            samples[name] = samples.get(name, {}) | cell_samples
        items |= {one.item: one for one in run.items.values() if one.group == group.group}
        timings |= run.timings
    done = [cell for name, cell in cells.items() if samples[name]]
    views = [
        CellView(
            cell=cell,
            samples=tuple(sorted(samples[cell.cell].values(), key=_item_and_attempt)),
            timing=timings.get(cell.cell),
            timings=(timings[cell.cell],) if cell.cell in timings else (),
            label=label,
        )
        for cell, label in zip(done, _labels(done), strict=True)
    ]
    return GroupView(
        group=group,
        groups=(group.group,),
        version=runs[0].version,
        seeds=(group.seed,),
        cells=views,
        items=items,
        num_expected=len(cells) * group.n * group.attempts,
    )


def _item_and_attempt(sample: Sample) -> tuple[int, int]:
    return sample.item, sample.attempt


def _labels(cells: Sequence[CellRecord]) -> list[str]:
    """A short unique name for each cell."""
    candidates = [
        [_short(cell) for cell in cells],
        [" ".join([_short(cell), *_knobs(cell)]) for cell in cells],
        [f"{_short(cell)} buffer {cell.buffer}" for cell in cells],
        [f"{_short(cell)} {cell.plan}" for cell in cells],
    ]
    return next((names for names in candidates if len(set(names)) == len(names)), candidates[-1])


def _short(cell: CellRecord) -> str:
    return cell.series if cell.budget is None else f"{cell.series} {cell.budget:g}"


def _knobs(cell: CellRecord) -> Iterable[str]:
    return (f"{name}={value}" for name, value in cell.knobs.items())
