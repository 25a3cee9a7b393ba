"""Jobs: samples of one cell, decoded together, and the executors that run them."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Protocol

import attrs

from kvpolicy.engine.engine import Run
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.results import Result, RunReport
from kvpolicy.lab.models import LoadedModel, ModelProvider
from kvpolicy.lab.sweep.grid import EvalSetting, Sweep
from kvpolicy.lab.sweep.recording import KeptRows, record_kept_rows
from kvpolicy.lab.tasks.chat_template import encode
from kvpolicy.lab.tasks.task import EvalOutcome, EvalRequest, Example


@attrs.frozen
class Job:
    """Samples of one cell for one worker.

    Attributes:
        cell: Id of the cell.
        samples: Indices of the samples in the ``examples`` of the cell's setting.
    """

    cell: str
    samples: tuple[int, ...]

    noun: ClassVar[str] = "samples"


@attrs.frozen
class SampleMeasured:
    """One sample of a job is measured.

    Attributes:
        job: The job.
        index: Index of the sample.
        outcome: Its result and values.
        kept: The rows that compactions kept, if they are recorded.
    """

    job: Job
    index: int
    outcome: EvalOutcome
    kept: KeptRows | None = None


@attrs.frozen
class JobProgress:
    """A job goes on; told when it begins, and about every `PROGRESS_EVERY_S` seconds.

    Attributes:
        job: The job, as it is run.
        num_tokens: Tokens of its samples so far, those of prompts not counted.
    """

    job: Job
    num_tokens: int


@attrs.frozen
class JobFinished:
    """All samples of a job are measured.

    Attributes:
        job: The job, as it was run: an executor may have split it.
        report: Costs of the job; ``None`` if its worker was lost before it could report them.
        elapsed_s: Wall time of the job in seconds.
    """

    job: Job
    report: RunReport | None
    elapsed_s: float


Event = SampleMeasured | JobProgress | JobFinished

PROGRESS_EVERY_S = 1.0


class Executor(ModelProvider, Protocol):
    """Provides models, and workers that run jobs with them."""

    def num_workers(self, sweep: Sweep) -> int:
        """Return how many workers run side by side."""

    def machine(self, sweep: Sweep) -> dict[str, Any]:
        """Describe a worker; see `kvpolicy.lab.store.session.describe_machine`."""

    def run_jobs(self, sweep: Sweep, jobs: Sequence[Job]) -> Iterator[Event]:
        """Run jobs, in any order, and yield events as they happen.

        A job may be split, and repeated in part after a loss. Every sample is in one
        `SampleMeasured`; the last event of each part is its `JobFinished`. `JobProgress` may be
        among them.
        """


def run_job(sweep: Sweep, job: Job, loaded: LoadedModel) -> Iterator[Event]:
    """Run one job in this process.

    Args:
        sweep: The sweep.
        job: The job.
        loaded: The model of the job's setting.

    Yields:
        `SampleMeasured` for each sample as it finishes, `JobProgress` between them, then
        `JobFinished`.
    """
    begin = time.perf_counter()
    cell = sweep.cell(job.cell)
    setting = sweep.setting_of(cell)
    engine = loaded.engine(cell.resolved, slots=min(setting.slots, len(job.samples)))
    examples = [setting.examples[index] for index in job.samples]
    prompts = encode(examples, loaded.tokenizer)
    requests = [
        EvalRequest(example, _request(setting, example, prompt))
        for example, prompt in zip(examples, prompts, strict=True)
    ]
    evaluation = setting.task.metric.begin(engine, requests, loaded.shared)
    indices = sweep.recorded(cell)
    recorded = [number for number, index in enumerate(job.samples) if index in indices]
    with record_kept_rows(evaluation.run, recorded) as recorder:
        for result in _results(evaluation.run, job):
            if isinstance(result, JobProgress):
                yield result
                continue
            kept = recorder.pop(result) if result.id in recorder.requests else None
            yield SampleMeasured(job, job.samples[result.id], evaluation.outcome(result), kept)
    yield JobFinished(job, evaluation.run.report, time.perf_counter() - begin)


def _results(run: Run, job: Job) -> Iterator[Result | JobProgress]:
    """Results as they come, and how far the job is in between."""
    num_tokens, told_at = 0, time.monotonic()
    yield JobProgress(job, 0)
    while not run.done:
        events = run.step()
        num_tokens += len(events.tokens)
        yield from events.results
        if time.monotonic() - told_at >= PROGRESS_EVERY_S:
            yield JobProgress(job, num_tokens)
            told_at = time.monotonic()


def _request(setting: EvalSetting, example: Example, prompt: str | list[int]) -> Request:
    sampling = attrs.evolve(setting.sampling, seed=attempt_seed(setting.sampling.seed, example))
    return Request(prompt, setting.max_new_tokens, sampling)


def attempt_seed(seed: int, example: Example) -> int:
    """Return the sampling seed of one attempt, different for every attempt and example.

    Args:
        seed: Seed of the setting.
        example: The attempt.
    """
    text = f"{seed} {example.index} {example.attempt}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest())
