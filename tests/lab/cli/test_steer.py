"""`kvpolicy steer`: vectors are calibrated, shown and used; Ctrl-C reports what is lost."""

from pathlib import Path

import pytest
from kvpolicy_reasoner.task import make_problems
from shell import Shell

from kvpolicy.toolkit.steering_vectors import load_steering_vectors

FEW = ("--n", 4, "--slots", 4, "--max-new-tokens", 400)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steer") / "mine.safetensors"


@pytest.mark.nightly
def test_what_is_calibrated_can_be_shown_and_used(kvpolicy: Shell, vectors: Path) -> None:
    words = ("--layers", "1,3", "--default-layer", 3, "--seed", 7)
    made = kvpolicy("steer", "calibrate", "--output", vectors, *FEW, *words)
    assert made.status == 0, made.err
    assert "--n" in made.err
    assert "task reasoner, split train, seed 7" in made.words
    assert made.out.splitlines()[-1].split()[0] == "3"
    assert made.out.splitlines()[-1].endswith("yes"), "the default layer is marked"
    shown = kvpolicy("steer", "show", vectors)
    assert (shown.status, shown.out, shown.err) == (0, made.out, "")
    prompt = make_problems(1, seed=1)[0].prompt
    knobs = ("--set", f"seal.vector={vectors}", "--set", "seal.strength=2")
    run = kvpolicy("run", prompt, "--policy", "seal", *knobs, "--max-new-tokens", 20)
    assert run.status == 0, run.err
    assert "no budget" in run.err


def test_the_figures_are_there_for_machines(kvpolicy: Shell) -> None:
    answer = kvpolicy("steer", "show", "reasoner", "--json")
    vectors, default_layer = load_steering_vectors("reasoner")
    assert answer.json["file"] == "reasoner"
    assert answer.json["default_layer"] == default_layer
    assert answer.json["calibration"]["split"] == "train"
    assert answer.json["calibration"]["num_thoughts"] == vectors[0].calibration.num_thoughts
    assert [one["layer"] for one in answer.json["layers"]] == [0, 1, 2, 3]
    for one, vector in zip(answer.json["layers"], vectors, strict=True):
        assert one["norm"] == pytest.approx(float(vector.vector.norm()))
        assert one["separation"] == vector.separation


def test_ctrl_c_leaves_nothing(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvpolicy.lab.steer.calibrate.write_traces", interrupt)
    answer = kvpolicy("steer", "calibrate", "--output", tmp_path / "a.safetensors")
    assert answer.status == 130
    assert "vectors" in answer.err
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_thoughts_gets_no_vector(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "a.safetensors"
    words = ("--model", model_folder, "--n", 2, "--max-new-tokens", 5)
    answer = kvpolicy("steer", "calibrate", "--output", output, *words)
    assert answer.status == 2
    assert "'reasoner'" in answer.err
    assert "--rules" in answer.err
    assert not output.exists()
