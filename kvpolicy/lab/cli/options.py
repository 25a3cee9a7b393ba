"""The options of ``kvpolicy ablate``: what a sweep compares, and where it runs."""

from collections.abc import Sequence
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.completion import names_of
from kvpolicy.cli.options import (
    MODEL,
    POLICY,
    SAMPLING,
    SLOTS,
    TEMPERATURE,
    TOP_P,
    Where,
    parse_names,
    split_list,
)
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import parse_toml

# More panels of ``--help``.
TASKS, WORKERS, RESULTS = "Tasks", "Workers", "Results"

# Options in one panel.
_policy = partial(typer.Option, rich_help_panel=POLICY)
_model = partial(typer.Option, rich_help_panel=MODEL)
_task = partial(typer.Option, rich_help_panel=TASKS)
_worker = partial(typer.Option, rich_help_panel=WORKERS)
_result = partial(typer.Option, rich_help_panel=RESULTS)


class SplitName(Enum):
    """Split of a task."""

    test = "test"
    tune = "tune"
    train = "train"


PresetName = Annotated[
    str | None,
    _policy(
        "--preset",
        metavar="NAME|FILE",
        autocompletion=names_of("kvpolicy.presets", ".toml"),
        help="A sweep. [default: baselines]",
    ),
]
Stacks = Annotated[
    str | None,
    _policy(
        metavar="NAME,...",
        autocompletion=names_of("kvpolicy.policies"),
        help="Policies to compare instead; in A+B, B wraps A.",
    ),
]
Plans = Annotated[
    list[Path] | None,
    _policy(
        "--plan",
        metavar="FILE|NAME",
        autocompletion=names_of("kvpolicy.plans", ".toml"),
        help="A plan to compare; may be repeated.",
    ),
]
Budgets = Annotated[
    str | None,
    _policy(metavar="N,...", help="Rows that stay per layer and KV head. [default: the preset's]"),
]
Bytes = Annotated[
    str | None,
    _policy(
        "--bytes",
        metavar="BYTES,...",
        help="Instead of budgets: KV bytes of each sequence, such as 256KiB,512KiB. Each plan has "
        "the largest budget that fits.",
    ),
]
Rows = Annotated[
    str | None,
    _policy(
        "--rows",
        metavar="FORMAT,...",
        help="Precisions of rows in which every plan runs: model, int8, int4, or KEYS/VALUES as in "
        "int8/int4. [default: the plans']",
    ),
]
Grid = Annotated[
    list[str] | None,
    _policy(
        "--grid",
        metavar="KEY=V1,V2,...",
        help="Values to try of POLICY.KNOB, of buffer or prefill_buffer; may be repeated.",
    ),
]
Zip = Annotated[
    bool,
    _policy("--zip", help="Zip all lists instead of taking all combinations."),
]
Models = Annotated[
    list[str] | None,
    _model(
        "--model",
        metavar="NAME|FOLDER|FILE",
        autocompletion=names_of("kvpolicy.models", "/", ".gguf"),
        help="Name of an installed model, hub id, local folder or GGUF file; may be repeated. "
        "[default: the preset's]",
    ),
]
Tasks = Annotated[
    list[str] | None,
    _task(
        "--task",
        metavar="NAME|FILE|ID",
        autocompletion=names_of("kvpolicy.tasks", ".jsonl"),
        help="A task, a file or a hub id, with options as NAME:KEY=VALUE,...; "
        "may be repeated. [default: the preset's]",
    ),
]
Seeds = Annotated[
    str | None,
    _task("--seeds", "--seed", metavar="N,...", help="Each selects other examples. [default: 0]"),
]
NumExamples = Annotated[
    int | None,
    _task("--n", min=1, help="Examples for each cell. [default: the preset's]"),
]
Split = Annotated[
    SplitName | None,
    _task(help="Examples to report on, or to tune settings on. [default: test]"),
]
Attempts = Annotated[int | None, _task(min=1, help="Samples per example, for pass@1.")]
Temperature = Annotated[float | None, TEMPERATURE]
TopP = Annotated[float | None, TOP_P]
ExecuteCode = Annotated[
    bool,
    _task("--execute-code", help="Let a grader run programs the model wrote."),
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
    _worker(min=1, help="Cells run side by side. [default: small models: one per core]"),
]
On = Annotated[Where, _worker(help="Run on this machine, or on a Ray cluster.")]
RayAddress = Annotated[
    str | None,
    _worker(
        metavar="HOST:PORT|auto",
        help="The cluster. [default: RAY_ADDRESS, or a new one on this machine]",
    ),
]
CpusPerWorker = Annotated[
    int | None,
    _worker(min=1, help="CPUs and threads of a worker on Ray. [default: 1]"),
]
GpusPerWorker = Annotated[
    float | None,
    _worker(min=0, help="GPUs of a worker on Ray. [default: 1 where there are any]"),
]
Output = Annotated[
    Path | None,
    _result(
        metavar="FOLDER",
        help="Results folder. [default: kvpolicy-ablate/NAME, the same for the same settings]",
    ),
]
By = Annotated[
    str | None,
    _result(metavar="FACET", help="Break the table down, e.g. by difficulty."),
]
Record = Annotated[
    int,
    _result(min=0, help="Examples of each cell, from the first, to record kept tokens of."),
]
DryRun = Annotated[
    bool,
    _result("--dry-run", help="List the cells and what is left to do, and stop."),
]


def parse_grid(texts: Sequence[str], rows: str | None = None) -> dict[str, tuple[Any, ...]]:
    """Parse the values of each knob.

    Args:
        texts: Such as ``"rkv.mix_lambda=0.1,0.2"``. Values are those of a TOML list; text that
            is not TOML is split at commas.
        rows: Values of ``--rows``, which are a knob, too.

    Raises:
        KVPolicyError: One of them is malformed, or a knob is given twice.
    """
    formats = parse_names("--rows", rows)
    found: dict[str, tuple[Any, ...]] = {"rows": tuple(formats)} if formats else {}
    for text in texts:
        path, equals, listed = text.partition("=")
        key = path.strip()
        values = _parse_values(listed)
        if not (key and equals and values):
            msg = f"--grid {text!r} is not KEY=V1,V2; write for example POLICY.KNOB=0.1,0.2."
            raise KVPolicyError(msg)
        if key in found:
            options = "--rows and --grid were" if key == "rows" and formats else "--grid was"
            msg = f"{options} given '{key}' twice; list all its values in one: {key}=V1,V2."
            raise KVPolicyError(msg)
        found[key] = tuple(values)
    return found


def _parse_values(text: str) -> list[Any]:
    try:
        return list(parse_toml(f"values = [{text}]")["values"])
    except ValueError:
        return split_list(text)
