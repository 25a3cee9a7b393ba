"""A job says how far it is between its samples."""

from itertools import pairwise
from pathlib import Path

import attrs
import pytest

from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.sweep import jobs
from kvpolicy.lab.sweep.jobs import Job, JobFinished, JobProgress, SampleMeasured, run_job
from kvpolicy.lab.sweep.prepare import build_sweep, load_sweep


@pytest.mark.parametrize("task", ["reasoner", "perplexity:of=reasoner"])
def test_a_job_tells_at_its_start_and_between_samples_how_many_tokens_it_has(
    task: str, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PROGRESS_EVERY_S", 0)
    config = load_sweep(None, policies=["h2o"], budgets=[12], buffer=6)
    config = attrs.evolve(
        config, models=(str(model_folder),), tasks=(task,), n=2, slots=2, max_new_tokens=9
    )
    sweep, loaded = build_sweep(config, ModelCache()), ModelCache().open(str(model_folder))
    events = list(run_job(sweep, Job(sweep.cells[0].id, (0, 1)), loaded))
    told = [event.num_tokens for event in events if isinstance(event, JobProgress)]
    results = [e.outcome.result for e in events if isinstance(e, SampleMeasured)]
    assert isinstance(events[0], JobProgress)
    assert isinstance(events[-1], JobFinished)
    assert told[0] == 0
    assert all(after >= before for before, after in pairwise(told))
    assert told[-1] == sum(len(result.tokens) for result in results)
    assert max(b - a for a, b in pairwise(told)) <= 4  # a first and a second token of both
