"""How things are put: columns, units, pace."""

import io
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shell import Shell

from kvpolicy.cli import progress
from kvpolicy.cli.columns import columns
from kvpolicy.cli.progress import Pace, open_progress
from kvpolicy.cli.units import clock, human_bytes


@pytest.mark.parametrize("group", ["", "plan", "results", "tasks", "steer", "reasoner"])
def test_a_list_of_commands_has_whole_sentences(
    kvpolicy: Shell, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = kvpolicy(*group.split(), "--help").out.partition("Commands:\n")[2]
    assert commands.count("\n") > 1
    assert commands.count(".\n") == commands.count("\n")
    assert "..." not in commands


def test_numbers_are_set_flush_right_and_words_flush_left() -> None:
    table = columns(["name", "n"], [["a", "1"], ["long", "1000"]], right=[1])
    assert table.splitlines() == ["name     n", "────  ────", "a        1", "long  1000"]


@given(
    st.lists(st.tuples(st.text("ab", max_size=9), st.text("cd ", max_size=80)), max_size=5),
    st.integers(40, 90),
)
def test_the_last_column_is_wrapped_to_fit(rows: list[tuple[str, str]], width: int) -> None:
    table = columns(["name", "words"], rows, width=width)
    words = [word for _, text in rows for word in text.split()]
    if all(len(word) <= 20 for word in words):
        assert max(map(len, table.splitlines())) <= width
    assert [w for w in table.split() if set(w) <= set("cd")] == words


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1023 * 1024, "1.0 MiB"),
        (5 * 2**30, "5.0 GiB"),
        (3 * 2**40, "3.0 TiB"),
    ],
)
def test_bytes_are_put_in_the_unit_that_reads_best(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (75, "1:15"), (3661, "1:01:01")]
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_the_pace_counts_only_what_was_done_since(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    pace = Pace(total=100, num_done=40)
    assert pace.describe(40) == ""
    now[0] += 10
    assert pace.describe(60) == "2.0/s, 0:20 left"
    now[0] += 390
    assert pace.describe(42) == "200 s each, 3:13:20 left"


def test_a_log_gets_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    with open_progress(10) as shown:
        for done in range(10):
            now[0] += 4
            shown.show("busy", done)
        shown.keep("a line that stays")
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert lines[-1] == "a line that stays"
    assert [line.split(" ")[0] for line in lines[:-1]] == ["2/10", "5/10", "8/10"]


class Terminal(io.StringIO):
    """Something to draw on."""

    def isatty(self) -> bool:
        return True


def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What is drawn on stderr from now on."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return shown


@pytest.mark.parametrize("name", ["ours [/w sinks]", "R-KV [ours]", "[bold]R-KV[/bold]"])
def test_on_a_terminal_names_are_shown_as_they_are(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    terminal = on_a_terminal(monkeypatch)
    with open_progress(10) as shown:
        shown.show(f"{name}: 80%", 1)
        shown.keep(f"{name} is done")
    assert f"{name}: 80%" in terminal.getvalue()
    assert f"{name} is done" in terminal.getvalue()


def test_on_a_terminal_it_is_drawn_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked while progress is shown, and would have the locks of a thread."""
    terminal = on_a_terminal(monkeypatch)
    now = [1.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now[0])
    num_threads = threading.active_count()
    with open_progress(10) as shown:
        for done in range(10):
            now[0] += 1
            shown.show("full cache: 80% of 5/10 right", done)
            assert threading.active_count() == num_threads
        shown.keep("a line that stays")
    drawn = terminal.getvalue()
    assert "9/10" in drawn
    assert "0.9/s, 0:01 left" in drawn
    assert "80% of 5/10 right" in drawn
    assert "a line that stays\n" in drawn
