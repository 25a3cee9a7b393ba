"""Output: units, progress."""

import io
import json
import sys
import threading

import pytest

from kvpolicy.cli import output
from kvpolicy.cli.output import Progress
from kvpolicy.cli.text_table import format_table


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_log_gets_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Progress(10, clock=clock) as progress:
        for done in range(10):
            clock.now += 4
            progress.update("busy [/b]", done)
        progress.log("a line that stays [/b]")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert lines[-1] == "a line that stays [/b]"
    assert [line.split(" ")[0] for line in lines[:-1]] == ["2/10", "5/10", "8/10"]


@pytest.mark.parametrize(
    ("each_s", "pace"), [(5, "0.2/s, 0:00:20 left"), (200, "200 s each, 0:13:20 left")]
)
def test_the_speed_ignores_what_was_done_before(
    capsys: pytest.CaptureFixture[str], each_s: int, pace: str
) -> None:
    clock = Clock()
    with Progress(100, num_done=90, clock=clock) as progress:
        for done in range(91, 97):
            clock.now += each_s
            progress.update("busy", done)
    assert capsys.readouterr().err.splitlines()[-1] == f"96/100 done, {pace}; busy"


def test_things_that_end_together_do_not_make_the_rest_seem_quick(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Progress(40, clock=clock) as progress:
        clock.now += 100
        for done in range(1, 11):  # a batch of ten, whose results are read one after the other
            clock.now += 0.001
            progress.update("busy", done)
        clock.now += 10
        progress.update("busy", 10)
    assert capsys.readouterr().err.splitlines()[-1] == "10/40 done, 11 s each, 0:05:30 left; busy"


def test_a_known_share_of_the_work_decides_the_time_that_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    with Progress(40, clock=clock) as progress:
        clock.now += 60
        progress.update("busy", 1, share=0.25)
    assert capsys.readouterr().err.splitlines()[-1] == "1/40 done, 60 s each, 0:03:00 left; busy"


class Terminal(io.StringIO):
    """A stream that pretends to be a terminal."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace stderr."""
    stderr = Terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return stderr


@pytest.mark.parametrize("name", ["ours [/w sinks]", "R-KV [ours]", "[bold]R-KV[/bold]"])
def test_on_a_terminal_brackets_are_not_markup(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    terminal = on_a_terminal(monkeypatch)
    with Progress(10) as progress:
        progress.update(f"{name}: 80%", 1)
        progress.log(f"{name} is done")
    assert f"{name}: 80%" in terminal.getvalue()
    assert f"{name} is done" in terminal.getvalue()


def test_on_a_terminal_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked while progress is shown, and would inherit the locks of a thread."""
    terminal = on_a_terminal(monkeypatch)
    clock = Clock()
    num_threads = threading.active_count()
    with Progress(10, clock=clock) as progress:
        for done in range(10):
            clock.now += 2
            progress.update("full cache: accuracy 80%", done)
            assert threading.active_count() == num_threads
        progress.log("a line that stays")
    drawn = terminal.getvalue()
    assert "9/10" in drawn
    assert "0.5/s, 0:00:02 left" in drawn
    assert "accuracy 80%" in drawn
    assert "a line that stays" in drawn


HOSTILE = "a\x1b]52;c;aGk=\x07\u202eb\nc\u200b[red]"
SHOWN = r"a\u001b]52;c;aGk=\u0007\u202eb\nc\u200b[red]"


def test_text_of_others_has_no_effect_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.info(HOSTILE)
    output.print_lines([HOSTILE])
    output.print_entries([(HOSTILE, HOSTILE, "")])
    output.print_text(format_table([HOSTILE], [[HOSTILE]]) + "\n")
    captured = capsys.readouterr()
    assert captured.err == f"kvpolicy: {SHOWN}\n"
    line = "─" * len(SHOWN)
    assert captured.out.splitlines() == [SHOWN, f"{SHOWN}  {SHOWN}", SHOWN, line, SHOWN]
    terminal = on_a_terminal(monkeypatch)
    with Progress(10) as progress:
        progress.update(HOSTILE, 1)
        progress.log(HOSTILE)
    assert terminal.getvalue().count(SHOWN) >= 2


def test_a_text_of_several_lines_keeps_its_line_breaks(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_text("a\n\tb\r\x1bc\n")
    output.info_text("a\n\tb\r\x1bc")
    captured = capsys.readouterr()
    assert captured.out == captured.err == "a\n\tb\\r\\u001bc\n"


def test_what_programs_read_is_exact_and_safe_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output.print_exact(HOSTILE)
    assert capsys.readouterr().out == HOSTILE
    output.print_json({"text": HOSTILE})
    shown = capsys.readouterr().out
    assert json.loads(shown) == {"text": HOSTILE}
    assert shown.strip().isprintable()
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.print_exact("a\x1bb\r\nc\n")
    assert terminal.getvalue() == "a\\u001bb\nc\n"


def test_entries_are_readable_on_the_narrowest_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1")
    output.print_entries([("name", "a summary of some words", "knob=1"), ("other", " ", "")])
    assert capsys.readouterr().out.splitlines() == [
        "name   a summary of some",
        "       words",
        "         knob=1",
        "other",
    ]
