"""A sweep on a cluster: no sample lost, none doubled, whatever is killed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sweeps_on_ray import Nodes, Sweep, needs_ray, wait_until

pytestmark = [pytest.mark.slow, needs_ray]

NUM = 24  # samples


def untimed(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Samples by key, without their times."""
    timed = ("prefill_s", "decode_s")
    return {s["key"]: {k: v for k, v in s.items() if k not in timed} for s in samples}


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.nightly  # that of files of prompts kills a node, too
def test_with_a_node_killed_in_the_middle_every_sample_is_stored_once(
    sweep: Sweep, nodes: Nodes
) -> None:
    sweep.start("--workers", 1, name="undisturbed")
    status, _, err = sweep.end()
    assert status == 0, err
    sweep.hold()
    sweep.start("--on", "ray", "--ray-address", nodes.address)
    wait_until(lambda: len(sweep.held()) == 2)
    by_node = {nodes.node_of(worker): worker for worker in sweep.held()}
    assert set(by_node) == {0, 1}, "each node has a worker"
    before = len(sweep.samples())
    assert 0 < before < NUM
    nodes.kill(1)
    assert not lives(by_node[1])
    sweep.let_go()
    status, out, err = sweep.end()
    assert status == 0, err
    assert "was lost" in err
    assert "unfinished samples are done again" in err
    samples = sweep.samples()
    assert len(samples) == len(untimed(samples)) == NUM
    assert untimed(samples) == untimed(sweep.samples("undisturbed"))
    table = json.loads(out)["table"]
    assert [row["n"] for row in table] == [12, 12]
    assert all(row["throughput_tok_s"] is None for row in table), "nobody did a cell in one go"


@pytest.mark.nightly
def test_ctrl_c_keeps_samples_ends_workers_and_can_be_continued(sweep: Sweep, nodes: Nodes) -> None:
    sweep.hold()
    sweep.start("--on", "ray", "--ray-address", nodes.address)
    wait_until(lambda: len(sweep.held()) == 2 and sweep.samples())
    sweep.interrupt()
    status, out, err = sweep.end()
    assert status == 130, err
    done = len(sweep.samples())
    assert f"interrupted; {done} of {NUM} samples are kept" in err
    assert "Traceback" not in err
    assert out == ""
    wait_until(lambda: not any(lives(worker) for worker in sweep.held()))
    sweep.let_go()
    sweep.start("--workers", 1)
    status, _, err = sweep.end()
    assert status == 0, err
    assert f"{done} of {NUM} samples are done" in err, "the same run, wherever it is run"
    assert len(sweep.samples()) == len(untimed(sweep.samples())) == NUM


@pytest.mark.nightly
def test_work_that_kills_every_worker_is_given_up_and_the_rest_is_kept(
    sweep: Sweep, nodes: Nodes
) -> None:
    (sweep.folder / "die").touch()
    sweep.start("--on", "ray", "--ray-address", nodes.address, "--workers", 1)
    status, out, err = sweep.end()
    assert status == 2, err
    assert "3 workers in a row were lost" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert out == ""
    assert len(sweep.samples()) == NUM // 2, "the full cache never compacts"


@pytest.mark.nightly
def test_without_an_address_a_cluster_is_started_and_ended(sweep: Sweep) -> None:
    env = {k: v for k, v in sweep.env.items() if not k.startswith("RAY_AUTH")}
    sweep.env = env | {"HOME": str(sweep.folder)}
    sweep.start("--on", "ray", "--workers", 1, "--cpus-per-worker", 2)
    status, out, err = sweep.end()
    assert status == 0, err
    assert "starting a cluster on this machine" in err
    table = json.loads(out)["table"]
    assert all(row["throughput_tok_s"] > 0 for row in table), "one worker does cells in one go"
    assert not (sweep.folder / ".ray").exists(), "nothing is left in the user's home"
    assert len(sweep.samples()) == NUM
    manifest = json.loads((sweep.folder / "out" / "manifest.json").read_text(encoding="utf-8"))
    (session,) = manifest["sessions"]
    assert (session["workers"], session["threads"]) == (1, 2), "as the worker has them"


def test_a_cluster_that_does_not_answer_is_named(sweep: Sweep) -> None:
    sweep.start("--on", "ray", "--ray-address", f"127.0.0.1:{os.getpid() % 1000 + 1}")
    status, out, err = sweep.end()
    assert (status, out) == (2, "")
    assert "no Ray cluster answers at '127.0.0.1:" in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.nightly
def test_a_dry_run_lists_the_cells_and_writes_nothing(sweep: Sweep, nodes: Nodes) -> None:
    sweep.start("--on", "ray", "--ray-address", nodes.address, "--dry-run")
    status, out, err = sweep.end()
    assert status == 0, err
    found = json.loads(out)
    assert (found["samples"], found["left"], found["workers"]) == (NUM, NUM, 2)
    assert not (sweep.folder / "out").exists()
