"""Cells of one or several runs, with seeds taken together.

Two seeds of a task may ask the same question, and a set of thirty questions is asked whole by
every seed. So samples are told apart by their *question*, not by the number that an item has in
its seed: intervals count questions, and two cells are compared on the questions that both
were asked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import attrs

from kvpolicy.lab.store.read import RunFolder
from kvpolicy.lab.store.records import CellRecord, CellTiming, EvalSettingRecord, ItemRecord, Sample

# What may differ between groups that are taken together: the seed, and what follows from it.
_OF_ONE_SEED = ("group", "seed", "n", "prompt_hash")


@attrs.frozen(eq=False)
class PooledCell:
    """Cells that differ in nothing but the seed and the number of items.

    Attributes:
        id: Id of the first of them; what `samples` call their cell.
        cell: The first of them.
        group: Its group.
        version: Version of kvpolicy that computed them.
        cells: Ids of all.
        runs: Names of the folders that they are from.
        seeds: Their seeds.
        samples: Their samples, each once; ``item`` is the number of the question.
        items: What was asked, by number of the question.
        timing: What all of them cost; ``None`` if one of them was interrupted.
        num_expected: Samples when they are complete.
    """

    id: str
    cell: CellRecord
    group: EvalSettingRecord
    version: str
    cells: tuple[str, ...]
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    samples: tuple[Sample, ...] = attrs.field(repr=False)
    items: Mapping[int, ItemRecord] = attrs.field(repr=False)
    timing: CellTiming | None
    num_expected: int

    @property
    def series(self) -> str:
        """Which line of a plot it is a point of."""
        return self.cell.series

    @property
    def budget(self) -> float | None:
        """Rows that stay after a compaction; ``None`` if everything stays."""
        return self.cell.budget

    @property
    def buffer(self) -> float | None:
        """Rows that may join before the next compaction; ``None`` likewise."""
        return self.cell.buffer

    @property
    def digest(self) -> str:
        """Digest of the resolved plan."""
        return self.cell.plan

    @property
    def name(self) -> str:
        """The plan as users write it: ``SERIES@BUDGET``."""
        return self.series if self.budget is None else f"{self.series}@{self.budget:g}"

    @property
    def block(self) -> object:
        """Equal for cells that were asked the same in the same way."""
        return self.version, _settings(self.group)

    def counts(self) -> dict[str, int]:
        """How many samples there are, and how many of them have no plain answer."""
        return {
            "num_samples": len(self.samples),
            "num_expected": self.num_expected,
            "num_truncated": sum(one.finish_reason == "length" for one in self.samples),
            "num_errors": sum(one.finish_reason == "error" for one in self.samples),
            "num_ungraded": sum(one.ungraded is not None for one in self.samples),
        }


_Place = tuple[RunFolder, EvalSettingRecord, CellRecord]


def pool(
    runs: Sequence[RunFolder],
    keep: Callable[[EvalSettingRecord, CellRecord], bool] = lambda group, cell: True,
) -> list[PooledCell]:
    """Take cells together that differ in nothing but their seed, whatever plans are called.

    Args:
        runs: The runs; a cell that is in several of them counts once.
        keep: Which cells are wanted.

    Returns:
        The pooled cells; those of one model and task stand together, in the order of the runs.
    """
    questions = _Questions(runs)
    places: dict[object, dict[object, list[_Place]]] = {}
    for run in runs:
        for cell in run.cells.values():
            group = run.groups[cell.group]
            if keep(group, cell):
                block = places.setdefault((run.version, _settings(group)), {})
                block.setdefault(cell.plan, []).append((run, group, cell))
    return [_pooled(one, questions) for block in places.values() for one in block.values()]


def _settings(group: EvalSettingRecord) -> object:
    plain = attrs.asdict(group, recurse=False, filter=lambda f, _: f.name not in _OF_ONE_SEED)
    return tuple(plain.items())


def _pooled(places: Sequence[_Place], questions: "_Questions") -> PooledCell:
    run, group, cell = places[0]
    samples: dict[str, Sample] = {}
    items: dict[int, ItemRecord] = {}
    for its_run, its_group, its_cell in places:
        for sample in its_run.samples_of[its_cell.cell]:
            number = questions.number(its_group, sample.item)
            samples[sample.key] = attrs.evolve(sample, cell=cell.cell, item=number)
            found = its_run.items.get((its_group.group, sample.item))
            if found is not None:
                items.setdefault(number, found)
    expected: dict[int, int] = {}
    for _, one, _ in places:
        expected[one.seed] = max(expected.get(one.seed, 0), one.n * one.attempts)
    return PooledCell(
        id=cell.cell,
        cell=cell,
        group=group,
        version=run.version,
        cells=_once(one.cell for _, _, one in places),
        runs=_once(one.path.name for one, _, _ in places),
        seeds=tuple(sorted(expected)),
        samples=tuple(samples.values()),
        items=items,
        timing=_sum_timings(places),
        num_expected=sum(expected.values()),
    )


def _once(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def _sum_timings(places: Sequence[_Place]) -> CellTiming | None:
    """What several cells cost one after the other, each counted once."""
    found: dict[str, CellTiming | None] = {}
    for run, _, cell in places:
        found[cell.cell] = found.get(cell.cell) or run.timings.get(cell.cell)
    timings = [one for one in found.values() if one is not None]
    if len(timings) < len(found):
        return None
    return CellTiming(
        cell=places[0][2].cell,
        num_requests=sum(one.num_requests for one in timings),
        new_tokens=sum(one.new_tokens for one in timings),
        elapsed_s=sum(one.elapsed_s for one in timings),
        policy_s=sum(one.policy_s for one in timings),
        decode_s=sum(one.decode_s for one in timings),
        peak_kv_bytes=max(one.peak_kv_bytes for one in timings),
    )


class _Questions:
    """Numbers questions, across seeds, models and runs.

    Items of one model are the same question if their texts are. Items of two models, whose
    chat templates word the same question differently, are if task, split, seed and number are,
    and what no template words: answer and reference.
    """

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self._of_text: dict[object, int] = {}
        self._of_said: dict[object, int] = {}
        self._of_place: dict[object, int] = {}
        self._of_item: dict[tuple[str, int], int] = {}
        self._worded: set[object] = set()
        self._num = 0
        for run in runs:
            for (group_id, item), record in run.items.items():
                if group_id in run.groups:
                    self._of_item[group_id, item] = self._find(run.groups[group_id], record)

    def number(self, group: EvalSettingRecord, item: int) -> int:
        """The question that an item of a group is; one of its own if nobody wrote it down."""
        found = self._of_item.get((group.group, item))
        if found is None:
            found = self._of_place.get(_place(group, item))
        if found is None:
            found = self._of_place[_place(group, item)] = self._next()
        return found

    def _find(self, group: EvalSettingRecord, record: ItemRecord) -> int:
        text = (group.model, group.task, record.prompt, record.answer, record.reference)
        place = _place(group, record.item)
        said = (place, record.answer, record.reference)
        number = self._of_text.get(text)
        if number is None and (group.model, said) not in self._worded:
            number = self._of_said.get(said)
        if number is None:
            number = self._next()
        self._of_text[text] = number
        self._of_said.setdefault(said, number)
        self._of_place.setdefault(place, number)
        self._worded.add((group.model, said))
        return number

    def _next(self) -> int:
        self._num += 1
        return self._num - 1


def _place(group: EvalSettingRecord, item: int) -> object:
    return group.task, group.split, group.seed, item
