"""The run folder: one run, one writer, nothing overwritten."""

import gc
import json
import os
import re
from pathlib import Path

import attrs
import pytest
from run_folders import ACCURACY, item, make_run, sample

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.lab.store.read import LINES_FILES, read_run
from kvpolicy.lab.store.records import CellTiming, ItemRecord, Sample, structure_record
from kvpolicy.lab.store.store import Store, finished

RUN = make_run(n=3)
GROUP, CELL = RUN["groups"][0], RUN["cells"][1]
SESSION = {"versions": {"torch": "2"}, "command": "kvpolicy ablate"}
PLAIN = sample(GROUP, CELL, 0, changes={"text": "\\boxed{3}", "values": {"loss": 0.5}})
SAMPLE = structure_record(Sample, PLAIN, "a sample")
TIMING = CellTiming(CELL["cell"], 3, 30, 1.5, 0.25, 1.0, 1024)
ITEMS = [structure_record(ItemRecord, item(GROUP, number), "an item") for number in range(3)]


def of_group(change: dict[str, object]) -> dict[str, object]:
    return {"groups": [GROUP | change]}


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_sample_is_on_disk_before_the_store_is_closed(tmp_path: Path) -> None:
    with Store(tmp_path / "out", RUN) as store:
        store.add(SAMPLE)
        store.add_timing(TIMING)
        line = (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8")
        assert json.loads(line) == attrs.asdict(SAMPLE)


def test_a_reopened_store_lists_finished_samples(tmp_path: Path) -> None:
    with Store(tmp_path, RUN) as store:
        store.begin(SESSION)
        store.add(SAMPLE)
        store.add_timing(TIMING)
    with Store(tmp_path, RUN) as store:
        assert store.samples == {SAMPLE.key: SAMPLE}
        assert store.timings == {CELL["cell"]: TIMING}
        assert store.notes == []


def test_every_session_is_in_the_manifest(tmp_path: Path) -> None:
    for number in range(3):
        with Store(tmp_path, RUN) as store:
            store.begin(SESSION | {"number": number})
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["run"] == RUN
    assert [session["number"] for session in manifest["sessions"]] == [0, 1, 2]


def test_another_pace_is_noted(tmp_path: Path) -> None:
    """Else one table would compare speeds with two workers and with one."""
    with Store(tmp_path, RUN) as store:
        store.begin(SESSION | {"workers": 2, "threads": 1, "cpus": 4})
        assert store.notes == []
    with Store(tmp_path, RUN) as store:
        store.begin(SESSION | {"workers": 1, "threads": 4, "cpus": 4})
        (note,) = store.notes
        assert "workers 2, threads 1" in note
        assert "workers 1, threads 4" in note
    with Store(tmp_path, RUN) as store:
        store.begin(SESSION | {"workers": 1, "threads": 4, "cpus": 4})
        assert store.notes == []


def test_other_versions_are_noted(tmp_path: Path) -> None:
    with Store(tmp_path, RUN) as store:
        store.begin(SESSION)
    with Store(tmp_path, RUN) as store:
        store.begin({"versions": {"torch": "3"}})
        assert "other versions" in store.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (of_group({"n": 4}), "n is 3 there and 4 here"),
        (of_group({"n": 4, "seed": 1}), "n is 3 there and 4 here; seed is 0 there and 1 here"),
        ({"groups": [GROUP, GROUP]}, "groups differ"),
        ({"version": "2"}, "version is 0.1.0 there and 2 here"),
        ({"cells": RUN["cells"][:1]}, "cells differ"),
        ({"extra": 1}, "extra"),
    ],
)
def test_the_folder_of_another_run_is_refused_and_left_alone(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with Store(tmp_path, RUN) as store:
        store.add(SAMPLE)
    before = content(tmp_path)
    with pytest.raises(OutputError, match=tmp_path.name) as caught:
        Store(tmp_path, RUN | change)
    assert message in str(caught.value)
    assert content(tmp_path) == before


def test_a_folder_with_other_things_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years", encoding="utf-8")
    with pytest.raises(OutputError, match=tmp_path.name):
        Store(tmp_path, RUN)
    assert content(tmp_path) == {"thesis.tex": b"years"}


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x", encoding="utf-8")
    with pytest.raises(OutputError, match="out"):
        Store(tmp_path / "out", RUN)


@pytest.mark.parametrize(
    "manifest", ["{", "[]", '{"format": 1, "run": {}, "sessions": []}', '{"format": 99}']
)
def test_a_manifest_that_is_not_ours_is_refused(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    with pytest.raises(ResultsError, match=re.escape(str(tmp_path))):
        Store(tmp_path, RUN)
    assert content(tmp_path) == {"manifest.json": manifest.encode()}


def test_a_folder_of_a_run_killed_at_its_start_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".kvpolicy-1234abcd.new").write_text("{", encoding="utf-8")
    with Store(tmp_path, RUN) as store:
        assert store.samples == {}


def test_two_processes_do_not_write_in_one_folder(tmp_path: Path) -> None:
    # A lock belongs to the open file: a second store stands for another process.
    with Store(tmp_path, RUN), pytest.raises(OutputError, match=tmp_path.name):
        Store(tmp_path, RUN)
    Store(tmp_path, RUN).close()


def test_an_incomplete_last_line_is_removed_with_a_note(tmp_path: Path) -> None:
    with Store(tmp_path, RUN) as store:
        store.add(SAMPLE)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "half')
    with Store(tmp_path, RUN) as store:
        assert store.samples == {SAMPLE.key: SAMPLE}
        assert "incomplete" in store.notes[0]


def test_samples_of_another_version_are_refused(tmp_path: Path) -> None:
    with Store(tmp_path, RUN):
        pass
    (tmp_path / "samples.jsonl").write_text('{"key": "k"}\n', encoding="utf-8")
    with pytest.raises(ResultsError, match=r"samples\.jsonl"):
        Store(tmp_path, RUN)


def test_finished_samples_are_looked_up_without_changing_anything(tmp_path: Path) -> None:
    assert finished(tmp_path / "new", RUN) == ({}, set())
    with Store(tmp_path / "out", RUN) as store:
        store.add(SAMPLE)
    path = tmp_path / "out" / "samples.jsonl"
    path.write_bytes(path.read_bytes() + b'{"key": "half')
    before = content(tmp_path / "out")
    assert finished(tmp_path / "out", RUN) == ({SAMPLE.key: SAMPLE}, set())
    assert content(tmp_path / "out") == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("line", [b"no JSON", b"[]", b"\xff", b'{"other": 1}'])
def test_looking_up_finished_samples_reports_a_damaged_line(tmp_path: Path, line: bytes) -> None:
    with Store(tmp_path, RUN) as store:
        store.add(SAMPLE)
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line + b"\n" + path.read_bytes())
    with pytest.raises(ResultsError):
        finished(tmp_path, RUN)


def test_items_are_stored_once(tmp_path: Path) -> None:
    with Store(tmp_path, RUN) as store:
        store.add_items(ITEMS[:2])  # as far as it came before it was killed
        store.add_items(ITEMS)
    with Store(tmp_path, RUN, ITEMS) as store:
        assert store.notes == []
    assert stored_items(tmp_path) == ITEMS


@pytest.mark.parametrize("change", ["deleted", "torn", "edited"])
def test_items_that_were_deleted_or_changed_are_written_again(tmp_path: Path, change: str) -> None:
    with Store(tmp_path, RUN, ITEMS) as store:
        store.begin(SESSION)
        store.add(SAMPLE)
    path = tmp_path / "items.jsonl"
    if change == "deleted":
        path.unlink()
    elif change == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    else:
        path.write_bytes(path.read_bytes().replace(b"what is 0?", b"what is 9?"))
        assert not finished(tmp_path, RUN, stored_items(tmp_path))[0]
    assert finished(tmp_path, RUN, ITEMS)[0].keys() == {SAMPLE.key}
    with Store(tmp_path, RUN, ITEMS) as store:
        assert len(store.notes) == 1
        assert "items" in store.notes[0]
        assert store.samples == {SAMPLE.key: SAMPLE}
    assert {one.item: one for one in stored_items(tmp_path)} == dict(enumerate(ITEMS))
    assert read_run(tmp_path).problems == []


def stored_items(folder: Path) -> list[ItemRecord]:
    lines = (folder / "items.jsonl").read_bytes().split(b"\n")[:-1]
    return [structure_record(ItemRecord, json.loads(line), "an item") for line in lines]


@pytest.mark.parametrize(
    "change",
    [
        {"item": 1},
        {"item": 7},
        {"attempt": 1},
        {"seed": 5},
        {"series": "R-KV"},
        {"plan": "0" * 16},
        {"cell": RUN["cells"][2]["cell"]},
        {"cell": RUN["cells"][2]["cell"], "budget": 96},
    ],
    ids=str,
)
def test_a_sample_that_was_edited_to_be_another_one_is_left_out(
    tmp_path: Path, change: dict[str, object]
) -> None:
    with Store(tmp_path, RUN, ITEMS) as store:
        store.begin(SESSION)
        store.add(attrs.evolve(SAMPLE, **change))
    with pytest.raises(ResultsError, match=r"samples\.jsonl, line 1"):
        assert read_run(tmp_path).samples
    assert finished(tmp_path, RUN, ITEMS)[0] == {}
    with Store(tmp_path, RUN, ITEMS) as store:
        assert "line 1, was changed" in store.notes[0]
        assert store.samples == {}
        store.add(SAMPLE)
    assert read_run(tmp_path).samples == {SAMPLE.key: SAMPLE}, "the later line counts"


def test_a_deleted_manifest_is_written_again_if_all_samples_are_of_the_run(tmp_path: Path) -> None:
    with Store(tmp_path, RUN, ITEMS) as store:
        store.begin(SESSION)
        store.add(SAMPLE)
    (tmp_path / "manifest.json").unlink()
    before = content(tmp_path)
    other = make_run(n=3, seeds=(1,))
    with pytest.raises(OutputError, match=tmp_path.name):
        Store(tmp_path, other)
    assert content(tmp_path) == before
    with pytest.raises(ResultsError, match=tmp_path.name):
        read_run(tmp_path)
    with Store(tmp_path, RUN, ITEMS) as store:
        assert "manifest.json was missing" in store.notes[0]
        assert store.samples == {SAMPLE.key: SAMPLE}
    assert read_run(tmp_path).samples == {SAMPLE.key: SAMPLE}


@pytest.mark.parametrize("name", LINES_FILES)
def test_a_deleted_file_is_noted(tmp_path: Path, name: str) -> None:
    with Store(tmp_path, RUN, ITEMS) as store:
        assert store.notes == []
        store.begin(SESSION)
    (tmp_path / name).unlink()
    with Store(tmp_path, RUN, ITEMS) as store:
        assert len(store.notes) == 1
        assert name in store.notes[0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_does_not_hold_the_lock_after_the_parent_releases_it(tmp_path: Path) -> None:
    store = Store(tmp_path, RUN)
    may_end, let_end = os.pipe()
    child = os.fork()
    if not child:
        os.close(let_end)
        os.read(may_end, 1)
        os._exit(0)
    store.close()
    Store(tmp_path, RUN).close()
    os.close(let_end)
    os.waitpid(child, 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_does_not_hold_the_lock_of_a_killed_parent(tmp_path: Path) -> None:
    """The child of a child outlives its parent, which never released the lock."""
    may_end, let_end = os.pipe()
    parent = os.fork()
    if not parent:
        Store(tmp_path, RUN)
        if not os.fork():
            os.close(let_end)
            os.read(may_end, 1)
        os._exit(0)
    os.waitpid(parent, 0)
    Store(tmp_path, RUN).close()
    os.close(let_end)
    os.close(may_end)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_child_that_ends_does_not_release_the_parents_lock(tmp_path: Path) -> None:
    with Store(tmp_path, RUN) as store:
        child = os.fork()
        if not child:
            del store
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(OutputError, match=tmp_path.name):
            Store(tmp_path, RUN)


def test_a_run_with_another_name_or_other_headings_is_the_same_run(tmp_path: Path) -> None:
    Store(tmp_path, RUN | of_group({"columns": [ACCURACY | {"title": "right"}]})).close()
    Store(tmp_path, RUN).close()
    Store(tmp_path, RUN | {"name": "other"}).close()
