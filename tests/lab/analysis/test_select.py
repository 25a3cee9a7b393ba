"""Which runs the names of a command line stand for."""

from pathlib import Path

import pytest
from run_folders import write_run

from kvpolicy.errors import ResultsError
from kvpolicy.lab.analysis.pooling import pool
from kvpolicy.lab.analysis.select import RUNS, find_cell, open_runs
from kvpolicy.lab.store.read import read_run


@pytest.fixture(autouse=True)
def _in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def folders(*names: str) -> list[Path]:
    return [run.path.resolve() for run in open_runs(names, warn=pytest.fail)]


def test_a_name_is_a_folder_here_or_else_one_of_the_default_output(tmp_path: Path) -> None:
    write_run(RUNS / "mine")
    assert folders("mine") == [tmp_path / RUNS / "mine"]
    write_run(Path("mine"))
    assert folders("mine") == [tmp_path / "mine"]


def test_a_folder_of_runs_stands_for_all_of_them_and_each_is_read_once(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_run(RUNS / name)
    both = [tmp_path / RUNS / name for name in ("a", "b")]
    assert sorted(folders(str(RUNS))) == both
    assert folders("b", str(RUNS), "a", "b")[0] == both[1]
    assert len(folders("b", str(RUNS), "a", "b")) == 2


def test_a_name_without_a_run_is_refused() -> None:
    Path("empty").mkdir()
    for name in ("empty", "nowhere"):
        with pytest.raises(ResultsError, match=name):
            open_runs([name], warn=pytest.fail)


def test_a_plan_is_found_by_the_name_that_its_run_has(tmp_path: Path) -> None:
    """Also where it is shown with what tells it from another one."""
    small = read_run(write_run(tmp_path / "small"))
    large = read_run(write_run(tmp_path / "large", buffer=32))
    cells = pool([small, large])
    assert find_cell(cells, "small:h2o@64").name == "H2O, buffer=16@64"
    assert find_cell(cells, "H2O, buffer=32@96").runs == ("large",)
    with pytest.raises(ResultsError, match="buffer=16@64; H2O, buffer=32@64"):
        find_cell(cells, "H2O@64")
    assert find_cell(pool([small]), "h2o@64").name == "H2O@64"
