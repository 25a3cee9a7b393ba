"""Atomic writes: the old file or the new one, and no file of the user in between."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write, atomic_writer, remove_unfinished_writes


def test_a_write_touches_no_other_file(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    for name in ("table.csv.new", ".table.csv.new"):
        (tmp_path / name).write_text("mine", encoding="utf-8")
    for content in ("a", "b"):
        atomic_write(path, content)
        assert path.read_text(encoding="utf-8") == content
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        ".table.csv.new",
        "table.csv",
        "table.csv.new",
    ]
    assert (tmp_path / "table.csv.new").read_text(encoding="utf-8") == "mine"


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "table.csv"
    atomic_write(path, "old")

    def is_full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(OutputError, match=r"table\.csv"):
        atomic_write(path, "new")
    assert [one.name for one in tmp_path.iterdir()] == ["table.csv"]
    assert path.read_text(encoding="utf-8") == "old"


@pytest.mark.skipif(os.name == "nt", reason="needs symbolic links and modes")
def test_a_link_stays_and_the_mode_of_the_file_too(tmp_path: Path) -> None:
    path, link = tmp_path / "real.csv", tmp_path / "link.csv"
    atomic_write(path, "old")
    path.chmod(0o640)
    link.symlink_to(path)
    atomic_write(link, "new")
    assert link.is_symlink()
    assert path.read_text(encoding="utf-8") == "new"
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_only_regular_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "folder", "x" * 300, "no/folder"):
        with pytest.raises(OutputError, match=name):
            atomic_write(tmp_path / name, "new")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "pipe"]
    assert (tmp_path / "pipe").is_fifo()


KILLED = """
import os, signal, sys
from pathlib import Path
from kvpolicy.files import atomic_writer
with atomic_writer(Path(sys.argv[1])) as file:
    file.write(b"a part")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs signals and locks of files")
def test_what_a_killed_write_has_left_is_removed_by_the_next_process(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    atomic_write(path, "old")
    done = subprocess.run([sys.executable, "-c", KILLED, path], check=False)
    assert done.returncode == -9
    (left,) = {one.name for one in tmp_path.iterdir()} - {"table.csv"}
    mine = [".kvpolicy-notes.new", f"{left}.new", ".kvpolicy-01234567.old"]
    for name in mine:
        (tmp_path / name).write_text("mine", encoding="utf-8")
    with atomic_writer(tmp_path / "other.csv") as being_written:
        being_written.write(b"whole")
        program = "import sys; from pathlib import Path; from kvpolicy.files import atomic_write; "
        program += "atomic_write(Path(sys.argv[1]), 'new')"
        subprocess.run([sys.executable, "-c", program, path], check=True)
    names = sorted(one.name for one in tmp_path.iterdir())
    assert names == sorted(["table.csv", "other.csv", *mine])
    assert (tmp_path / "other.csv").read_text(encoding="utf-8") == "whole"
    assert path.read_text(encoding="utf-8") == "new"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no pipes with names")
def test_nothing_but_files_is_removed_as_unfinished(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".kvpolicy-00000000.new")
    (tmp_path / ".kvpolicy-00000001.new").symlink_to("elsewhere")
    (tmp_path / ".kvpolicy-00000002.new").mkdir()
    remove_unfinished_writes(tmp_path)
    remove_unfinished_writes(tmp_path / "nothing")
    assert len(list(tmp_path.iterdir())) == 3
