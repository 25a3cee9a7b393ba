"""Steering vector files: saved vectors load again, and invalid files raise clear errors."""

import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from strategies import seeds

from kvpolicy.errors import KVPolicyError, OutputError, SteeringError
from kvpolicy.toolkit.steering_vectors import (
    Calibration,
    SteeringVector,
    load_steering_vector,
    load_steering_vectors,
    save_steering_vectors,
)

ORIGIN = Calibration(
    model="some-model",
    fingerprint="0123456789abcdef",
    task="sums",
    split="train",
    seed=3,
    num_right=8,
    num_wrong=1,
    num_thoughts={"execution": 12, "reflection": 5},
    rules="mine",
    rules_digest="fedcba",
    version="0.1.0",
)


def make_vector(layer: int, seed: int = 0, size: int = 8) -> SteeringVector:
    rng = torch.Generator().manual_seed(seed + layer)
    vector = torch.randn(size, generator=rng)
    return SteeringVector(vector=vector, layer=layer, calibration=ORIGIN, separation=1.5 + layer)


@given(layers=st.sets(st.integers(0, 130), min_size=1, max_size=5), seed=seeds, data=st.data())
def test_saved_vectors_load_equal(
    tmp_path_factory: pytest.TempPathFactory, layers: set[int], seed: int, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("saved") / "some.safetensors"
    order = data.draw(st.permutations(sorted(layers)))
    default = data.draw(st.sampled_from([None, *order]))
    vectors = {layer: make_vector(layer, seed) for layer in order}
    save_steering_vectors(path, list(vectors.values()), default_layer=default)
    found, found_default = load_steering_vectors(path)
    assert [one.layer for one in found] == sorted(layers)
    assert found_default == (order[0] if len(order) == 1 else default)
    for one in found:
        assert torch.equal(one.vector, vectors[one.layer].vector)
        assert one.separation == vectors[one.layer].separation
        assert one.calibration == ORIGIN
        assert torch.equal(load_steering_vector(path, one.layer).vector, one.vector)


def test_saving_is_deterministic(tmp_path: Path) -> None:
    contents = set()
    for name in "abcde":
        path = tmp_path / f"{name}.safetensors"
        save_steering_vectors(path, [make_vector(layer) for layer in range(12)], default_layer=3)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".safetensors"] * 5


def test_vector_takes_the_device_of_hidden_states_and_checks_their_size() -> None:
    one = make_vector(2)
    states = torch.zeros(3, 8, dtype=torch.bfloat16)
    assert torch.equal(one.entering(states), one.vector)
    with pytest.raises(SteeringError, match=r"8 .* 9"):
        one.entering(torch.zeros(3, 9))


def write_vectors(path: Path, *, tensors: dict | None = None, **changes: object) -> None:
    """Write a vector file with some fields replaced."""
    described = {
        "format": 1,
        "default_layer": None,
        "separation": {},
        "calibration": attrs.asdict(ORIGIN),
        **changes,
    }
    tensors = {"layer.01": torch.ones(4), "layer.02": torch.ones(4)} | (tensors or {})
    save_file(tensors, path, {"kvpolicy": json.dumps(described)})


def write_pickle(path: Path) -> None:
    torch.save(torch.ones(4), path)


def write_old_pickle(path: Path) -> None:
    torch.save(torch.ones(4), path, _use_new_zipfile_serialization=False)


def write_text(path: Path) -> None:
    path.write_text("plain text")


def write_other_safetensors(path: Path) -> None:
    save_file({"weight": torch.ones(4)}, path)


MISTAKES: list[tuple[Callable[[Path], None], str]] = [
    (lambda path: None, "No such file"),
    (Path.mkdir, "directory"),
    (write_pickle, "pickle"),
    (write_old_pickle, "pickle"),
    (write_text, "safetensors"),
    (lambda path: path.write_bytes(b""), "safetensors"),
    (write_other_safetensors, "version"),
    (lambda path: write_vectors(path, format=2), "version"),
    (
        lambda path: write_vectors(path, calibration={"modle": "x"}),
        "version",
    ),
    (
        lambda path: write_vectors(path, tensors={"weight": torch.ones(4)}),
        "version",
    ),
    (lambda path: write_vectors(path), "layer"),
    (lambda path: write_vectors(path, tensors={"layer.02": torch.ones(4, 4)}), "shape [4, 4]"),
    (lambda path: write_vectors(path, tensors={"layer.02": torch.ones(4).half()}), "float16"),
    (lambda path: write_vectors(path, tensors={"layer.02": torch.zeros(0)}), "shape [0]"),
    (lambda path: write_vectors(path, tensors={"layer.02": torch.tensor([1, torch.nan])}), "NaN"),
]


@pytest.mark.parametrize(("make", "message"), MISTAKES, ids=lambda x: x if type(x) is str else "")
def test_invalid_file_is_named_with_what_is_wrong(
    make: Callable[[Path], None], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.safetensors"
    make(path)
    with pytest.raises(SteeringError) as caught:
        load_steering_vector(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


def test_pickle_is_never_executed(tmp_path: Path) -> None:
    class FailsWhenUnpickled:
        def __reduce__(self) -> tuple:
            return (pytest.fail, ("a pickle was executed",))

    path = tmp_path / "layer_20_transition_reflection_steervec.pt"
    torch.save(FailsWhenUnpickled(), path)
    with pytest.raises(SteeringError, match="execution"):
        load_steering_vector(path)


def test_missing_layer_error_lists_the_available_layers(tmp_path: Path) -> None:
    write_vectors(tmp_path / "mine.safetensors")
    with pytest.raises(SteeringError, match=r"layer 7.* 1, 2"):
        load_steering_vector(tmp_path / "mine.safetensors", 7)


@pytest.mark.needs_reasoner
def test_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(KVPolicyError, match=r"'resoner'.* reasoner"):
        load_steering_vector("resoner")


@pytest.mark.parametrize(
    ("layers", "default"), [((), None), ((1, 1), None), ((1, 2), 3)], ids=["none", "twice", "other"]
)
def test_invalid_vector_lists_are_not_saved(
    layers: tuple[int, ...], default: int | None, tmp_path: Path
) -> None:
    with pytest.raises(SteeringError, match="vector"):
        save_steering_vectors(
            tmp_path / "a.safetensors",
            [make_vector(layer) for layer in layers],
            default_layer=default,
        )
    assert list(tmp_path.iterdir()) == []


def test_unwritable_path_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="nowhere"):
        save_steering_vectors(tmp_path / "nowhere" / "a.safetensors", [make_vector(1)])


def test_invalid_vector_raises_on_construction() -> None:
    for vector in (torch.tensor([1.0, torch.inf]), torch.ones(2, 2), torch.ones(2).double()):
        with pytest.raises(SteeringError, match="some-model, layer 1"):
            SteeringVector(vector=vector, layer=1, calibration=ORIGIN)
