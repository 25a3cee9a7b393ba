"""The options of ``kvpolicy ablate``: what a sweep compares, and where it runs."""

import tomllib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.options import MODEL, POLICY, SAMPLING, SLOTS, TEMPERATURE, TOP_P, split_list
from kvpolicy.errors import KVPolicyError

# More panels of ``--help``.
TASKS, WORKERS, RESULTS = "Tasks", "Workers", "Results"


class SplitName(Enum):
    """Split of a task."""

    test = "test"
    tune = "tune"
    train = "train"


class Where(Enum):
    """Where a sweep runs."""

    here = "here"
    ray = "ray"


PresetName = Annotated[
    str | None,
    typer.Option(
        "--preset",
        metavar="NAME|FILE",
        help="A sweep. [default: baselines]",
        rich_help_panel=POLICY,
    ),
]
Stacks = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Policies to compare instead; in A+B, B wraps A.",
        rich_help_panel=POLICY,
    ),
]
Plans = Annotated[
    list[Path] | None,
    typer.Option(
        "--plan",
        metavar="FILE|NAME",
        help="A plan to compare; may be repeated.",
        rich_help_panel=POLICY,
    ),
]
Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="N,...",
        help="Rows that stay per layer and KV head. [default: the preset's]",
        rich_help_panel=POLICY,
    ),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V1,V2,...",
        help="Values to try of POLICY.KNOB, or of buffer; may be repeated.",
        rich_help_panel=POLICY,
    ),
]
Zip = Annotated[
    bool,
    typer.Option(
        "--zip", help="Zip all lists instead of taking all combinations.", rich_help_panel=POLICY
    ),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME|FOLDER",
        help="Name of an installed model, hub id or local folder; may be repeated. "
        "[default: the preset's]",
        rich_help_panel=MODEL,
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="NAME|FILE|ID",
        help="A task, a file or a hub id, with options as NAME:KEY=VALUE,...; "
        "may be repeated. [default: the preset's]",
        rich_help_panel=TASKS,
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option(
        "--seeds",
        "--seed",
        metavar="N,...",
        help="Each selects other examples. [default: 0]",
        rich_help_panel=TASKS,
    ),
]
NumExamples = Annotated[
    int | None,
    typer.Option(
        "--n", min=1, help="Examples for each cell. [default: the preset's]", rich_help_panel=TASKS
    ),
]
Split = Annotated[
    SplitName | None,
    typer.Option(
        help="Examples to report on, or to tune settings on. [default: test]", rich_help_panel=TASKS
    ),
]
Attempts = Annotated[
    int | None, typer.Option(min=1, help="Samples per example, for pass@1.", rich_help_panel=TASKS)
]
Temperature = Annotated[float | None, TEMPERATURE]
TopP = Annotated[float | None, TOP_P]
ExecuteCode = Annotated[
    bool,
    typer.Option(
        "--execute-code", help="Let a grader run programs the model wrote.", rich_help_panel=TASKS
    ),
]
Slots = Annotated[int | None, SLOTS]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Generation limit of a sample. [default: the preset's]",
        rich_help_panel=SAMPLING,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Cells run side by side. [default: small models: one per core]",
        rich_help_panel=WORKERS,
    ),
]
On = Annotated[
    Where, typer.Option(help="Run on this machine, or on a Ray cluster.", rich_help_panel=WORKERS)
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT|auto",
        help="The cluster. [default: RAY_ADDRESS, or a new one on this machine]",
        rich_help_panel=WORKERS,
    ),
]
CpusPerWorker = Annotated[
    int | None,
    typer.Option(
        min=1, help="CPUs and threads of a worker on Ray. [default: 1]", rich_help_panel=WORKERS
    ),
]
GpusPerWorker = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="GPUs of a worker on Ray. [default: 1 where there are any]",
        rich_help_panel=WORKERS,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Results folder. [default: kvpolicy-ablate/NAME, the same for the same settings]",
        rich_help_panel=RESULTS,
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        metavar="FACET", help="Break the table down, e.g. by difficulty.", rich_help_panel=RESULTS
    ),
]
Record = Annotated[
    int,
    typer.Option(
        min=0,
        help="Examples of each cell, from the first, to record kept tokens of.",
        rich_help_panel=RESULTS,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="List the cells and what is left to do, and stop.",
        rich_help_panel=RESULTS,
    ),
]


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Parse the values of each knob.

    Args:
        texts: Such as ``"rkv.mix_lambda=0.1,0.2"``. Values are those of a TOML list; text that
            is not TOML is split at commas.

    Raises:
        KVPolicyError: One of them is malformed, or a knob is given twice.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        path, equals, listed = text.partition("=")
        key = path.strip()
        values = _parse_values(listed)
        if not (key and equals and values):
            msg = f"--grid {text!r} is not KEY=V1,V2; write for example POLICY.KNOB=0.1,0.2."
            raise KVPolicyError(msg)
        if key in found:
            msg = f"--grid was given '{key}' twice; list all its values in one: {key}=V1,V2."
            raise KVPolicyError(msg)
        found[key] = tuple(values)
    return found


def _parse_values(text: str) -> list[Any]:
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except (ValueError, RecursionError):
        return split_list(text)
