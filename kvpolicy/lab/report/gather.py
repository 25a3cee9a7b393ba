"""The cells that a report shows, as groups: pooled over seeds, and of each seed."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.pooling import Keep, PooledCell, blocks_of, pool, pool_by_seed
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import EvalSettingRecord, ItemRecord, Sample


@attrs.frozen(eq=False)
class GroupView:
    """The cells of one evaluation setting, of one seed or pooled over seeds.

    Attributes:
        cells: Its cells that have samples; at least one.
        groups: Ids of the evaluation setting, one for each seed.
        num_expected: Number of samples once all runs are complete.
    """

    cells: list[PooledCell]
    groups: tuple[str, ...]
    num_expected: int

    @property
    def group(self) -> EvalSettingRecord:
        """The evaluation setting, or the first of several that differ in their seed."""
        return self.cells[0].group

    @property
    def version(self) -> str:
        """Version of kvpolicy that computed the cells."""
        return self.cells[0].version

    @property
    def is_pooled(self) -> bool:
        """Whether several seeds are pooled."""
        return len(self.seeds) > 1

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that have samples."""
        return tuple(sorted({sample.seed for sample in self.samples}))

    @cached_property
    def labels(self) -> list[str]:
        """A short unique name for each cell."""
        return [
            cell.series if cell.budget is None else f"{cell.series} {cell.sizes[0]}"
            for cell in self.cells
        ]

    @cached_property
    def items(self) -> Mapping[int, ItemRecord]:
        """Items by number."""
        return {number: item for cell in self.cells for number, item in cell.items.items()}

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
    single = {(view.version, view.group.group): view for view in _views(pool_by_seed(runs))}
    found: list[GroupView] = []
    for view in pooled(runs):
        if view.is_pooled:
            found.append(view)
        # A group is in two pooled views if its model was given under two names.
        keys = [(view.version, name) for name in view.groups]
        found += [single.pop(key) for key in keys if key in single]
    if not found:
        names = ", ".join(str(run.path) for run in runs)
        msg = f"{names}: no sample is done yet; try again when the first one is."
        raise ResultsError(msg)
    return found


def pooled(runs: Sequence[RunFolder], keep: Keep = lambda group, cell: True) -> list[GroupView]:
    """Merge runs and pool seeds.

    Args:
        runs: The runs.
        keep: Selects cells.

    Returns:
        A group for each model, task and settings with samples.
    """
    return _views(pool(runs, keep))


def _views(cells: Iterable[PooledCell]) -> list[GroupView]:
    return [
        GroupView(
            cells=[cell for cell in block if cell.samples],
            groups=tuple(dict.fromkeys(name for cell in block for name in cell.groups)),
            num_expected=sum(cell.num_expected for cell in block),
        )
        for block in blocks_of(cells)
        if any(cell.samples for cell in block)
    ]
