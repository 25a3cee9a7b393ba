"""Running a comparison: what is not yet done goes to the pool, what is done is kept at once."""

from collections.abc import Container, Iterator

import attrs

from kvpolicy.engine.results import RunReport
from kvpolicy.lab.store.records import CellTiming, Sample
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.jobs import Job, JobDone, Pool
from kvpolicy.lab.sweep.recording import Kept, KeptRows
from kvpolicy.lab.tasks.measures import Outcome


@attrs.frozen
class SampleDone:
    """A sample is finished and kept."""

    cell: Cell
    sample: Sample


@attrs.frozen
class CellDone:
    """The last sample of a cell is finished and kept."""

    cell: Cell
    elapsed_s: float


Event = SampleDone | CellDone


def run(comparison: Comparison, store: Store, pool: Pool) -> Iterator[Event]:
    """Do what is not yet done; may be left at any moment and called again.

    Args:
        comparison: What to run.
        store: What is done, and where it is kept.
        pool: Who does it.

    Yields:
        What happens, as it happens. A sample is on disk before it is reported.
    """
    for group in comparison.groups:
        store.add_items(group.item_records())
    for news in pool.serve(jobs(comparison, store.samples)):
        cell = comparison.cell(news.job.cell)
        if isinstance(news, JobDone):
            is_whole = len(news.job.items) == len(comparison.group_of(cell).items)
            if news.report is not None and is_whole:
                store.add_timing(_timing(cell, len(news.job.items), news.report))
            yield CellDone(cell, news.elapsed_s)
        else:
            sample = _sample(comparison, cell, news.item, news.outcome)
            if news.kept is not None:
                store.add_kept(_kept(sample, news.kept).to_dict())
            store.add(sample)
            yield SampleDone(cell, sample)


def jobs(comparison: Comparison, done: Container[str]) -> list[Job]:
    """What is left to do, model after model, and the costliest cells of each first.

    So a model is loaded once, and no cell is waited for alone at the end.

    Args:
        comparison: What is run.
        done: Keys of the samples that are done.
    """
    models = list(dict.fromkeys(group.model.name for group in comparison.groups))
    found = []
    for cell in comparison.cells:
        left = comparison.left(cell, done)
        if left:
            model = models.index(comparison.group_of(cell).model.name)
            cost = cell.budget or float("inf")
            found.append((model, -cost, Job(cell.id, tuple(left))))
    return [job for *_, job in sorted(found, key=lambda one: one[:2])]


def _sample(comparison: Comparison, cell: Cell, place: int, outcome: Outcome) -> Sample:
    group, result = comparison.group_of(cell), outcome.result
    item = group.items[place]
    return Sample(
        key=group.key(cell.digest, item),
        cell=cell.id,
        group=group.id,
        model=group.model.name,
        task=group.task.name,
        seed=group.seed,
        series=cell.series,
        budget=cell.budget,
        buffer=cell.buffer,
        plan=cell.digest,
        item=item.index,
        attempt=item.attempt,
        correct=outcome.correct,
        ungraded=outcome.problem,
        finish_reason=result.finish_reason,
        error=result.error,
        prompt_len=result.prompt_len,
        num_tokens=len(result.tokens),
        compactions=result.compactions,
        rows_evicted=result.rows_evicted,
        peak_rows=result.peak_rows,
        peak_bytes=result.peak_bytes,
        prefill_s=round(result.prefill_s, 6),
        decode_s=round(result.decode_s, 6),
        facets=dict(item.facets),
        values=dict(outcome.values),
        text=result.text or "",
    )


def _kept(sample: Sample, rows: KeptRows) -> Kept:
    return Kept.of(rows, key=sample.key, cell=sample.cell, item=sample.item, attempt=sample.attempt)


def _timing(cell: Cell, num_requests: int, report: RunReport) -> CellTiming:
    return CellTiming(
        cell=cell.id,
        num_requests=num_requests,
        new_tokens=report.new_tokens,
        elapsed_s=report.elapsed_s,
        policy_s=report.decode_policy_s,
        decode_s=report.decode_s,
        peak_kv_bytes=report.peak_kv_bytes,
    )
