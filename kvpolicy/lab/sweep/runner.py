"""Running a sweep: run what is not stored yet, store every sample as soon as it is finished."""

from collections.abc import Collection, Container, Iterator

import attrs

from kvpolicy.engine.requests.results import RunReport
from kvpolicy.lab.store.records import CellTiming, Sample
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.grid import Cell, Sweep
from kvpolicy.lab.sweep.jobs import Executor, Job, JobProgress, SampleMeasured
from kvpolicy.lab.sweep.recording import KeptRecord


@attrs.frozen
class SampleDone:
    """A sample is finished and stored."""

    cell: Cell
    sample: Sample


@attrs.frozen
class CellProgress:
    """A cell begins, or goes on between two samples.

    Attributes:
        cell: The cell.
        num_tokens: Tokens of its samples in this run, those of prompts not counted.
    """

    cell: Cell
    num_tokens: int


@attrs.frozen
class CellDone:
    """The last sample of a cell is finished and stored.

    Attributes:
        cell: The cell.
        elapsed_s: Seconds that workers spent on the jobs of the cell in this run.
        compile_s: Those in which they compiled decode steps.
    """

    cell: Cell
    elapsed_s: float
    compile_s: float = 0.0


def run(
    sweep: Sweep, store: Store, executor: Executor
) -> Iterator[SampleDone | CellProgress | CellDone]:
    """Run what is not stored yet. May be stopped at any moment and called again.

    Args:
        sweep: The sweep.
        store: Its results.
        executor: Runs the jobs.

    Yields:
        Events. A sample is on disk before it is reported.
    """
    jobs = remaining_jobs(sweep, finished_keys(sweep, store.samples, store.recorded))
    unfinished = {job.cell: set(job.samples) for job in jobs}
    elapsed, compiling = dict.fromkeys(unfinished, 0.0), dict.fromkeys(unfinished, 0.0)
    for event in executor.run_jobs(sweep, jobs):
        cell = sweep.cell(event.job.cell)
        if isinstance(event, SampleMeasured):
            yield SampleDone(cell, _store_sample(sweep, store, cell, event))
            continue
        if isinstance(event, JobProgress):
            yield CellProgress(cell, event.num_tokens)
            continue
        if event.report is not None:
            compiling[cell.id] += event.report.compile_s
            if len(event.job.samples) == len(sweep.setting_of(cell).examples):
                store.add_timing(_timing(cell, len(event.job.samples), event.report))
        elapsed[cell.id] += event.elapsed_s
        unfinished[cell.id] -= set(event.job.samples)
        if not unfinished[cell.id]:
            yield CellDone(cell, elapsed[cell.id], compiling[cell.id])


def finished_keys(
    sweep: Sweep, samples: Collection[str], recorded: Container[str]
) -> Collection[str]:
    """Return the keys of the samples that need not be run.

    A sample without the record that `Sweep.record` asks for is run again, to make the record.

    Args:
        sweep: The sweep.
        samples: Keys of the stored samples.
        recorded: Keys of the samples whose kept rows are recorded.
    """
    return set(samples) - sweep.unrecorded(recorded)


def remaining_jobs(sweep: Sweep, done: Container[str]) -> list[Job]:
    """List what is left to do: setting after setting, the costliest cells of each first.

    Settings are in the order of their models, so that a model is loaded once. What the cells of one
    setting share is needed for one setting at a time, and no expensive cell runs alone at the end.

    Args:
        sweep: The sweep.
        done: Keys of the finished samples.
    """
    models = list(dict.fromkeys(setting.model.name for setting in sweep.settings))
    settings = [setting.id for setting in sweep.settings]
    found = []
    for cell in sweep.cells:
        left = sweep.remaining(cell, done)
        if left:
            setting = sweep.setting_of(cell)
            place = models.index(setting.model.name), settings.index(setting.id)
            cost = cell.budget or float("inf")
            found.append((place, -cost, Job(cell.id, tuple(left))))
    return [job for *_, job in sorted(found, key=lambda one: one[:2])]


def _store_sample(sweep: Sweep, store: Store, cell: Cell, event: SampleMeasured) -> Sample:
    sample = _sample(sweep, cell, event)
    if event.kept is not None:
        # First, so that no stored sample lacks its record.
        record = KeptRecord.of(
            event.kept,
            key=sample.key,
            cell=sample.cell,
            item=sample.item,
            attempt=sample.attempt,
        )
        store.add_kept(record.to_dict())
    stored = store.samples.get(sample.key)
    if stored is not None and _untimed(stored) == _untimed(sample):
        return stored  # run again for its record
    store.add(sample)
    return sample


def _untimed(sample: Sample) -> Sample:
    return attrs.evolve(sample, prefill_s=0.0, decode_s=0.0)


def _sample(sweep: Sweep, cell: Cell, event: SampleMeasured) -> Sample:
    setting, outcome = sweep.setting_of(cell), event.outcome
    example, result = setting.examples[event.index], outcome.result
    return Sample(
        key=setting.key(cell.digest, example),
        cell=cell.id,
        group=setting.id,
        model=setting.model.name,
        task=setting.task.name,
        seed=setting.seed,
        series=cell.series,
        budget=cell.budget,
        buffer=cell.buffer,
        plan=cell.digest,
        item=example.index,
        attempt=example.attempt,
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
        facets=dict(example.facets),
        values=dict(outcome.values),
        text=result.text or "",
        breakdowns=dict(outcome.breakdowns),
    )


def _timing(cell: Cell, num_requests: int, report: RunReport) -> CellTiming:
    """Costs of a cell that one worker ran in one go; those of parts do not add up to a speed."""
    return CellTiming(
        cell=cell.id,
        num_requests=num_requests,
        new_tokens=report.new_tokens,
        elapsed_s=report.elapsed_s - report.compile_s,
        policy_s=report.decode_policy_s,
        decode_s=report.decode_s,
        peak_kv_bytes=report.peak_kv_bytes,
        compile_s=report.compile_s,
    )
