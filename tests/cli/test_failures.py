"""Exceptions at the command line: a sentence for what a user can change, else a traceback."""

import errno
import importlib
import io
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import metadata
from pathlib import Path

import pytest
from installed_package import Install
from shell import Answer, Shell, refusal

import kvpolicy
from kvpolicy.cli.failures import DEFECT, ISSUES, standard_streams
from kvpolicy.cli.output import print_text
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import MAX_BYTES

RAISING = """
import typer

ERRORS = []
app = typer.Typer()

@app.command()
def main() -> None:
    raise ERRORS[-1]
"""


@pytest.fixture
def raising(kvpolicy: Shell, install: Install) -> Callable[[BaseException], Answer]:
    """A command of a package that raises an exception."""
    install("raising", {"kvpolicy.commands": {"fail": "raising:app"}}, raising=RAISING)

    def answer(error: BaseException) -> Answer:
        importlib.import_module("raising").ERRORS.append(error)
        return kvpolicy("fail")

    return answer


def test_what_a_user_can_change_is_one_sentence(
    raising: Callable[[BaseException], Answer],
) -> None:
    errors: list[tuple[BaseException, str]] = [
        (KVPolicyError("no budget"), "no budget"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "a" * 999), "aaa"),
        (PermissionError(errno.EACCES, "Permission denied", b"/a"), "/a "),
        (IsADirectoryError(errno.EISDIR, "Is a directory", Path("a")), "Is a directory"),
        (OSError(errno.EIO, "", 3), "3 "),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (MemoryError(), "--budget"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "memory"),
    ]
    for error, part in errors:
        assert part in refusal(raising(error))


OUR_FILE = Path(kvpolicy.__file__).parent / "lab/report/assets/none.css"


@pytest.mark.parametrize(
    "error",
    [
        AssertionError("we were wrong\x1b[31m"),
        RecursionError("maximum recursion depth exceeded"),
        FileNotFoundError(errno.ENOENT, "No such file or directory", str(OUR_FILE)),
        OSError("a library has raised this, not the system"),
        OSError(errno.EBADF, "Bad file descriptor"),
    ],
)
def test_a_defect_shows_its_traceback_and_where_to_report_it(
    raising: Callable[[BaseException], Answer], error: BaseException
) -> None:
    answer = raising(error)
    assert answer.status == DEFECT
    first, *_, last = answer.err.splitlines()
    assert first == "Traceback (most recent call last):"
    assert ISSUES in last
    assert "\x1b" not in answer.err
    assert answer.out == ""


def test_defects_are_reported_to_this_project() -> None:
    urls = dict(url.split(", ") for url in metadata("kvpolicy").get_all("Project-URL") or [])
    assert f"{urls['Source']}/issues" == ISSUES


def test_a_deleted_working_folder_is_named(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert "working folder" in refusal(kvpolicy("list"))
    os.chdir(tmp_path)  # where monkeypatch can go back from


@pytest.mark.parametrize("closed", [{"stdin"}, {"stdout"}, {"stderr"}, {"stdin", "stdout"}])
def test_closed_streams_do_not_matter(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, closed: set[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        for name in closed:
            patch.setattr(sys, name, None)
        assert kvpolicy("list").status == 0
        assert kvpolicy("lst").status == 2
        assert kvpolicy("run", "--file", "-", "--model", "none").status == 2


class Failing(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_messages_that_cannot_be_written_are_dropped(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Failing())
        assert kvpolicy("lst").status == 2


def test_characters_that_stdout_lacks_are_escaped(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stdout)
        assert kvpolicy("run", "--help").status == 0
        with standard_streams():
            print_text("café ─")
    assert stdout.buffer.getvalue().endswith(b"caf\\xe9 \\u2500")  # type: ignore[attr-defined]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("script", "status", "part"),
    [
        ("{k} list | head -c 1; exit ${PIPESTATUS[0]}", 0, ""),
        ("{k} list <&- >&- 2>&-", 0, ""),
        ("{k} list >/dev/full", 2, "standard output"),
        ("{k} lst 2>/dev/full", 2, ""),
        ("{k} lst 2>&1 | head -c 0; exit ${PIPESTATUS[0]}", 2, ""),
        pytest.param(
            "{k} run --file /dev/zero --model none",
            2,
            f"{MAX_BYTES >> 20} MiB",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_shell_may_close_what_it_likes(script: str, status: int, part: str) -> None:
    command = script.replace("{k}", f"'{sys.executable}' -m kvpolicy")
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert part in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_a_reader_of_stdout_that_has_gone_is_no_failure(option: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        words = [sys.executable, "-m", "kvpolicy", option]
        done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")
