"""Reading run folders: everything written is read back, and damage gives a clear message."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from run_folders import write_lines, write_run

from kvpolicy.errors import ResultsError
from kvpolicy.lab.store.read import find_runs, read_run


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_everything_written_is_read_back(tmp_path: Path) -> None:
    folder = write_run(tmp_path, seeds=(0, 1), attempts=2, models=("a", "b"))
    run = read_run(folder)
    manifest = json.loads((folder / "manifest.json").read_text())["run"]
    assert (run.name, run.version) == (manifest["name"], manifest["version"])
    plain = [json.loads(json.dumps(attrs.asdict(group))) for group in run.groups.values()]
    assert plain == manifest["groups"]
    plain = [json.loads(json.dumps(attrs.asdict(cell))) for cell in run.cells.values()]
    assert plain == manifest["cells"]
    assert [attrs.asdict(one) for one in run.samples.values()] == _lines(folder / "samples.jsonl")
    assert [attrs.asdict(one) for one in run.items.values()] == _lines(folder / "items.jsonl")
    assert [attrs.asdict(one) for one in run.timings.values()] == _lines(folder / "timings.jsonl")
    assert run.num_expected == len(run.samples) == 2 * 2 * 3 * 8 * 2


def test_reading_changes_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    whole = (folder / "samples.jsonl").read_bytes()
    (folder / "samples.jsonl").write_bytes(whole + b'{"key": "torn')
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    run = read_run(folder)
    assert (len(run.samples), len(run.items), len(run.timings)) == (24, 8, 3)
    assert {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()} == before


@pytest.mark.slow
def test_a_running_run_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    folder = write_run(tmp_path, n=2)
    samples, content = folder / "samples.jsonl", (folder / "samples.jsonl").read_bytes()
    for end in range(0, len(content) + 1, 7):
        samples.write_bytes(content[:end])
        assert len(read_run(folder).samples) == content[:end].count(b"\n")


def test_timings_of_versions_that_did_not_compile_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    lines = _lines(folder / "timings.jsonl")
    for line in lines:
        assert line.pop("compile_s") == 0
    write_lines(folder / "timings.jsonl", lines)
    timings = read_run(folder).timings.values()
    assert [one.compile_s for one in timings] == [0.0] * len(lines)


def test_a_run_without_its_lines_files_is_empty(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    for name in ("samples.jsonl", "items.jsonl", "timings.jsonl"):
        (folder / name).unlink()
    run = read_run(folder)
    assert not run.samples
    assert not run.items
    assert not run.timings
    assert run.num_expected == 24


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    text = "one\u2028two\x85three\x0cfour"
    folder = write_run(tmp_path, outcome=lambda *_: {"text": text})
    assert {sample.text for sample in read_run(folder).samples.values()} == {text}


def test_runs_are_found_in_subfolders_but_not_inside_each_other(tmp_path: Path) -> None:
    for name in ("b", "a/deep", "b/inside"):
        write_run(tmp_path / name)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "manifest.json").write_text('{"name": "a web page"}')
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    broken.mkdir()
    (broken / "manifest.json").write_text("{")
    (broken / "samples.jsonl").touch()
    names = ["a/deep", "b", "broken", "c/deep"]
    assert find_runs(tmp_path, warn=print) == [tmp_path / name for name in names]
    assert find_runs(tmp_path / "b", warn=print) == [tmp_path / "b"]
    with pytest.raises(ResultsError, match="nowhere"):
        find_runs(tmp_path / "nowhere", warn=print)


def _rewrite(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / name
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")

    return damage


DAMAGE = {
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "holds no run"),
    "no folder": (shutil.rmtree, "does not exist"),
    "half a manifest": (_rewrite("manifest.json", lambda t: t[:99]), "manifest.json is damaged"),
    "another manifest": (_rewrite("manifest.json", lambda _: "[]"), "not the manifest of a run"),
    "format 1": (_rewrite("manifest.json", lambda t: t.replace(": 2,", ": 1,", 1)), "run it again"),
    "format 3": (_rewrite("manifest.json", lambda t: t.replace(": 2,", ": 3,", 1)), "newer"),
    "no format": (_rewrite("manifest.json", lambda _: '{"run": {}}'), "not the manifest"),
    "no sessions": (_rewrite("manifest.json", lambda t: t.replace('"sessions"', '"s"')), "no list"),
    "no groups": (
        _rewrite("manifest.json", lambda t: t.replace('"groups"', '"g"')),
        r"required field missing",
    ),
    "a missing group": (
        _rewrite("manifest.json", lambda t: t.replace('"group": "', '"group": "x', 1)),
        "has no group",
    ),
    "an additional field": (
        _rewrite("manifest.json", lambda t: t.replace('"seed": 0', '"seed": 0, "shade": 1')),
        r"extra fields found \(shade\) @ \$\.groups\[0\]",
    ),
    "a text for a number": (
        _rewrite("samples.jsonl", lambda t: t.replace('"item": 3', '"item": "3"')),
        r"samples.jsonl, line 4, .*expected int @ \$\.item",
    ),
    "true for a number": (
        _rewrite("samples.jsonl", lambda t: t.replace('"item": 3', '"item": true')),
        r"expected int @ \$\.item",
    ),
    "a number that no count reaches": (
        _rewrite("samples.jsonl", lambda t: t.replace('tokens": ', 'tokens": ' + "9" * 400)),
        r"samples.jsonl, line 1, .* 9{40} is out of range @ \$\.num_tokens",
    ),
    "a negative number": (
        _rewrite("timings.jsonl", lambda t: t.replace('"elapsed_s": ', '"elapsed_s": -')),
        r"timings.jsonl, line 1, .* is out of range @ \$\.elapsed_s",
    ),
    "NaN for seconds": (
        _rewrite("samples.jsonl", lambda t: t.replace('"decode_s": ', '"decode_s": NaN, "x": ')),
        r"nan is out of range @ \$\.decode_s",
    ),
    "a facet that is a list": (
        _rewrite("samples.jsonl", lambda t: t.replace('"depth": ', '"list": [1], "depth": ')),
        r"\[1\] is no value to group by or to average @ \$\.facets",
    ),
    "an unknown end": (
        _rewrite("samples.jsonl", lambda t: t.replace('"stop"', '"bored"', 1)),
        r"'finish_reason' must be in \('stop', 'length', 'error'\)",
    ),
    "no items": (
        _rewrite("manifest.json", lambda t: t.replace('"n": 8', '"n": 0')),
        "'n' must be >= 1",
    ),
    "no columns": (
        _rewrite(
            "manifest.json", lambda t: re.sub(r'"columns": \[.*?\]', '"columns": []', t, flags=re.S)
        ),
        "'columns'",
    ),
    "a plan without layers": (
        _rewrite("manifest.json", lambda t: t.replace('"layers": [', '"layers": 7, "a": [')),
        "'resolved' is not a resolved plan",
    ),
    "a session that is a number": (
        _rewrite("manifest.json", lambda t: t.replace('"sessions": [', '"sessions": [5, ')),
        "session 0, counted from 0, has wrong entries",
    ),
    "a session that began at a number": (
        _rewrite("manifest.json", lambda t: re.sub('"started": "[^"]*"', '"started": 5', t)),
        "session 0, counted from 0, has wrong entries",
    ),
    "no JSON": (
        _rewrite("samples.jsonl", lambda t: "{" + t),
        r"line 1, is damaged: it is not a JSON object",
    ),
    "a list": (
        _rewrite("timings.jsonl", lambda t: "[]\n" + t),
        "timings.jsonl, line 1, is damaged: it is not a JSON object",
    ),
    "an unknown cell": (
        _rewrite("samples.jsonl", lambda t: t.replace('"cell": "', '"cell": "f', 1)),
        "line 1, is damaged: the manifest has no cell 'f",
    ),
    "bytes that are not UTF-8": (
        lambda folder: (folder / "items.jsonl").write_bytes(b'{"a": "\xff"}\n'),
        "items.jsonl, line 1",
    ),
}


def _read_all(folder: Path) -> None:
    run = read_run(folder)
    assert run.samples
    assert run.items
    assert run.timings


@pytest.mark.parametrize(("damage", "sentence"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_reported_in_one_sentence(
    damage: Callable[[Path], object], sentence: str, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run")
    damage(folder)
    with pytest.raises(ResultsError, match=sentence) as caught:
        _read_all(folder)
    message = str(caught.value)
    assert message.endswith(".")
    assert "\n" not in message


def test_a_folder_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "b":
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    warnings: list[str] = []
    assert find_runs(tmp_path, warn=warnings.append) == [tmp_path / "a"]
    assert warnings == [
        f"{tmp_path / 'b'} cannot be read: Permission denied; runs in it are left out."
    ]
