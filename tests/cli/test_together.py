"""`kvpolicy run --tensor-parallel`: the first process speaks for all."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
import typer
from shell import Shell, refusal
from together import start

from kvpolicy.cli import together as module
from kvpolicy.cli.output import say, write
from kvpolicy.cli.together import together
from kvpolicy.errors import KVPolicyError


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As torchrun tells each process of two; it keeps the store."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(module, "_PATIENCE", timedelta(seconds=0.5))
    yield
    del store


def failing(rank: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", str(rank))
    with together():
        write(f"said by {rank}\n")
        raise error


def test_if_all_fail_the_first_says_why(
    two: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KVPolicyError, match=r"^no such plan$"):
        failing(0, KVPolicyError("no such plan"), monkeypatch)
    with pytest.raises(typer.Exit) as silent:
        failing(1, KVPolicyError("no such plan"), monkeypatch)
    assert silent.value.exit_code == 2
    assert capsys.readouterr().out == "said by 0\n"


def test_if_another_fails_alone_it_says_so_and_the_first_does_not(
    two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KVPolicyError, match=r"^process 1 of 2 \(counted from 0\): no memory$"):
        failing(1, KVPolicyError("no memory"), monkeypatch)
    with pytest.raises(typer.Exit) as silent:
        failing(0, RuntimeError("Connection closed by peer"), monkeypatch)
    assert silent.value.exit_code == 2


def test_a_defect_of_ours_keeps_its_traceback(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError):
        failing(1, ZeroDivisionError(), monkeypatch)


def test_what_nobody_can_be_asked_about_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(KVPolicyError, match="process 1 of 2"):
        failing(1, KVPolicyError("no such plan"), monkeypatch)


def test_an_interrupt_is_told_once(two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(typer.Exit):
        failing(1, KeyboardInterrupt(), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        failing(0, KeyboardInterrupt(), monkeypatch)


def test_only_the_first_writes_and_outputs_come_back(
    two: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with together():
        write("a result")
        say("a figure")
    write("afterwards\n")
    assert capsys.readouterr() == ("afterwards\n", "")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def test_a_single_process_is_told_how_to_start_several(shell: Shell) -> None:
    said = refusal(shell("run", "--tensor-parallel", "hello"))
    assert "torchrun --nproc-per-node N -m kvpolicy run --tensor-parallel" in said


def test_prompts_on_standard_input_are_refused(
    shell: Shell, two: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    for words in (("-",), ("--file", "-")):
        assert "only one process could read" in refusal(shell("run", "--tensor-parallel", *words))


@pytest.mark.parametrize(
    "words",
    [("run", "hello", "--policy", "full"), ("ablate", "--n", "1"), ("trace", "hello")],
    ids=lambda words: words[0],
)
def test_what_each_process_would_do_again_is_refused(
    shell: Shell,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "each of which would do all the work" in refusal(shell(*words))


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


@pytest.mark.slow
def test_a_policy_that_fails_in_one_process_ends_all_with_one_sentence(tmp_path: Path) -> None:
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
    said = [line for line in done.stderr.splitlines() if line.startswith("kvpolicy: ")]
    assert said == [
        "kvpolicy: process 1 of 2 (counted from 0): policy 'moody' raised OSError in score() at "
        "layer 0: no space left."
    ]
