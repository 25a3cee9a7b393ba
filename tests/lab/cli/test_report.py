"""``kvpolicy report`` and ``kvpolicy plot``: files, sizes and error messages."""

import json
import os
import struct
from pathlib import Path

import pytest
from run_folders import kept, write_run
from shell import Shell, refusal

PLANS = [("full cache", None), ("H2O", 64), ("H2O", 96), ("R-KV", 64), ("R-KV", 96)]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "one", plans=PLANS)


def test_a_report_is_one_file_without_references(kvpolicy: Shell, run: Path) -> None:
    before = sorted(path.name for path in run.iterdir())
    answer = kvpolicy("report", run)
    assert answer.status == 0, answer.err
    assert "40 samples of 5 cells" in answer.err
    page = Path("kvpolicy-report.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    for word in ("http:", "https:", "src=", "<link", "@import", "url("):
        assert word not in page.replace("http://www.w3.org/2000/svg", "")
    assert sorted(path.name for path in run.iterdir()) == before, "runs are only read"


def test_a_folder_of_runs_is_reported_whole(kvpolicy: Shell, run: Path) -> None:
    write_run(run.parent / "two", plans=PLANS[:2], tasks=("needle",), seeds=(1, 2))
    answer = kvpolicy("report", run.parent, "--output", "all.html", "--json").json
    assert answer["file"] == "all.html"
    assert answer["bytes"] == Path("all.html").stat().st_size
    assert [Path(folder).name for folder in answer["runs"]] == ["one", "two"]
    assert [(g["label"], g["cells"], g["samples"]) for g in answer["groups"]] == [
        ("reasoner · reasoner · seed 0", 5, 40),
        ("reasoner · needle · seeds 1, 2", 2, 32),
        ("reasoner · needle · seed 1", 2, 16),
        ("reasoner · needle · seed 2", 2, 16),
    ]


def test_runs_are_found_by_name(kvpolicy: Shell) -> None:
    write_run(Path("kvpolicy-ablate/mine"), plans=PLANS[:1])
    assert "8 samples of 1 cell (" in kvpolicy("report", "mine").err
    assert "shows 1 cell," in kvpolicy("plot", "mine", "--to", "a.svg").err


def test_only_an_earlier_report_is_replaced(kvpolicy: Shell, run: Path) -> None:
    assert kvpolicy("report", run, "--output", "r.html").status == 0
    assert kvpolicy("report", run, "--output", "r.html").status == 0
    Path("thesis.html").write_text("years of work")
    assert "is no report" in refusal(kvpolicy("report", run, "--output", "thesis.html"))
    assert Path("thesis.html").read_text() == "years of work"
    assert "cannot be written" in refusal(kvpolicy("report", run, "--output", "runs"))
    assert "cannot be written" in refusal(kvpolicy("report", run, "--output", "no/where.html"))
    os.mkfifo("pipe")
    assert "cannot be written" in refusal(kvpolicy("report", run, "--output", "pipe"))


def test_missing_and_damaged_runs_are_refused(kvpolicy: Shell, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "holds no run" in refusal(kvpolicy("report", "empty"))
    assert "nowhere" in refusal(kvpolicy("report", "nowhere"))
    write_run(tmp_path / "fresh", only_first=0)
    assert "no sample is done yet" in refusal(kvpolicy("report", "fresh"))
    assert "'reasonr'" in refusal(kvpolicy("report", run, "--rules", "reasonr"))
    (run / "kept.jsonl").write_text("{}\n{\n")
    assert "kept.jsonl" in refusal(kvpolicy("report", run))
    assert not list(tmp_path.glob("*.html"))


def test_a_record_whose_key_is_no_text_counts_as_missing(kvpolicy: Shell, run: Path) -> None:
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "kept.jsonl").write_text(json.dumps(kept(samples[0]) | {"key": {"a": 1}}) + "\n")
    manifest = json.loads((run / "manifest.json").read_text())
    session = {"started": "2026-01-01T00:00:00+00:00", "command": "ablate", "record": 1}
    manifest["sessions"] = [{**one, "record": 1} for one in manifest["sessions"]] or [session]
    (run / "manifest.json").write_text(json.dumps(manifest))
    for words in (("report", run), ("results", "list", run.parent), ("results", "table", run)):
        answer = kvpolicy(*words)
        assert answer.status == 0
        assert "kept.jsonl lacks" in answer.err


def size_of(png: Path) -> tuple[int, int]:
    width, height = struct.unpack(">II", png.read_bytes()[16:24])
    return width, height


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_the_same_runs_give_the_same_figure(kvpolicy: Shell, run: Path, suffix: str) -> None:
    starts = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}
    for name in ("a", "b"):
        answer = kvpolicy("plot", run, "--to", f"{name}.{suffix}")
        assert answer.status == 0, answer.err
    a, b = Path(f"a.{suffix}").read_bytes(), Path(f"b.{suffix}").read_bytes()
    assert a == b
    assert a.startswith(starts[suffix])


@pytest.mark.nightly
def test_a_figure_has_the_requested_size(kvpolicy: Shell, run: Path) -> None:
    kvpolicy("plot", run, "--to", "a.png")
    assert size_of(Path("a.png")) == (990, 693)  # 3.3 inches at 300 dots, and 0.7 of that
    kvpolicy("plot", run, "--to", "b.png", "--width", "page", "--height", 2, "--font-size", 9)
    assert size_of(Path("b.png")) == (2070, 600)
    kvpolicy("plot", run, "--to", "c.png", "--width", "4.5")
    assert size_of(Path("c.png"))[0] == 1350


@pytest.mark.nightly
def test_every_quantity_has_a_different_figure(kvpolicy: Shell, run: Path) -> None:
    names = ["accuracy", "length", "peak_bytes", "peak_kv_bytes", "throughput", "speed", "frontier"]
    pictures = set()
    for name in names:
        answer = kvpolicy("plot", run, "--to", f"{name}.svg", "--quantity", name)
        assert answer.status == 0, answer.err
        pictures.add(Path(f"{name}.svg").read_bytes())
    assert len(pictures) == len(names)
    kvpolicy("plot", run, "--to", "one.svg", "--series", "H2O")
    assert Path("one.svg").read_bytes() not in pictures


def test_a_figure_shows_the_chosen_budgets(kvpolicy: Shell, run: Path) -> None:
    assert "shows 5 cells," in kvpolicy("plot", run, "--to", "a.svg").err
    one = kvpolicy("plot", run, "--to", "a.svg", "--budget", 64, "--budget", "all")
    assert "shows 3 cells," in one.err, one.err
    assert "'7'" in refusal(kvpolicy("plot", run, "--to", "a.svg", "--budget", 7))


def test_seeds_are_pooled_in_figures(kvpolicy: Shell, tmp_path: Path) -> None:
    seeds = write_run(tmp_path / "seeds", plans=PLANS, seeds=(0, 1))
    answer = kvpolicy("plot", seeds, "--to", "a.svg")
    assert "a.svg" in answer.err


@pytest.mark.nightly
def test_a_figure_that_cannot_be_drawn_is_reported(
    kvpolicy: Shell, run: Path, tmp_path: Path
) -> None:
    def actual(*words: object) -> str:
        return refusal(kvpolicy("plot", run, *words))

    assert "accuracy, length" in actual("--to", "a.svg", "--quantity", "beauty")
    assert ".svg" in actual("--to", "a.gif")
    assert "--width" in actual("--to", "a.svg", "--width", "wide")
    assert "--width" in actual("--to", "a.svg", "--width", "-3")
    for number in ("0", "51"):
        assert "0.5 to 50 inches" in actual("--to", "a.svg", "--height", number)
    for number in ("inf", "nan", "0", "51"):
        assert "0.5 to 50 inches" in actual("--to", "a.svg", "--width", number)
    for number in ("0", "73"):
        assert "1 to 72 points" in actual("--to", "a.svg", "--font-size", number)
    assert "0.5" in actual("--to", "a.svg", "--width", "0.5")
    untimed = write_run(tmp_path / "untimed", plans=PLANS, timed=False)
    words = ("plot", untimed, "--to", "a.svg", "--quantity", "throughput")
    assert "'throughput'" in refusal(kvpolicy(*words))
    assert "full cache, H2O, R-KV" in actual("--to", "a.svg", "--series", "h3o")
    write_run(tmp_path / "runs" / "two", plans=PLANS, tasks=("needle",))
    both = refusal(kvpolicy("plot", run.parent, "--to", "a.svg"))
    assert "--model reasoner --task needle" in both
    assert kvpolicy("plot", run.parent, "--to", "a.svg", "--task", "needle").status == 0
