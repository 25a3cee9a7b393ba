"""``kvpolicy run``: generate text with a policy at a budget, for one prompt or a file of prompts.

What is printed with ``--json``: see `kvpolicy.cli.run`; with ``--output``, see
`kvpolicy.lab.cli.answer_file`.
"""

from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    MODEL,
    PROMPTS,
    SOME_FAILED,
    GenerationOptions,
    Json,
    Where,
    examples,
)
from kvpolicy.cli.prefix_options import PrefixOptions, prefix_store
from kvpolicy.cli.run import print_results
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.cli import options
from kvpolicy.lab.cli.answer_file import Place, answer_file

app = typer.Typer(
    help="Generate text with a policy at a budget.",
    rich_help_panel="Generate text",
    add_completion=False,
)

_ANSWERS = "Answers of a file"


@app.command(
    epilog=examples(
        "kvpolicy run --policy h2o --budget 128 --max-new-tokens 200",
        "kvpolicy run --prompts questions.jsonl --output answers.jsonl --plan h2o",
    )
)
@with_groups
def run(
    generation: GenerationOptions,
    keep_going: Annotated[
        bool,
        typer.Option(
            "--keep-going",
            help="If a policy fails, report the error for the prompts it affects and go on "
            "with the others.",
        ),
    ] = False,
    in_order: Annotated[
        bool,
        typer.Option(
            "--in-order",
            help="Print the results of a file in the order of its prompts.",
            rich_help_panel=PROMPTS,
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the answers as JSON lines, in the order of the prompts; if interrupted, "
            "the same command continues.",
            rich_help_panel=_ANSWERS,
        ),
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option(
            "--overwrite",
            help="Replace an output of another run.",
            rich_help_panel=_ANSWERS,
        ),
    ] = False,
    on: options.On = Where.here,
    ray_address: options.RayAddress = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Workers on Ray side by side. [default: as many as there is room for]",
            rich_help_panel=options.WORKERS,
        ),
    ] = None,
    cpus_per_worker: options.CpusPerWorker = None,
    gpus_per_worker: options.GpusPerWorker = None,
    tensor_parallel: Annotated[
        bool,
        typer.Option(
            "--tensor-parallel",
            help="Split the model over the processes that torchrun has started; only the first "
            "one prints.",
            rich_help_panel=MODEL,
        ),
    ] = False,
    *,
    prefix: PrefixOptions,
    json: Json = False,
) -> None:
    """Generate text with a policy at a budget.

    One prompt is streamed; the results of a file are printed as they finish, or with --in-order
    as soon as all before them are out. With --output, they are written to a file, on this machine
    or a Ray cluster.
    """
    arguments = prefix.arguments()
    place = Place(on.value, ray_address, workers, cpus_per_worker, gpus_per_worker)
    if output is None:
        _refuse({**place.given(), "--overwrite": overwrite}, "needs --output FILE")
        if tensor_parallel:  # each process has the rows of some heads, and a store for them
            _refuse({"--prefix-spill": prefix.prefix_spill}, "is for one process; leave it out")
        failed = print_results(
            generation,
            keep_going=keep_going,
            in_order=in_order,
            tensor_parallel=tensor_parallel,
            store=prefix_store(arguments),
            json=json,
        )
    else:
        unusable: dict[str, object] = {
            "--in-order": in_order,
            "--tensor-parallel": tensor_parallel,
        }
        _refuse(unusable, "is for results that are printed; leave it out, or --output")
        failed = answer_file(
            generation,
            output,
            place,
            overwrite=overwrite,
            keep_going=keep_going,
            prefix_store=arguments,
            json=json,
        )
    if failed:
        raise typer.Exit(SOME_FAILED)


def _refuse(options: dict[str, object], why: str) -> None:
    for option, value in options.items():
        if value:
            msg = f"{option} {why}."
            raise KVPolicyError(msg)
