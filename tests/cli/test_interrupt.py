"""Ctrl-C ends a command with status 130 and a message about what is kept, without traceback."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from installed_package import Install
from shell import Shell

from kvpolicy.cli import main

PLUGIN = """
from pathlib import Path

import attrs
from kvpolicy import hookimpl


@attrs.define(eq=False)
class Interrupting:
    after: int = 3
    calls = []

    @hookimpl
    def score(self, positions):
        self.calls.append(1)
        if len(self.calls) == self.after:
            raise KeyboardInterrupt
        return positions.float()
"""


@pytest.fixture
def interrupting(tmp_path: Path) -> tuple[object, ...]:
    path = tmp_path / "interrupting.py"
    path.write_text(PLUGIN, encoding="utf-8")
    return ("--plugin", path, "--policy", "interrupting", "--budget", 8, "--buffer", 4)


COMMAND = """
import typer

app = typer.Typer()

@app.command()
def main() -> None:
    raise KeyboardInterrupt
"""


def test_an_interrupt_before_any_result(kvpolicy: Shell, install: Install) -> None:
    install("early", {"kvpolicy.commands": {"early": "early:app"}}, early=COMMAND)
    answer = kvpolicy("early")
    assert (answer.status, answer.out, answer.err) == (130, "", "kvpolicy: interrupted.\n")


def test_an_interrupt_while_modules_are_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "kvpolicy.cli.app", Interrupting("kvpolicy.cli.app"))
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 130
    assert capsys.readouterr().err == "kvpolicy: interrupted.\n"


@pytest.fixture
def with_interrupts() -> Iterator[None]:
    """Tests that a shell script runs in the background ignore interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


FINALISER = """
import time

class Interrupts:
    def __del__(self):
        raise KeyboardInterrupt

Interrupts()
deadline = time.monotonic() + 60
while time.monotonic() < deadline:
    time.sleep(0.01)
"""


@pytest.mark.usefixtures("with_interrupts")
def test_an_interrupt_in_a_finaliser_is_not_lost(kvpolicy: Shell, tmp_path: Path) -> None:
    (tmp_path / "plugin.py").write_text(FINALISER, encoding="utf-8")
    answer = kvpolicy("list", "--plugin", tmp_path / "plugin.py")
    assert (answer.status, answer.out, answer.err) == (130, "", "kvpolicy: interrupted.\n")


def test_an_interrupt_while_a_text_is_streamed(
    kvpolicy: Shell, model_folder: Path, interrupting: tuple[object, ...]
) -> None:
    words = ("--model", model_folder, "--max-new-tokens", 50, "--set", "interrupting.after=9")
    answer = kvpolicy("run", " tea is 3. What is tea?", *interrupting, *words)
    assert answer.status == 130
    last = answer.err.splitlines()[-1]
    assert last.startswith("kvpolicy: interrupted after ")
    assert 0 < int(last.split()[3]) < 50
    assert answer.out.endswith("\n")


def test_an_interrupt_while_prompts_of_a_file_are_processed(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, interrupting: tuple[object, ...]
) -> None:
    """The first prompts are too short for a compaction, the last one is not."""
    prompts = [[3, 4, 5], [4, 5, 6], list(range(20))]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": p}) for p in prompts), encoding="utf-8")
    words = ("--model", model_folder, "--max-new-tokens", 2, "--slots", 1, "--json")
    answer = kvpolicy("run", "--file", path, *interrupting, *words)
    assert answer.status == 130
    assert [line["id"] for line in answer.json_lines] == [0, 1]
    assert "2 of 3 results" in answer.err
    assert "Traceback" not in answer.err
