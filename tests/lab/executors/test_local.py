"""One machine: models are loaded one at a time, and each sample comes from its own model."""

import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_sweeps import BASE, built
from tiny import tiny_model, tiny_tokenizer

from kvpolicy.lab.executors import local
from kvpolicy.lab.executors.local import LocalExecutor
from kvpolicy.lab.models import LoadedModel, ModelCache
from kvpolicy.lab.shared import MOST_BYTES
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.jobs import Job, JobFinished
from kvpolicy.lab.sweep.runner import remaining_jobs, run

forks = pytest.mark.skipif(sys.platform != "linux", reason="forks its workers")


@pytest.mark.needs_reasoner
@pytest.mark.parametrize(("workers", "threads"), [(1, 7), pytest.param(2, 1, marks=forks)])
def test_the_machine_is_described_with_the_threads_of_a_worker(workers: int, threads: int) -> None:
    assert LocalExecutor(ModelCache(), workers, threads=7).machine(built())["threads"] == threads


@pytest.mark.nightly
@pytest.mark.needs_reasoner
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=forks)])
def test_models_are_loaded_one_after_the_other_and_each_runs_its_own_samples(
    tmp_path: Path, workers: int
) -> None:
    loaded: list[str] = []
    models: list[weakref.ref[Any]] = []

    def load(name: str, **_: object) -> tuple[Any, Any]:
        assert not any(one() is not None for one in models), "the previous model is freed"
        model = tiny_model(seed=ord(name))
        loaded.append(name)
        models.append(weakref.ref(model))
        return model, tiny_tokenizer()

    texts = {}
    for names in ("ab", "b", "a"):
        sweep = built(models=tuple(names), max_new_tokens=20)
        loaded.clear()
        with Store(tmp_path / names, sweep.to_dict()) as store:
            list(run(sweep, store, LocalExecutor(ModelCache(load=load), workers, threads=1)))
            texts[names] = {key: one.text for key, one in store.samples.items()}
        assert loaded == list(names)
    assert texts["ab"] == texts["a"] | texts["b"]
    assert set(texts["a"].values()) != set(texts["b"].values())


@pytest.mark.nightly
@pytest.mark.needs_reasoner
@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=forks)])
def test_each_process_compiles_for_itself_and_frees_the_model(tmp_path: Path, workers: int) -> None:
    models: list[weakref.ref[Any]] = []

    def load(name: str, **_: object) -> tuple[Any, Any]:
        assert not any(one() is not None for one in models), "the previous model is freed"
        model = tiny_model(seed=ord(name))
        models.append(weakref.ref(model))
        return model, tiny_tokenizer()

    sweep = built(models=("a", "b"), series=BASE.series[:1])
    with Store(tmp_path, sweep.to_dict()) as store:
        executor = LocalExecutor(ModelCache(compile=True, load=load), workers, threads=1)
        list(run(sweep, store, executor))
        compiled = [one.cell for one in store.timings.values() if one.compile_s > 0]
    assert len(store.samples) == sweep.num_samples
    if workers > 1:
        assert sorted(compiled) == sorted(cell.id for cell in sweep.cells), "forked for each model"
    else:
        assert len(compiled) < len(sweep.cells), "a graph serves later cells"


@pytest.mark.needs_reasoner
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=forks)])
def test_processes_divide_the_memory_for_what_their_cells_share(
    monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def told(sweep: Sweep, job: Job, loaded: LoadedModel) -> Iterator[JobFinished]:
        yield JobFinished(job, None, loaded.shared.most_bytes)

    monkeypatch.setattr(local, "run_job", told)
    sweep = built(models=("a",))
    models = ModelCache(load=lambda *_, **__: (tiny_model(), tiny_tokenizer()))
    events = LocalExecutor(models, workers, threads=1).run_jobs(sweep, remaining_jobs(sweep, ()))
    found = [event.elapsed_s for event in events if isinstance(event, JobFinished)]
    assert found == [MOST_BYTES / workers] * len(sweep.cells)


def test_a_loaded_model_is_not_loaded_again() -> None:
    loaded: list[str] = []

    def load(name: str, **_: object) -> tuple[Any, Any]:
        loaded.append(name)
        return name, None

    models = ModelCache(load=load)
    assert [models.open(name).model for name in "aabba"] == list("aabba")
    assert loaded == ["a", "b", "a"]
