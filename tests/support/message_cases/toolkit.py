"""Steering vectors, tokenizers and shares that are refused."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from kvpolicy.toolkit.apportion import largest_remainder
from kvpolicy.toolkit.paragraphs import tokens_containing
from kvpolicy.toolkit.steering_vectors import (
    Calibration,
    SteeringVector,
    load_steering_vector,
    save_steering_vectors,
)


def vector(layer: int, size: int = 4) -> SteeringVector:
    return SteeringVector(
        vector=torch.ones(size), layer=layer, calibration=Calibration(model="some-model")
    )


def saved(folder: Path) -> Path:
    save_steering_vectors(folder / "mine.safetensors", [vector(1), vector(2)])
    return folder / "mine.safetensors"


def pickle(folder: Path) -> Path:
    torch.save(torch.ones(4), folder / "pickle.pt")
    return folder / "pickle.pt"


def other(folder: Path) -> Path:
    save_file({"weight": torch.ones(4)}, folder / "other.safetensors")
    return folder / "other.safetensors"


CASES: dict[str, Callable[[Path], object]] = {
    "a file that is not there": lambda folder: load_steering_vector(folder / "no.safetensors"),
    "a pickle": lambda folder: load_steering_vector(pickle(folder)),
    "a file of something else": lambda folder: load_steering_vector(other(folder)),
    "no layer by default": lambda folder: load_steering_vector(saved(folder)),
    "a layer that is not in the file": lambda folder: load_steering_vector(saved(folder), 7),
    "hidden states of another size": lambda _: vector(1).entering(torch.zeros(3, 9)),
    "no vectors": lambda folder: save_steering_vectors(folder / "a.safetensors", []),
    "no tokenizer": lambda _: tokens_containing(None, "\n\n"),
    "fewer rows than floors": lambda _: largest_remainder(9, [1.0, 1.0], [5, 5]),
}
