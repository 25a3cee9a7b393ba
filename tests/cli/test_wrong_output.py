"""Output that cannot be written: one sentence, and existing files are kept."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from child_process import Ended, run_in_child
from shell import Shell, refusal

from kvpolicy.cli import options
from kvpolicy.lab.store.jsonl import lock_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks its children")

ABLATE = (
    *("ablate", "--policies", "full,h2o", "--budgets", "12", "--buffer", 6, "--n", 3),
    *("--slots", 2, "--max-new-tokens", 20, "--workers", 1),
)


def sentence_of(ended: Ended) -> str:
    """The error message of a child process that was given wrong input."""
    assert ended.status == 2, ended.err
    assert "Traceback" not in ended.err
    sentence = ended.err.splitlines()[-1]
    assert sentence.startswith("kvpolicy: ")
    assert sentence.endswith(".")
    return sentence


# The results of a command

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full")
@pytest.mark.parametrize(
    "words",
    [
        *("list", "list --json", "--help", "--version", "run --help", "plan schema"),
        "plan check skipkv",
        "run . --policy h2o --budget 16 --max-new-tokens 4",
        pytest.param(
            "run . --policy h2o --budget 16 --max-new-tokens 4 --json", marks=pytest.mark.slow
        ),
    ],
)
def test_a_full_disk_is_reported_for_standard_output(
    words: str, tmp_path: Path, model_folder: Path
) -> None:
    model = ("--model", model_folder) if "--policy" in words else ()
    ended = run_in_child(tmp_path, *words.split(), *model, stdout=FULL)
    assert "standard output" in sentence_of(ended)


# Folders and files of results


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("most_bytes", "file"),
    [
        (6000, "samples.jsonl"),
        pytest.param(800, "manifest.json", marks=pytest.mark.slow),
        pytest.param(6000, "items.jsonl", marks=pytest.mark.slow),
        pytest.param(20_000, "plot.png", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_ended_by_a_full_disk_is_resumed_by_the_same_command(
    tmp_path: Path, model_folder: Path, most_bytes: int, file: str
) -> None:
    words = (*ABLATE, "--model", model_folder, "--output", tmp_path / "out")
    if file == "items.jsonl":
        words = (*words, "--n", 40)
    if file == "samples.jsonl":
        words = (*words, "--attempts", 4, "--temperature", 1, "--record", 0)
    sentence = sentence_of(run_in_child(tmp_path, *words, most_bytes=most_bytes))
    assert f"{tmp_path / 'out' / file}" in sentence
    assert not list((tmp_path / "out").glob("*.new")), "no partly written file is left"
    before = _samples(tmp_path / "out")
    ended = run_in_child(tmp_path, *words)
    assert ended.status == 0, ended.err
    assert len({sample["key"] for sample in _samples(tmp_path / "out")}) == _num_expected(words)
    assert _samples(tmp_path / "out")[: len(before)] == before
    assert (tmp_path / "out" / "plot.png").stat().st_size > 20_000


def _num_expected(words: tuple[object, ...]) -> int:
    """Samples of two cells; of repeated options the last one counts."""
    options: dict[object, Any] = dict(pairwise(words))
    return 2 * options["--n"] * options.get("--attempts", 1)


def _samples(folder: Path) -> list[dict[str, object]]:
    path = folder / "samples.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "words",
    [
        (*ABLATE, "--output", "{file}/inner"),
        (*ABLATE, "--output", "{file}"),
        (*ABLATE, "--output", "/proc/kvpolicy"),
        ("bench", "--quick", "--output", "{file}/inner"),
        ("bench", "--quick", "--output", "{file}"),
        ("bench", "--quick", "--output", "/proc/kvpolicy"),
        ("steer", "calibrate", "--output", "{file}/inner.safetensors"),
        ("reasoner", "train", "--output", "{file}/inner"),
        ("reasoner", "train", "--output", "{file}"),
        ("reasoner", "train", "--output", "/proc/kvpolicy"),
    ],
    ids=lambda words: " ".join(map(str, [*words[:2], words[-1]])),
)
def test_an_invalid_output_path_is_refused_before_the_work(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path, words: tuple[object, ...]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    filled = [str(word).replace("{file}", str(file)) for word in words]
    model = ["--model", str(model_folder)] if words[0] == "ablate" else []
    sentence = refusal(kvpolicy(*filled, *model))
    assert filled[-1] in sentence
    assert "--output" in sentence
    assert file.read_text() == "mine"


@pytest.mark.needs_reasoner
def test_a_read_only_folder_is_refused_before_the_work(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For root, no folder is read-only.
    monkeypatch.setattr(options.os, "access", lambda *_: False)
    sentence = refusal(kvpolicy("steer", "calibrate", "--output", tmp_path / "out.safetensors"))
    assert all(part in sentence for part in (str(tmp_path), "--output"))


@pytest.mark.parametrize("command", ["ablate", "bench"])
def test_a_read_only_results_folder_is_refused(
    kvpolicy: Shell,
    tmp_path: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    words = {"ablate": (*ABLATE, "--model", model_folder), "bench": ("bench", "--quick")}
    sentence = refusal(kvpolicy(*words[command], "--output", tmp_path / "out"))
    assert str(tmp_path / "out") in sentence


# Two runs and one folder


@pytest.mark.nightly
def test_a_second_run_in_the_same_folder_is_refused(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    words = (*ABLATE, "--model", model_folder, "--output", tmp_path / "out")
    (tmp_path / "out").mkdir()
    first = lock_folder(tmp_path / "out")
    sentence = refusal(kvpolicy(*words))
    assert all(part in sentence for part in (str(tmp_path / "out"), "--output"))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    first.release()
    assert kvpolicy(*words).status == 0
