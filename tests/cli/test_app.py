"""The program: commands from packages, help, shell completion."""

import os
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from installed_package import Install
from shell import Shell, refusal

from kvpolicy.cli.app import PANELS, command_names, load_command


def leaves() -> Iterator[tuple[str, Any]]:
    """Every command that does something, with its full name."""
    for name in command_names():
        command = load_command(name)
        for sub, one in getattr(command, "commands", {"": command}).items():
            yield f"kvpolicy {name} {sub}".strip(), one


LEAVES = dict(leaves())


@pytest.mark.parametrize("name", LEAVES)
def test_a_command_has_two_or_three_examples(name: str) -> None:
    title, *examples = str(LEAVES[name].epilog).splitlines()
    assert title == "Examples:"
    assert 2 <= len(examples) <= 3
    for example in examples:
        assert example == name or example.startswith(f"{name} ")
        assert len(example) <= 76, "a longer one is wrapped"


@pytest.mark.needs_reasoner
@pytest.mark.parametrize("name", LEAVES)
def test_the_examples_of_a_command_can_be_parsed(name: str) -> None:
    for example in str(LEAVES[name].epilog).splitlines()[1:]:
        words = shlex.split(example.partition(" > ")[0])
        arguments = words[len(name.split()) :]
        LEAVES[name].make_context(name, arguments)


def test_help_lists_commands_in_panels_with_complete_sentences(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = kvpolicy("--help").out
    order = [shown.index(f"─ {panel} ─") for panel in PANELS]
    assert order == sorted(order)
    for name in command_names():
        (line,) = [line for line in shown.splitlines() if line.startswith(f"│ {name} ")]
        assert line.rstrip(" │").endswith("."), line


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_without_a_command_help_is_shown(kvpolicy: Shell, words: tuple[str, ...]) -> None:
    answer = kvpolicy(*words)
    assert answer.status == 0
    assert "Usage: kvpolicy [OPTIONS] COMMAND [ARGS]..." in answer.out
    assert "--install-completion" in answer.out


def test_a_default_in_brackets_is_shown(kvpolicy: Shell) -> None:
    assert "[default: cuda, or cpu]" in kvpolicy("run", "--help").out


def test_shell_completion_completes_commands_and_options(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_KVPOLICY_COMPLETE", "complete_bash")
    for line, completed in (("kvpolicy ab", "ablate"), ("kvpolicy run --pol", "--policy")):
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split()) - 1))
        with pytest.raises(SystemExit):
            kvpolicy()
        assert capsys.readouterr().out.split() == [completed]


def test_a_broken_command_gives_one_sentence_and_the_others_still_work(
    kvpolicy: Shell, install: Install
) -> None:
    install("odd", {"kvpolicy.commands": {"broken": "no_such_package.cli:app"}})
    sentence = refusal(kvpolicy("broken"))
    assert all(part in sentence for part in ("'broken'", "no_such_package.cli:app", "odd 1.0"))
    assert "no_such_package.cli:app" in kvpolicy("--help").out
    assert kvpolicy("list").status == 0


@pytest.mark.parametrize("columns", ["0", "1", "99999999", "9" * 5000])
def test_help_is_shown_in_any_width(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    shown = kvpolicy("--help").out
    assert "ablate" in shown
    assert max(map(len, shown.splitlines())) <= 1000
    assert os.environ["COLUMNS"] == columns
