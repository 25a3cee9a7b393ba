"""Models in GGUF files: read, kept, and refused."""

import hashlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_disk import on_small_disk
from tiny import greedy_tokens

from kvpolicy import Engine, Plan, Request, load_model
from kvpolicy.errors import ModelError
from kvpolicy.lab.models import fingerprint
from kvpolicy.model.user_cache import built_once

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")

from tiny_gguf import write_gguf  # noqa: E402


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVPOLICY_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "tiny.gguf"


def kept(cache: Path) -> list[str]:
    """What is kept of GGUF files."""
    return [path.name for path in (cache / "gguf").glob("[!.]*")]


def generated(model: Any, tokenizer: Any, plan: Plan) -> list[list[int]]:
    prompts = ["a long prompt with many tokens of one byte", "another one"]
    engine = Engine(model, tokenizer, plan)
    results = engine.generate([Request(prompt, 12, stop_ids=()) for prompt in prompts])
    return [one.tokens for one in sorted(results, key=lambda one: one.id)]


def test_plain_weights_are_those_that_were_written(
    file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written = write_gguf(file)
    model, tokenizer = load_model(file)
    assert capfd.readouterr() == ("", "")
    read = model.state_dict()
    for name, weight in written.state_dict().items():
        assert torch.equal(read[name], weight), name
    prompt = tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert greedy_tokens(model, prompt, 8) == greedy_tokens(written, prompt, 8)
    assert tokenizer.decode(prompt) == "hello"
    assert tokenizer.chat_template


def test_quantised_weights_are_what_gguf_dequantises(file: Path) -> None:
    written = write_gguf(file, quantisation="Q4_1")
    name = "model.layers.1.mlp.down_proj.weight"
    kind = gguf.GGMLQuantizationType.Q4_1
    expected = gguf.dequantize(gguf.quantize(written.state_dict()[name].numpy(), kind), kind)
    assert np.array_equal(load_model(file)[0].state_dict()[name].numpy(), expected)


@pytest.mark.parametrize("plan", [Plan.full_cache(), Plan.uniform("knorm", budget=8, buffer=4)])
def test_file_and_its_folder_of_safetensors_give_the_same_tokens(
    plan: Plan, file: Path, tmp_path: Path
) -> None:
    write_gguf(file, quantisation="Q8_0")
    model, tokenizer = load_model(file)
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    of_folder = generated(*load_model(tmp_path / "folder"), plan)
    assert generated(model, tokenizer, plan) == of_folder


def test_folder_with_one_file_is_that_model(file: Path) -> None:
    write_gguf(file)
    (file.parent / "config.json").write_text("{}")  # as hubs store beside it
    assert load_model(file.parent)[0].config.gguf_file == "tiny.gguf"


def test_file_of_a_hub_id_is_found_among_downloads(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tmp_path / "hub" / "models--owner--name"
    snapshot = downloads / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (downloads / "refs").mkdir()
    (downloads / "refs" / "main").write_text("0" * 40)
    write_gguf(snapshot / "tiny.gguf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert load_model("owner/name:tiny.gguf")[0].config.gguf_file == "tiny.gguf"
    with pytest.raises(ModelError, match=r"owner/name:other\.gguf"):
        load_model("owner/name:other.gguf")


def test_second_load_needs_no_reader(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(file)
    first = load_model(file)[0].state_dict()
    monkeypatch.setitem(sys.modules, "gguf", None)
    again = load_model(file)[0].state_dict()
    assert all(torch.equal(again[name], weight) for name, weight in first.items())
    write_gguf(file, seed=1)  # another file of the same name
    with pytest.raises(ModelError, match=r"\[gguf\]"):
        load_model(file)


def test_fingerprint_says_which_file(file: Path, cache: Path) -> None:
    found = set()
    for quantisation in ("Q8_0", "Q4_1"):
        write_gguf(file, quantisation=quantisation)
        model, tokenizer = load_model(file)
        assert model.config.gguf_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
        found.add(fingerprint(model, tokenizer))
    assert len(found) == len(kept(cache)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_nothing_is_kept_of_a_reading_that_ends_early(
    error: BaseException, file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(file)
    with monkeypatch.context() as patch:

        def fail(*_: object, **__: object) -> None:
            raise error

        patch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", fail)
        with pytest.raises((KeyboardInterrupt, ModelError)):
            load_model(file)
    assert kept(cache) == []
    load_model(file)
    assert len(kept(cache)) == 1


def test_what_a_killed_process_left_is_not_read(file: Path, cache: Path) -> None:
    write_gguf(file)
    load_model(file)
    (name,) = kept(cache)
    folder = cache / "gguf" / name
    folder.rename(folder.with_name(f".{name}.partial"))
    (folder.with_name(f".{name}.partial") / "config.json").write_text("{")
    assert load_model(file)[0].config.gguf_file == "tiny.gguf"


def test_full_disk_is_one_sentence(file: Path, cache: Path) -> None:
    write_gguf(file)
    cache.mkdir()

    def load() -> None:
        with pytest.raises(ModelError, match="KVPOLICY_CACHE"):
            load_model(file)
        assert kept(cache) == []

    on_small_disk(cache, 2**18, load)


def test_folder_is_built_by_one_of_two(tmp_path: Path) -> None:
    built = []
    both = threading.Barrier(2)

    def build(folder: Path) -> None:
        built.append(folder)
        (folder / "file").write_text("whole")

    def ask() -> None:
        both.wait()
        assert (built_once(tmp_path / "kept", "it", build) / "file").read_text() == "whole"

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 1


def cut(file: Path) -> None:
    write_gguf(file)
    file.write_bytes(file.read_bytes()[:5000])


def of_unknown_quantisation(file: Path) -> None:
    write_gguf(file)
    content = bytearray(file.read_bytes())
    # The type of a tensor follows its name, number of dimensions, and dimensions.
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    assert content[at : at + 4] == bytes(4)
    content[at] = 99
    file.write_bytes(content)


def of_two_files(file: Path) -> None:
    write_gguf(file)
    write_gguf(file.with_name("other.gguf"))


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut": (cut, "cut or damaged"),
    "no GGUF": (lambda file: file.write_text("version https"), "no GGUF file"),
    "architecture": (lambda file: write_gguf(file, architecture="nothing"), "'nothing'"),
    "encoder": (lambda file: write_gguf(file, architecture="t5"), "'t5'"),
    "quantisation": (of_unknown_quantisation, "99"),
    "several files": (of_two_files, r"other\.gguf, tiny\.gguf"),
    "unread weights": (
        lambda file: write_gguf(file, extra={"rope_freqs.weight": np.ones(8, np.float32)}),
        r"LlamaForCausalLM",
    ),
    "scaled positions": (lambda file: write_gguf(file, scaling="linear"), "linear"),
}


@pytest.mark.parametrize(("write", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_right_is_refused_by_name(
    write: Callable[[Path], object], named: str, file: Path, cache: Path
) -> None:
    write(file)
    with pytest.raises(ModelError, match=named) as caught:
        load_model(file.parent)
    assert "\n" not in str(caught.value)
    assert kept(cache) == []


def test_part_of_a_file_is_refused(file: Path) -> None:
    part = file.with_name("tiny-00001-of-00002.gguf")
    write_gguf(part)
    with pytest.raises(ModelError, match="part 1 of 2"):
        load_model(part)
