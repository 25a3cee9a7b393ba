"""The output folder of a training run: whose it is, and where things lie in it."""

import json
from pathlib import Path

import attrs

from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write
from kvpolicy_reasoner import REASONER
from kvpolicy_reasoner.train.checkpoint import CHECKPOINT
from kvpolicy_reasoner.train.data import DataPlan

IDENTITY = "run.json"
LOG = "log.jsonl"
MODEL = "model"
OVERLAP = "overlap.json"


@attrs.frozen
class RunIdentity:
    """What has to be equal for a run to be continued.

    Attributes:
        seed: Chooses the weights and the problems.
        tokens: Tokens of the whole run.
        tokens_per_step: Tokens of one step.
        workers: Processes that share a step; sums of gradients depend on it in the last bit.
        name: Which reasoner is trained.
    """

    seed: int
    tokens: int
    tokens_per_step: int
    workers: int
    name: str = REASONER

    @property
    def num_steps(self) -> int:
        """Optimiser steps of the whole run."""
        return self.tokens // self.tokens_per_step

    @property
    def data_plan(self) -> DataPlan:
        """What the training data of the run depends on."""
        return DataPlan(self.seed, self.num_steps, self.tokens_per_step, self.name)


def claim_folder(output: Path, identity: RunIdentity, *, resume: bool) -> None:
    """Make a folder the home of a run.

    Args:
        output: The folder; made if missing.
        identity: The run.
        resume: Keep what the run left there before; else start it again.

    Raises:
        OutputError: The folder holds something else.
    """
    if output.exists() and not output.is_dir():
        msg = (
            f"the training output {output} is a file; expected a folder, new or of the same run."
            " Choose another --output."
        )
        raise OutputError(msg)
    wanted = attrs.asdict(identity)
    if output.exists() and any(output.iterdir()):
        _check_owner(output, wanted, resume=resume)
    try:
        output.mkdir(parents=True, exist_ok=True)
        if not resume:
            for name in (CHECKPOINT, LOG, OVERLAP):
                (output / name).unlink(missing_ok=True)
    except OSError as error:
        msg = (
            f"the training output {output} cannot be written: {error.strerror}."
            " Choose another --output."
        )
        raise OutputError(msg) from error
    write_text(output / IDENTITY, json.dumps(wanted, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a small file in one go: a reader finds the old one or the new one.

    Args:
        path: Where.
        text: What.

    Raises:
        OutputError: It cannot be written.
    """
    atomic_write(path, text)


def _check_owner(output: Path, wanted: dict[str, int | str], *, resume: bool) -> None:
    try:
        found = json.loads((output / IDENTITY).read_text())
        if not isinstance(found, dict):
            raise ValueError
    except (OSError, ValueError) as error:
        msg = (
            f"the training output {output} holds files of something else; expected an empty folder"
            " or an earlier training run. Choose another --output."
        )
        raise OutputError(msg) from error
    differing = [
        f"{key} {found.get(key)} instead of {value}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]
    if resume and differing:
        msg = (
            f"the training output {output} belongs to another run ({', '.join(differing)})."
            " Choose another --output, repeat that run's options, or give --restart."
        )
        raise OutputError(msg)
