"""`kvpolicy run --tensor-parallel`: only the first process prints; all report errors."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from shell import Shell, refusal
from tensor_parallel_runs import start

from kvpolicy.cli.output import info, print_text
from kvpolicy.cli.run import first_process_prints
from kvpolicy.errors import KVPolicyError


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend to be one of two processes of torchrun."""

    def become(number: int) -> None:
        monkeypatch.setenv("RANK", str(number))
        monkeypatch.setenv("WORLD_SIZE", "2")

    return become


def test_only_thefirst_process_prints(
    rank: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    for number in (0, 1):
        rank(number)
        with first_process_prints():
            print_text(f"a result of {number}\n")
            info("a figure")
    print_text("afterwards\n")
    assert capsys.readouterr() == ("a result of 0\nafterwards\n", "kvpolicy: a figure\n")


def test_errors_of_other_processes_name_the_process(rank: Callable[[int], None]) -> None:
    rank(0)
    with pytest.raises(KVPolicyError, match=r"^no such plan$"), first_process_prints():
        raise KVPolicyError("no such plan")
    rank(1)
    message = r"^process 1 of 2 \(counted from 0\): no memory$"
    with pytest.raises(KVPolicyError, match=message), first_process_prints():
        raise KVPolicyError("no memory")


def test_a_lost_connection_is_one_sentence(rank: Callable[[int], None]) -> None:
    rank(0)
    with pytest.raises(KVPolicyError, match="process"), first_process_prints():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer")
    with pytest.raises(RuntimeError, match="a defect"), first_process_prints():
        raise RuntimeError("a defect")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


@pytest.mark.few(1)
@pytest.mark.parametrize(("words", "status"), [(["--help"], 0), (["--wrong"], 2)], ids=str)
def test_a_process_of_torchrun_ends_with_its_output_and_without_a_shutdown(
    words: list[str], status: int
) -> None:
    """Threads of a process group that still need the interpreter would abort a shutdown."""
    program = (
        "import atexit; atexit.register(print, 'shut down')\n"
        f"from kvpolicy.cli import main; main({words})"
    )
    ends = {}
    for under_torchrun in (False, True):
        environment = {key: value for key, value in os.environ.items() if "TORCHELASTIC" not in key}
        if under_torchrun:
            environment["TORCHELASTIC_RUN_ID"] = "none"
        ends[under_torchrun] = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment
        )
    plain, ours = ends[False], ends[True]
    assert plain.returncode == ours.returncode == status
    assert plain.stdout == f"{ours.stdout}shut down\n"
    assert plain.stderr == ours.stderr
    assert ours.stdout + ours.stderr


def test_a_single_process_gets_a_hint_how_to_start_several(shell: Shell) -> None:
    actual = refusal(shell("run", "--tensor-parallel", "hello"))
    assert "torchrun" in actual


def test_prompts_on_standard_input_are_refused(shell: Shell, rank: Callable[[int], None]) -> None:
    rank(0)
    for words in (("-",), ("--file", "-")):
        assert "standard input" in refusal(shell("run", "--tensor-parallel", *words))


@pytest.mark.parametrize(
    "words",
    [("run", "hello", "--policy", "full"), ("ablate", "--n", "1"), ("trace", "hello")],
    ids=lambda words: words[0],
)
def test_commands_that_every_process_would_repeat_are_refused(
    shell: Shell,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--tensor-parallel" in refusal(shell(*words))


_FAILS_IN_ONE = """
import os
import attrs
from kvpolicy import hookimpl

@attrs.define(eq=False)
class Moody:
    @hookimpl
    def score(self, positions):
        if os.environ["RANK"] == "1":
            raise OSError("no space left")
        return positions.float()
"""


@pytest.mark.nightly
def test_a_policy_that_fails_in_one_process_ends_all_processes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "moody.py").write_text(_FAILS_IN_ONE)
    (tmp_path / "prompts.txt").write_text("<|user|> rent is 3. What is rent?<|assistant|><think>")
    options = "--policy moody --budget 8 --buffer 4 --max-new-tokens 40"
    done = start(
        tmp_path, "-m", "kvpolicy", "run", "--tensor-parallel", "--plugin", "moody.py",
        "--file", "prompts.txt", *options.split(),
    )  # fmt: skip
    assert done.returncode != 0
    assert done.stdout == ""
    assert done.stderr.count("Traceback (most recent") == 1, "that of torchrun itself"
    actual = [line for line in done.stderr.splitlines() if line.startswith("kvpolicy: ")]
    assert [line for line in actual if "lost its connection" not in line] == [
        "kvpolicy: process 1 of 2 (counted from 0): policy 'moody' raised OSError in score() at "
        "layer 0: no space left."
    ]
