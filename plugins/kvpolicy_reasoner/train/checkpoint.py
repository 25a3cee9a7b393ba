"""The exact state of a training run between two steps, in one safetensors file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import attrs
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

CHECKPOINT = "checkpoint.safetensors"


@attrs.frozen
class Progress:
    """How far a run came.

    Attributes:
        step: Steps done.
        elapsed_s: Wall time spent on them, over all sittings.
    """

    step: int = 0
    elapsed_s: float = 0.0


def save_checkpoint(output: Path, tensors: Mapping[str, Tensor], progress: Progress) -> None:
    """Write a checkpoint in one go: a reader finds the old one or the new one.

    Args:
        output: The folder of the run.
        tensors: Parameters and optimiser state.
        progress: How far the run came.
    """
    metadata = {key: json.dumps(value) for key, value in attrs.asdict(progress).items()}
    partial = output / f"{CHECKPOINT}.partial"
    save_file({key: value.contiguous() for key, value in tensors.items()}, partial, metadata)
    os.replace(partial, output / CHECKPOINT)


def load_checkpoint(output: Path) -> tuple[dict[str, Tensor], Progress] | None:
    """Read the checkpoint of a run.

    Args:
        output: The folder of the run.

    Returns:
        What was saved, or none if nothing has been saved yet.
    """
    path = output / CHECKPOINT
    if not path.exists():
        return None
    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
        metadata = {key: json.loads(value) for key, value in file.metadata().items()}
    return tensors, Progress(**metadata)
