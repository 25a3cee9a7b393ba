"""Checkpoints of a training run: one file from which the same run goes on, as if never stopped."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy import KVPolicyError
from kvpolicy.toolkit import TensorFiles
from kvpolicy_plugins.trimkv.training import StepRecord, Trainer

FILES = TensorFiles(
    group="kvpolicy.gates",
    what="checkpoint",
    name="checkpoint",
    made_by="`kvpolicy trimkv train`",
    pickle_hint="checkpoints of kvpolicy are safetensors",
)

_KEY = "kvpolicy"


@attrs.frozen
class Progress:
    """How far a run has come, besides its tensors.

    Attributes:
        records: What its last steps have shown.
        elapsed_s: Wall time so far, of all sessions.
    """

    records: Sequence[StepRecord] = ()
    elapsed_s: float = 0.0


def path_beside(output: Path) -> Path:
    """Where the checkpoint of a run is, until its file of gates is written."""
    return output.with_name(f"{output.stem}.checkpoint.safetensors")


def save(path: Path, trainer: Trainer, progress: Progress, identity: Mapping[str, Any]) -> None:
    """Write a checkpoint atomically.

    Args:
        path: The file.
        trainer: The run between two steps.
        progress: How far it has come.
        identity: What makes it the same run, plain data.

    Raises:
        OutputError: It cannot be written.
    """
    described = {
        "identity": dict(identity),
        "done": trainer.done,
        "records": [attrs.astuple(record) for record in progress.records],
        "elapsed_s": progress.elapsed_s,
    }
    FILES.write(path, trainer.state(), {_KEY: described})


def restore(path: Path, trainer: Trainer, identity: Mapping[str, Any]) -> Progress:
    """Go on from a checkpoint.

    Args:
        path: The file; if there is none, the run begins.
        trainer: A new run.
        identity: As for `save`.

    Raises:
        KVPolicyError: It is of another run, or no checkpoint.
    """
    if not path.exists():
        return Progress()
    tensors, metadata = FILES.read(path)
    try:
        described = metadata[_KEY]
        found: dict[str, Any] = described["identity"]
        names = [field.name for field in attrs.fields(StepRecord)]
        records = [
            StepRecord(**dict(zip(names, record, strict=True))) for record in described["records"]
        ]
        done, elapsed_s = int(described["done"]), float(described["elapsed_s"])
    except (KeyError, TypeError, ValueError) as error:
        msg = f"checkpoint {path} was not written by this version; start over with --restart"
        raise KVPolicyError(msg) from error
    differing = [
        f"{key} was {found.get(key)} and is {value}"
        for key, value in identity.items()
        if found.get(key) != value
    ]
    if differing:
        msg = (
            f"checkpoint {path} is of another run ({'; '.join(differing)}); give the options of "
            "that run, another --output, or --restart"
        )
        raise KVPolicyError(msg)
    trainer.load_state(tensors, done)
    return Progress(records, elapsed_s)
