"""A file of prompts on a cluster: no answer lost, none doubled, whatever is killed."""

import json
import os
import signal
from pathlib import Path

import pytest
from sweeps_on_ray import FileRun, Nodes, needs_ray, wait_until

pytestmark = [pytest.mark.slow, needs_ray]


def content(run: FileRun, name: str = "out") -> bytes:
    return (run.folder / f"{name}.jsonl").read_bytes()


def test_with_a_node_killed_in_the_middle_every_prompt_is_answered_once(
    file_run: FileRun, nodes: Nodes
) -> None:
    file_run.start(name="undisturbed")
    status, _, err = file_run.end()
    assert status == 0, err
    file_run.hold()
    file_run.start("--on", "ray", "--ray-address", nodes.address)
    wait_until(lambda: len(file_run.held()) == 2)
    by_node = {nodes.node_of(worker): worker for worker in file_run.held()}
    assert set(by_node) == {0, 1}, "each node has a worker"
    before = len(file_run.journal())
    assert before < file_run.num_prompts
    nodes.kill(1)
    file_run.let_go()
    status, out, err = file_run.end()
    assert status == 0, err
    assert "was lost" in err
    assert "unfinished prompts are done again" in err
    assert content(file_run) == content(file_run, "undisturbed")
    summary = json.loads(out)
    workers = summary["workers"]
    assert sum(worker["num_prompts"] for worker in workers) == file_run.num_prompts
    assert sum(worker["new_tokens"] for worker in workers) == summary["new_tokens"]
    assert len(workers) == 2
    assert all(one["throughput_tok_s"] == one["new_tokens"] / one["busy_s"] for one in workers)


@pytest.mark.nightly
def test_each_worker_has_a_prefix_store_and_answers_are_those_without(
    file_run: FileRun, nodes: Nodes
) -> None:
    file_run.start(name="undisturbed")
    status, _, err = file_run.end()
    assert status == 0, err
    cache = ("--prefix-cache", "1MiB", "--prefix-block", 1)
    file_run.start("--on", "ray", "--ray-address", nodes.address, *cache)
    status, out, err = file_run.end()
    assert status == 0, err
    assert content(file_run) == content(file_run, "undisturbed")
    summary = json.loads(out)
    workers = [one for one in summary["workers"] if one["num_prompts"]]
    assert sum(one["reused_tokens"] for one in workers) == summary["reused_tokens"] > 0
    for one in workers:
        assert one["prefix_store"]["reused_tokens"] == one["reused_tokens"]
    assert f"reused {summary['reused_tokens']} of {summary['prompt_tokens']} prompt tokens" in err


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_the_command_is_ended_and_continued_on_one_machine(
    file_run: FileRun, nodes: Nodes, kind: signal.Signals
) -> None:
    file_run.hold()
    file_run.start("--on", "ray", "--ray-address", nodes.address)
    wait_until(lambda: len(file_run.held()) == 2 and file_run.journal())
    assert file_run.process is not None
    os.killpg(file_run.process.pid, kind)
    status, out, err = file_run.end()
    done = len(file_run.journal())
    assert 0 < done < file_run.num_prompts
    assert out == ""
    assert "Traceback" not in err
    if kind is signal.SIGINT:
        assert status == 130, err
        assert f"interrupted; {done} of {file_run.num_prompts} answers are kept" in err
    file_run.let_go()
    file_run.start()
    status, _, err = file_run.end()
    assert status == 0, err
    assert f"{done} of {file_run.num_prompts} prompts are answered" in err
    ids = [answer["id"] for answer in file_run.answers()]
    assert ids == [f"q{i}" for i in range(file_run.num_prompts)]


@pytest.mark.nightly
def test_work_that_kills_every_worker_is_given_up_and_the_rest_is_kept(
    file_run: FileRun, nodes: Nodes
) -> None:
    (file_run.folder / "die").touch()
    file_run.start("--on", "ray", "--ray-address", nodes.address, "--workers", 1)
    status, out, err = file_run.end()
    assert status == 2, err
    assert "3 workers in a row were lost" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out == ""
    assert not Path(file_run.folder / "out.jsonl").exists()


@pytest.mark.nightly
def test_errors_and_defaults_are_those_of_one_machine(file_run: FileRun) -> None:
    """On a cluster that is started here, which reads neither files nor tokenizer in the command."""
    file_run.env = {k: v for k, v in file_run.env.items() if not k.startswith("RAY_AUTH")}
    file_run.num_prompts = 3
    file_run.start("--system", "x", "--on", "ray", "--workers", 1)
    status, _, err = file_run.end()
    assert status == 2, err
    assert "this model's tokenizer has no chat template; omit --system" in err.splitlines()[-1]
