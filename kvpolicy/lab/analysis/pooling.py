"""Pool the cells of one or several runs over seeds.

Two seeds of a task may contain the same question, and every seed of a small question set contains
the whole set. So pooled samples are identified by their *question*, not by the number of the item
in its seed: intervals count questions, and two cells are compared on the questions of both.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import attrs

from kvpolicy.entry_points import nearest
from kvpolicy.errors import ResultsError
from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import CellRecord, CellTiming, EvalSettingRecord, ItemRecord, Sample
from kvpolicy.lab.tasks.likelihood import Agreement, Perplexity
from kvpolicy.lab.tasks.repetition import Repetition
from kvpolicy.lab.tasks.task import ACCURACY, LENGTH, Column, mean_of
from kvpolicy.quantities import exact_bytes

# Fields in which pooled evaluation settings may differ: the seed, and what follows from it.
_SEED_FIELDS = ("group", "seed", "n", "prompt_hash")

# Columns with their own estimate; a column of an unknown task is the mean of its values.
_KNOWN_COLUMNS = {
    column.name: column
    for column in (
        ACCURACY,
        *Perplexity().columns,
        *Agreement().columns,
        *Repetition().columns,
    )
}

Keep = Callable[[EvalSettingRecord, CellRecord], bool]
_BlockKey = Callable[[EvalSettingRecord], object]
_ItemNumber = Callable[[EvalSettingRecord, int], int]
_StoredCell = tuple[RunFolder, EvalSettingRecord, CellRecord]


@attrs.frozen(eq=False)
class PooledCell:
    """Cells that differ only in the seed and the number of items.

    Attributes:
        record: The first cell. Where its block has another plan of this name and size, as of two
            runs with other buffers, its series also says what tells them apart.
        group: Its evaluation setting.
        block: Equal for cells that are compared with each other: those of one version of
            kvpolicy and one evaluation setting.
        version: Version of kvpolicy that computed the cells.
        cells: Ids of all cells.
        groups: Ids of their evaluation settings.
        runs: Names of the folders they come from.
        seeds: Their seeds.
        samples: Their samples, each once, by item and attempt; ``item`` is the number of the
            question, and ``cell`` the id of the first cell.
        items: Items by number of the question.
        timings: The timing of each cell; empty if one of them was interrupted.
        num_expected: Samples when all cells are complete.
        run_series: Name of the plan in its run.
    """

    record: CellRecord
    group: EvalSettingRecord
    block: object = attrs.field(repr=False)
    version: str
    cells: tuple[str, ...]
    groups: tuple[str, ...]
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    samples: tuple[Sample, ...] = attrs.field(repr=False)
    items: Mapping[int, ItemRecord] = attrs.field(repr=False)
    timings: tuple[CellTiming, ...]
    num_expected: int
    run_series: str = attrs.field()

    @run_series.default
    def _as_recorded(self) -> str:
        return self.record.series

    @property
    def id(self) -> str:
        """Id of the first cell, which is the ``cell`` of all `samples`."""
        return self.record.cell

    @property
    def series(self) -> str:
        """Name of the plan in tables and plots, without its budget."""
        return self.record.series

    @property
    def budget(self) -> float | None:
        """Rows kept by a compaction; ``None`` if nothing is evicted."""
        return self.record.budget

    @property
    def byte_limits(self) -> tuple[int, ...]:
        """The bytes per sequence that it was run for; empty if it was run for budgets."""
        return self.record.byte_limits

    @property
    def sizes(self) -> list[str]:
        """Its sizes as users write them: bytes such as ``256KiB`` if it was run for these."""
        if self.byte_limits:
            return [exact_bytes(limit) for limit in self.byte_limits]
        return [] if self.budget is None else [f"{self.budget:g}"]

    @property
    def name(self) -> str:
        """The plan as users write it: ``SERIES@BUDGET``, or ``SERIES@BYTES``."""
        return self.series if self.budget is None else f"{self.series}@{self.sizes[0]}"

    def is_of(self, series: str) -> bool:
        """Whether it belongs to a series of this name, here or in its run, whatever the case."""
        names = self.series.casefold(), self.run_series.casefold()
        return series.casefold() in names

    @cached_property
    def by_item(self) -> dict[int, list[Sample]]:
        """Samples of each item, in order of items and attempts."""
        found: dict[int, list[Sample]] = {}
        for sample in self.samples:
            found.setdefault(sample.item, []).append(sample)
        return found

    @property
    def facets(self) -> list[str]:
        """What its samples can be broken down by."""
        return list(dict.fromkeys(name for one in self.samples for name in one.facet_names))

    def by_facet(self, facet: str) -> dict[int | str, list[Sample]]:
        """Samples, or parts of samples, by their value of a facet."""
        found: dict[int | str, list[Sample]] = {}
        for sample in self.samples:
            for value, part in sample.by_facet(facet):
                found.setdefault(value, []).append(part)
        return found

    @cached_property
    def timing(self) -> CellTiming | None:
        """Timing of all cells, run one after the other; ``None`` if one was interrupted."""
        if not self.timings:
            return None
        return CellTiming(
            cell=self.id,
            num_requests=sum(one.num_requests for one in self.timings),
            new_tokens=sum(one.new_tokens for one in self.timings),
            elapsed_s=sum(one.elapsed_s for one in self.timings),
            policy_s=sum(one.policy_s for one in self.timings),
            decode_s=sum(one.decode_s for one in self.timings),
            peak_kv_bytes=max(one.peak_kv_bytes for one in self.timings),
            compile_s=sum(one.compile_s for one in self.timings),
        )

    def counts(self) -> dict[str, int]:
        """Numbers of samples: finished, expected, truncated, failed and ungraded."""
        return {
            "num_samples": len(self.samples),
            "num_expected": self.num_expected,
            "num_truncated": sum(one.finish_reason == "length" for one in self.samples),
            "num_errors": sum(one.finish_reason == "error" for one in self.samples),
            "num_ungraded": sum(one.ungraded is not None for one in self.samples),
        }


def pool(runs: Sequence[RunFolder], keep: Keep = lambda group, cell: True) -> list[PooledCell]:
    """Pool cells that differ only in their seed, whatever their plans are called.

    Args:
        runs: The runs; a cell that is in several of them counts once.
        keep: Selects cells.

    Returns:
        The pooled cells in the order of the runs; those of one block are adjacent.
    """
    return _pool(runs, _settings, _QuestionNumbers(runs).number, keep)


def pool_by_seed(runs: Sequence[RunFolder]) -> list[PooledCell]:
    """Merge the cells of several runs, as `pool` does, but keep seeds apart.

    Args:
        runs: The runs.

    Returns:
        Cells of one seed each; ``item`` of their samples is the number in the seed.
    """
    return _pool(runs, lambda group: group.group, lambda group, item: item)


def is_by_bytes(cells: Iterable[PooledCell]) -> bool:
    """Whether cells are to be shown by their bytes per sequence: some were run for bytes.

    Args:
        cells: The cells.
    """
    cells = list(cells)
    return any(cell.byte_limits for cell in cells) and all(
        cell.record.bytes_per_sequence is not None for cell in cells
    )


def blocks_of(cells: Iterable[PooledCell]) -> list[list[PooledCell]]:
    """Group cells by `PooledCell.block`, in the order of the cells."""
    blocks: dict[object, list[PooledCell]] = {}
    for cell in cells:
        blocks.setdefault(cell.block, []).append(cell)
    return list(blocks.values())


def columns_of(group: EvalSettingRecord) -> Sequence[Column]:
    """The columns of an evaluation setting; the first one is compared between cells.

    Args:
        group: The evaluation setting. A column of a task that kvpolicy does not know is the mean
            of the values of its name.
    """
    return [
        _KNOWN_COLUMNS.get(one.name)
        or mean_of(
            one.name,
            one.title,
            one.heading,
            is_share=one.is_share,
            more_is_better=one.more_is_better,
        )
        for one in group.columns
    ]


def column_of(group: EvalSettingRecord, name: str | None) -> Column:
    """One column of an evaluation setting, or ``length``, which every setting has.

    Args:
        group: The evaluation setting.
        name: Name of the column; the first column if not given.

    Raises:
        ResultsError: The setting has no such column.
    """
    columns = columns_of(group)
    if name is None:
        return columns[0]
    known = {column.name: column for column in (*columns, LENGTH)}
    if name not in known:
        msg = f"task '{group.task}' was not measured by {name!r}{nearest(name, known)}"
        raise ResultsError(msg)
    return known[name]


def _settings(group: EvalSettingRecord) -> object:
    plain = attrs.asdict(group, recurse=False, filter=lambda f, _: f.name not in _SEED_FIELDS)
    return tuple(plain.items())


def _pool(
    runs: Sequence[RunFolder],
    block_key: _BlockKey,
    number: _ItemNumber,
    keep: Keep = lambda group, cell: True,
) -> list[PooledCell]:
    """Pool cells with equal version, block key and plan."""
    blocks: dict[object, dict[str, list[_StoredCell]]] = {}
    for run in runs:
        for cell in run.cells.values():
            group = run.groups[cell.group]
            if keep(group, cell):
                block = blocks.setdefault((run.version, block_key(group)), {})
                block.setdefault(cell.plan, []).append((run, group, cell))
    return [
        cell
        for key, block in blocks.items()
        for cell in _told_apart([_pooled(key, stored, number) for stored in block.values()])
    ]


def _told_apart(cells: Sequence[PooledCell]) -> list[PooledCell]:
    """Cells of one block: a series with several plans of one size says which each of them is.

    It does so by the buffer, as in a sweep that tries several, or else by the digest of the plan.
    """
    series_of: dict[str, list[PooledCell]] = {}
    for cell in cells:
        series_of.setdefault(cell.series, []).append(cell)
    changes: dict[str, str] = {}
    for of_series in series_of.values():
        if len({cell.name for cell in of_series}) == len(of_series):
            continue
        sizes = {(cell.name, cell.record.buffer) for cell in of_series}
        for cell in of_series:
            buffer = cell.record.buffer
            if buffer is not None and len(sizes) == len(of_series):
                changes[cell.id] = f"buffer={buffer:g}"
            else:
                changes[cell.id] = f"plan={cell.record.plan[:8]}"
    return [_with_series(cell, changes.get(cell.id)) for cell in cells]


def _with_series(cell: PooledCell, change: str | None) -> PooledCell:
    if change is None:
        return cell
    return attrs.evolve(cell, record=attrs.evolve(cell.record, series=f"{cell.series}, {change}"))


def _pooled(block: object, stored: Sequence[_StoredCell], number: _ItemNumber) -> PooledCell:
    first_run, first_group, first_cell = stored[0]
    samples: dict[str, Sample] = {}
    items: dict[int, ItemRecord] = {}
    expected: dict[int, int] = {}
    timings: dict[str, CellTiming] = {}
    for run, group, cell in stored:
        expected[group.seed] = max(expected.get(group.seed, 0), group.n * group.attempts)
        if cell.cell in run.timings:
            timings.setdefault(cell.cell, run.timings[cell.cell])
        for sample in run.samples_of[cell.cell]:
            item = number(group, sample.item)
            samples[sample.key] = attrs.evolve(sample, cell=first_cell.cell, item=item)
            record = run.items.get((group.group, sample.item))
            if record is not None:
                items.setdefault(item, record)
    ids = dict.fromkeys(cell.cell for _, _, cell in stored)
    return PooledCell(
        record=first_cell,
        group=first_group,
        block=block,
        version=first_run.version,
        cells=tuple(ids),
        groups=tuple(dict.fromkeys(group.group for _, group, _ in stored)),
        runs=tuple(dict.fromkeys(run.path.name for run, _, _ in stored)),
        seeds=tuple(sorted(expected)),
        samples=tuple(sorted(samples.values(), key=lambda one: (one.item, one.attempt))),
        items=items,
        timings=tuple(timings[id] for id in ids) if timings.keys() == ids.keys() else (),
        num_expected=sum(expected.values()),
    )


class _QuestionNumbers:
    """Numbers questions across seeds, models and runs.

    Items of one model are the same question if their texts are equal. Items of two models, whose
    chat templates give the same question different prompts, are the same question if task, split,
    seed, number, answer and reference are equal. Without an answer and a reference the prompts must
    be equal, too: passages that two tokenizers cut are different texts.
    """

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._of_text: dict[object, int] = {}
        self._of_answer: dict[object, int] = {}
        self._of_position: dict[object, int] = {}
        self._of_item: dict[tuple[str, int], int] = {}
        self._seen: set[object] = set()
        self._unused = itertools.count()
        for run in runs:
            for (group_id, item), record in run.items.items():
                if group_id in run.groups:
                    self._of_item[group_id, item] = self._find(run.groups[group_id], record)

    def number(self, group: EvalSettingRecord, item: int) -> int:
        """Number of an item's question; items without a record are identified by their number."""
        found = self._of_item.get((group.group, item))
        if found is None:
            found = self._of_position.get(_position(group, item))
        if found is None:
            found = self._of_position[_position(group, item)] = next(self._unused)
        return found

    def _find(self, group: EvalSettingRecord, record: ItemRecord) -> int:
        text = (group.model, group.task, record.prompt, record.answer, record.reference)
        position = _position(group, record.item)
        is_known = bool(record.answer) or record.reference is not None
        expected = (record.answer, record.reference) if is_known else record.prompt
        answer = (position, expected)
        number = self._of_text.get(text)
        if number is None and (group.model, answer) not in self._seen:
            number = self._of_answer.get(answer)
        if number is None:
            number = next(self._unused)
        self._of_text[text] = number
        self._of_answer.setdefault(answer, number)
        self._of_position.setdefault(position, number)
        self._seen.add((group.model, answer))
        return number


def _position(group: EvalSettingRecord, item: int) -> object:
    return group.task, group.split, group.seed, item
