"""A worker of a cluster does what this process would do, or says why it cannot."""

import os
import pickle
import socket
from pathlib import Path

import attrs
import pytest
import torch

from kvpolicy.errors import KVPolicyError
from kvpolicy.hooks import discovery
from kvpolicy.hooks.discovery import register_file
from kvpolicy.lab.executors.ray_worker import Setting, Worker
from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.sweep import prepare as setup
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.jobs import ItemDone, Job, JobDone
from kvpolicy.lab.sweep.probe import Probe
from kvpolicy.lab.sweep.serve import Server

OURS = f"on {socket.gethostname()}: "

PLUGIN = """
from kvpolicy import hookimpl

class Sent:
    @hookimpl
    def score(self, positions):
        return positions.float()
"""


def comparison_of(model: Path, policies: str = "full", task: str = "reasoner") -> Comparison:
    preset = setup.choose(None, policies=policies.split(","), budgets=[12], buffer=6)
    preset = attrs.evolve(
        preset, models=(str(model),), tasks=(task,), n=3, slots=2, max_new_tokens=20
    )
    return setup.prepare(preset, ModelCache())


def setting() -> Setting:
    return Setting.here(ModelCache(), threads=1)


def sent(thing: object) -> object:
    """What arrives elsewhere."""
    return pickle.loads(pickle.dumps(thing))


@pytest.fixture(autouse=True)
def _stay_here() -> object:
    before = os.getcwd(), torch.get_num_threads()
    yield
    os.chdir(before[0])
    torch.set_num_threads(before[1])


def test_it_tells_what_a_server_here_would_tell(model_folder: Path) -> None:
    comparison = comparison_of(model_folder, "full,h2o")
    model, tokenizer = ModelCache().open(str(model_folder))
    worker = Worker(setting())
    for cell in comparison.cells:
        job = Job(cell.id, (0, 2))
        here = list(Server(model, tokenizer, comparison).serve(job))
        there = list(worker.serve(sent(comparison), job))
        assert [type(one) for one in there] == [ItemDone, ItemDone, JobDone]
        for ours, theirs in zip(here[:2], there[:2], strict=True):
            assert isinstance(ours, ItemDone)
            assert isinstance(theirs, ItemDone)
            assert theirs.item == ours.item
            assert theirs.outcome.result.tokens == ours.outcome.result.tokens
            assert theirs.outcome.correct == ours.outcome.correct


def test_a_policy_with_other_code_is_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "_from_files", {})
    plugin = tmp_path / "sent.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    register_file(plugin)
    comparison = comparison_of(model_folder, "sent")
    worker, job = Worker(setting()), Job(comparison.cells[0].id, (0,))
    plugin.write_text(PLUGIN.replace("float()", "double()"), encoding="utf-8")
    other = Worker(setting())
    assert isinstance(list(worker.serve(sent(comparison), job))[-1], JobDone)
    (answer,) = other.serve(sent(comparison), job)
    assert str(answer).startswith(OURS)
    assert "a policy of 'sent' has other code there" in str(answer)


def test_it_tries_a_cell(model_folder: Path) -> None:
    comparison = comparison_of(model_folder)
    (cell,) = comparison.cells
    found = Worker(setting()).probe(sent(comparison), cell, 60.0)
    assert isinstance(found, Probe), found
    assert (found.num_finished, found.problem) == (2, None)


def test_it_tells_what_it_computes_with() -> None:
    found = Worker(attrs.evolve(setting(), threads=3)).machine()
    assert isinstance(found, dict), found
    assert (found["threads"], found["device"]) == (3, "cpu")
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpus"] >= 1


def test_one_of_another_version_does_not_describe_its_machine() -> None:
    assert "9.9 here" in refused(Worker(attrs.evolve(setting(), version="9.9")).machine())


@pytest.mark.parametrize("task", ["agreement", "perplexity", "needle", "reasoner-verbose"])
def test_every_kind_of_task_can_be_sent(model_folder: Path, task: str) -> None:
    comparison = comparison_of(model_folder, "full", task)
    (cell,) = comparison.cells
    *_, last = Worker(setting()).serve(sent(comparison), Job(cell.id, (0,)))
    assert isinstance(last, JobDone), last


def test_a_policy_from_a_file_goes_with_it(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin = tmp_path / "sent.py"
    plugin.write_text(PLUGIN, encoding="utf-8")
    register_file(plugin)
    comparison, mine = comparison_of(model_folder, "sent"), setting()
    # Elsewhere there is no such file, and nobody knows the policy.
    plugin.unlink()
    monkeypatch.setattr(discovery, "_from_files", {})
    (cell,) = comparison.cells
    news = list(Worker(sent(mine)).serve(sent(comparison), Job(cell.id, (0,))))
    assert isinstance(news[-1], JobDone), news[-1]


def test_relative_paths_mean_the_same(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder.parent)
    mine = setting()
    monkeypatch.chdir(tmp_path)
    card, tokenizer = answered(Worker(mine).describe(model_folder.name))
    assert card.num_layers == 2
    assert tokenizer.encode("1")


def answered(answer: object) -> tuple:
    assert isinstance(answer, tuple), answer
    return answer


def refused(answer: object) -> str:
    assert isinstance(answer, KVPolicyError), answer
    assert str(answer).startswith(OURS)
    return str(answer)


def test_a_model_that_is_not_there_is_named() -> None:
    said = refused(Worker(setting()).describe("/no/such/model"))
    assert "/no/such/model" in said


def test_another_model_of_the_same_name_is_refused(model_folder: Path) -> None:
    comparison = comparison_of(model_folder)
    (group,) = comparison.groups
    other = attrs.evolve(group.model, fingerprint="0" * 16, device="cuda:0")
    changed = attrs.evolve(group, model=other)
    (cell,) = comparison.cells
    cell = attrs.evolve(cell, group=changed.id)
    (answer,) = Worker(setting()).serve(Comparison("", (changed,), (cell,)), Job(cell.id, (0,)))
    said = refused(answer)
    assert f"its fingerprint is {group.model.fingerprint} there and {'0' * 16} in this run" in said
    assert "its device is cpu there and cuda:0 in this run" in said


def test_another_version_is_refused() -> None:
    said = refused(Worker(attrs.evolve(setting(), version="9.9")).describe("reasoner"))
    assert "9.9 here" in said


def test_a_defect_comes_with_its_traceback(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble(*_: object) -> None:
        raise ZeroDivisionError

    comparison = comparison_of(model_folder)
    monkeypatch.setattr(Server, "serve", stumble)
    (answer,) = Worker(setting()).serve(comparison, Job(comparison.cells[0].id, (0,)))
    assert isinstance(answer, RuntimeError)
    assert "in stumble\n" in str(answer)
