"""A cluster worker gives the events of a local run, or the reason why it cannot."""

import importlib.metadata
import os
import pickle
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from lab_sweeps import BASE

from kvpolicy.engine.requests.request import Request
from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import load_policy_file
from kvpolicy.lab.executors import ray_worker
from kvpolicy.lab.executors.ray_worker import Worker, WorkerConfig
from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.prompt_files.answering import Answering, PromptAnswered, Shard, ShardFinished
from kvpolicy.lab.sweep.grid import Sweep
from kvpolicy.lab.sweep.jobs import Job, JobFinished, JobProgress, SampleMeasured, run_job
from kvpolicy.lab.sweep.prepare import build_sweep, load_sweep
from kvpolicy.plan.plan import Plan
from kvpolicy.prompts import Chat, Prompt

HERE = f"on {socket.gethostname()}: "

PLUGIN = """
from kvpolicy import hookimpl

class Sent:
    @hookimpl
    def score(self, positions):
        return positions.float()
"""


def sweep_of(model: Path, policies: str = "full", task: str = "reasoner") -> Sweep:
    config = load_sweep(None, policies=policies.split(","), budgets=[12], buffer=6)
    config = attrs.evolve(
        config, models=(str(model),), tasks=(task,), n=3, slots=2, max_new_tokens=20
    )
    return build_sweep(config, ModelCache())


def this_config() -> WorkerConfig:
    return WorkerConfig.of_this_process(ModelCache(), threads=1)


def with_setup(**changes: object) -> WorkerConfig:
    config = this_config()
    return attrs.evolve(config, setup=attrs.evolve(config.setup, **changes))


def begun(config: WorkerConfig | None = None) -> Worker:
    worker = Worker(config or this_config())
    discovery.forget_files()  # a worker is a process of its own
    assert worker.begin() == socket.gethostname()
    return worker


def sent(thing: object) -> object:
    """What arrives on another machine."""
    return pickle.loads(pickle.dumps(thing))


@pytest.fixture(autouse=True)
def _restore_this_process() -> Iterator[None]:
    before = os.getcwd(), torch.get_num_threads()
    yield
    os.chdir(before[0])
    torch.set_num_threads(before[1])


@pytest.mark.slow
def test_a_worker_gives_the_events_of_a_local_run(model_folder: Path) -> None:
    sweep = sweep_of(model_folder, "full,h2o")
    loaded = ModelCache().open(str(model_folder))
    worker = begun()
    for cell in sweep.cells:
        job = Job(cell.id, (0, 2))
        local = [one for one in run_job(sweep, job, loaded) if not isinstance(one, JobProgress)]
        remote = [
            one for one in worker.run_job(sent(sweep), job) if not isinstance(one, JobProgress)
        ]
        assert [type(one) for one in remote] == [SampleMeasured, SampleMeasured, JobFinished]
        for ours, theirs in zip(local[:2], remote[:2], strict=True):
            assert isinstance(ours, SampleMeasured)
            assert isinstance(theirs, SampleMeasured)
            assert theirs.index == ours.index
            assert theirs.outcome.result.tokens == ours.outcome.result.tokens
            assert theirs.outcome.correct == ours.outcome.correct


def test_each_worker_reuses_what_it_has_computed_itself(model_folder: Path) -> None:
    config = attrs.evolve(this_config(), prefix_store={"capacity": 1 << 20, "block_tokens": 4})
    workers = [begun(sent(config)), begun(sent(config)), begun()]  # type: ignore[arg-type]
    info, _ = workers[0].describe(str(model_folder))
    plan = Plan.uniform("h2o", budget=12, buffer=4).resolve(info.num_layers)
    defaults = Request(max_new_tokens=6)
    answering = Answering(info, plan, plan.digest(), defaults, chat=Chat(), slots=2)
    prompts = [Prompt(number, [*range(3, 23), 30 + number]) for number in range(4)]

    def answered(worker: Worker, *numbers: int) -> tuple[list[PromptAnswered], ShardFinished]:
        *events, last = worker.answer(answering, Shard.of(prompts, numbers))
        assert isinstance(last, ShardFinished)
        return [one for one in events if isinstance(one, PromptAnswered)], last

    first, _ = answered(workers[0], 0, 1)
    second, last = answered(workers[0], 2, 3)
    assert [one.reused_tokens for one in (*first, *second)] == [0, 16, 16, 16]
    assert last.store is not None
    assert last.store.reused_tokens == 48
    others, _ = answered(workers[1], 0)
    assert others[0].reused_tokens == 0
    plain, last = answered(workers[2], 0, 1, 2, 3)
    assert last.store is None
    assert [one.answer for one in plain] == [one.answer for one in (*first, *second)]


def test_what_ray_sends_into_the_answers_is_ignored(model_folder: Path) -> None:
    worker = begun()
    info, _ = worker.describe(str(model_folder))
    plan = Plan.full_cache().resolve(info.num_layers)
    answering = Answering(
        info, plan, plan.digest(), Request(max_new_tokens=2), chat=Chat(), slots=3
    )
    prompts = [Prompt(number, [3 + number]) for number in range(3)]
    events: Any = worker.answer(answering, Shard.of(prompts, range(3)))
    found = [next(events)]
    with suppress(StopIteration):
        while True:
            found.append(events.send("anything"))
    assert [type(one) for one in found] == [PromptAnswered] * 3 + [ShardFinished]


def test_a_policy_with_other_code_is_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discovery.forget_files()
    plugin = tmp_path / "sent.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    load_policy_file(plugin)
    sweep = sweep_of(model_folder, "sent")
    same, job = this_config(), Job(sweep.cells[0].id, (0,))
    plugin.write_text(PLUGIN.replace("float()", "double()"), encoding="utf-8")
    other = this_config()
    assert isinstance(list(begun(same).run_job(sent(sweep), job))[-1], JobFinished)
    with pytest.raises(KVPolicyError, match="'sent'") as caught:
        list(begun(other).run_job(sent(sweep), job))
    assert str(caught.value).startswith(HERE)


def test_a_worker_describes_its_machine() -> None:
    found = begun(with_setup(threads=3)).machine()
    assert (found["threads"], found["device"]) == (3, "cpu")
    assert torch.get_num_threads() == 3
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["cpus"] >= 1


def test_another_version_is_refused() -> None:
    with pytest.raises(KVPolicyError, match=r"9\.9") as caught:
        Worker(with_setup(version="9.9")).begin()
    assert str(caught.value).startswith(HERE)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "task",
    ["agreement:of=reasoner", "perplexity:of=reasoner", "reasoner-needle", "reasoner-verbose"],
)
def test_every_kind_of_task_can_be_sent(model_folder: Path, task: str) -> None:
    sweep = sweep_of(model_folder, "full", task)
    (cell,) = sweep.cells
    *_, last = begun().run_job(sent(sweep), Job(cell.id, (0,)))
    assert isinstance(last, JobFinished), last


def test_a_policy_from_a_file_is_sent_along(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "sent.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    load_policy_file(plugin)
    sweep, config = sweep_of(model_folder, "sent"), this_config()
    # On another machine the file does not exist and the policy is unknown.
    plugin.unlink()
    discovery.forget_files()
    (cell,) = sweep.cells
    *_, last = begun(sent(config)).run_job(sent(sweep), Job(cell.id, (0,)))
    assert isinstance(last, JobFinished), last


def test_relative_paths_mean_the_same(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder.parent)
    config = this_config()
    monkeypatch.chdir(tmp_path)
    info, tokenizer = begun(config).describe(model_folder.name)
    assert info.num_layers == 2
    assert tokenizer.encode("1")


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(KVPolicyError, match="/no/such/model") as caught:
        begun().describe("/no/such/model")
    assert str(caught.value).startswith(HERE)


def test_another_model_of_the_same_name_is_refused(model_folder: Path) -> None:
    sweep = sweep_of(model_folder)
    (setting,) = sweep.settings
    other = attrs.evolve(setting.model, fingerprint="0" * 16, device="cuda:0", dtype="float16")
    changed = attrs.evolve(setting, model=other)
    (cell,) = sweep.cells
    cell = attrs.evolve(cell, setting=changed.id)
    with pytest.raises(KVPolicyError) as caught:
        list(begun().run_job(Sweep("", (changed,), (cell,)), Job(cell.id, (0,))))
    message = str(caught.value)
    found = setting.model.fingerprint
    assert message.startswith(HERE)
    assert found in message
    assert all(word in message for word in ("fingerprint", "cuda:0", "float32", "float16"))


@pytest.mark.nightly
def test_a_worker_compiles_if_the_run_does(model_folder: Path, no_compiler: None) -> None:
    models = ModelCache(compile=True)
    config = attrs.evolve(BASE, models=(str(model_folder),))
    sweep = build_sweep(config, models)
    job = Job(sweep.cells[0].id, (0, 1))
    compiling = attrs.evolve(this_config(), models=ModelCache(compile=True))
    *_, last = begun(sent(compiling)).run_job(sent(sweep), job)
    assert isinstance(last, JobFinished)
    assert last.report is not None
    assert last.report.path == "static, compiled"
    assert last.report.compile_s > 0
    wanted = "dtype.*float32, compiled"
    with pytest.raises(KVPolicyError, match=wanted):
        list(begun().run_job(sent(sweep), job))


def test_a_defect_has_its_traceback(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError

    sweep = sweep_of(model_folder)
    monkeypatch.setattr(ray_worker, "run_job", stumble)
    with pytest.raises(RuntimeError, match=r"in stumble\n"):
        list(begun().run_job(sweep, Job(sweep.cells[0].id, (0,))))
