"""The log of a training run: one JSON object per line."""

import json
from pathlib import Path

import attrs

from kvpolicy_reasoner.train.runfolder import write_text


@attrs.frozen
class TrainingRecord:
    """One line of the log.

    Attributes:
        step: Steps done.
        num_steps: Steps of the whole run.
        tokens: Tokens seen.
        loss: Mean cross-entropy of the last step, with the weights of training.
        settled_loss: The same over the tokens that can be known.
        lr: Learning rate of the last step.
        elapsed_s: Wall time so far, over all sittings.
        throughput_tok_s: Tokens per second since the line before.
        tune_accuracy: Greedy accuracy on held-out problems, on the lines where it was measured.
    """

    step: int
    num_steps: int
    tokens: int
    loss: float
    settled_loss: float
    lr: float
    elapsed_s: float
    throughput_tok_s: float
    tune_accuracy: float | None = None


def append_record(path: Path, record: TrainingRecord) -> None:
    """Add a line.

    Args:
        path: The log; made if missing.
        record: The line.
    """
    with path.open("a") as file:
        file.write(json.dumps(attrs.asdict(record)) + "\n")


def read_records(path: Path) -> list[TrainingRecord]:
    """Read a log; a last line that was cut off in the middle is left out.

    Args:
        path: The log; may be missing.

    Returns:
        The lines, oldest first.
    """
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [TrainingRecord(**json.loads(line)) for line in lines if line.endswith("\n")]


def rewind_log(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run is going to do again.

    Args:
        path: The log; may be missing.
        step: Steps that the checkpoint has seen.
    """
    kept = [record for record in read_records(path) if record.step <= step]
    write_text(path, "".join(json.dumps(attrs.asdict(record)) + "\n" for record in kept))
