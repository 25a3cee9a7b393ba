"""The scripts for SLURM do what their page says, with two nodes that are this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shell import Shell
from sweeps_on_ray import PATIENCE_S, needs_ray

SCRIPTS = Path(__file__).parents[3] / "docs" / "examples" / "slurm"

SRUN = """#!/bin/bash
# Its command as often as SLURM would run it; the options that choose nodes mean nothing here.
while [[ $1 == --* ]]; do
    [[ $1 == --ntasks=* ]] && count=${1#*=}
    shift
done
trap 'kill $(jobs -p); wait' TERM
for _ in $(seq "$count"); do "$@" & done
wait
"""

SCONTROL = """#!/bin/bash
[ "$*" = "show hostnames node[1-2]" ] && hostname && hostname
"""

KVPOLICY = """#!/bin/bash
exec {python} -m kvpolicy "$@"
"""

#: Writes down its words, one a line.
RECORDER = """#!/bin/bash
printf '%s\\n' "$@" > words
"""


def submit(
    script: str, folder: Path, model: Path, *words: object, command: str = KVPOLICY, **slurm: object
) -> str:
    """Run a script as SLURM would, to its end, with a program called kvpolicy; what it says."""
    commands = folder / "bin"
    commands.mkdir(exist_ok=True)
    python = sys.executable
    texts = {"srun": SRUN, "scontrol": SCONTROL, "kvpolicy": command.format(python=python)}
    for name, text in texts.items():
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    stated = {f"SLURM_{key.upper()}": str(value) for key, value in slurm.items()}
    path = f"{commands}:{Path(python).parent}:{os.environ['PATH']}"
    asked = ["--model", model, "--n", 6, "--slots", 2, "--max-new-tokens", 20, *words]
    done = subprocess.run(
        ["bash", SCRIPTS / script, *(str(word) for word in asked)],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | stated | {"PATH": path, "RAY_worker_niceness": "0"},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def samples_in(folder: Path) -> list[dict[str, object]]:
    lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sbatch")), ids=lambda path: path.name)
def test_a_script_is_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert script.read_text(encoding="utf-8").count("#SBATCH") >= 5


@pytest.mark.nightly
@needs_ray
def test_a_cluster_is_started_on_the_nodes_of_a_job_and_ends_with_it(
    tmp_path: Path, model_folder: Path
) -> None:
    words = ("--policies", "full,h2o", "--budgets", 12, "--buffer", 6, "--output", "out")
    job = {"job_id": os.getpid(), "job_nodelist": "node[1-2]", "cpus_per_task": 1}
    actual = submit("ray.sbatch", tmp_path, model_folder, *words, **job)
    assert "Traceback" not in actual
    samples = samples_in(tmp_path / "out")
    assert len({sample["key"] for sample in samples}) == len(samples) == 12
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["sessions"][-1]["workers"] == 2
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if is_of_job(path, os.getpid())]
    assert not left, "Ray is gone when the job is"


def is_of_job(path: Path, job: int) -> bool:
    try:
        return f"/tmp/ray-{job}/".encode() in path.read_bytes()
    except OSError:
        return False


@pytest.mark.slow
def test_every_task_of_an_array_has_a_budget_and_a_folder_of_its_own(
    tmp_path: Path, model_folder: Path, kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for task, words in (
        (3, ("--policies", "h2o")),
        (0, ("--policies", "full", "--output", "results/full")),
    ):
        submit("array.sbatch", tmp_path, model_folder, *words, command=RECORDER, array_task_id=task)
        assert kvpolicy(*(tmp_path / "words").read_text().splitlines()).status == 0
    samples = samples_in(tmp_path / "results" / "192")
    assert {sample["budget"] for sample in samples} == {192}
    assert len(samples) == 6
    assert {sample["budget"] for sample in samples_in(tmp_path / "results" / "full")} == {None}
    folders = sorted(path.name for path in (tmp_path / "results").iterdir())
    assert folders == ["192", "full"]
