"""``kvpolicy bench``: the engine's speed under each policy beside ``generate`` and kvpress.

With ``--json`` on stdout, with ``--output`` in a file: ``{"workload", "shape", "dtype", "device",
"session", "num_parameters", "weight_bytes", "bandwidth_gb_s", "absent", "standings"}``, the
fields of a standing as in `kvpolicy.lab.bench.summary.Standing`; the first is ``generate``'s, if it
takes part, and ratios are paired by round. With ``--memory`` it is ``readings`` in place of
``standings``, with the fields of `kvpolicy.lab.bench.memory.Reading`.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.cli.options import (
    Json,
    Overrides,
    Plugins,
    check_new_file,
    examples,
    positive_ints,
    register_plugins,
    split_list,
)
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.cli.benchsizes import sizes

PICTURES = (".png", ".svg", ".pdf")

app = typer.Typer(
    help="Measure the engine's speed against generate().",
    rich_help_panel="Experiments",
    add_completion=False,
)


def _size(help_: str, least: int = 1) -> Any:
    return typer.Option(min=least, help=help_)


@app.command(
    epilog=examples(
        "kvpolicy bench --quick",
        "kvpolicy bench --policies h2o,snapkv --batch 16 --output speed.json",
    )
)
def bench(
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Whose policies to run. [default: baselines]"),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(metavar="NAME,...", help="Policies to run instead; in A+B, B wraps A."),
    ] = None,
    plan: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE|NAME", help="A plan to run; may be repeated."),
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Size of the model: tiny, 5m, 30m, 100m or 8b. [default: 100m; --memory: 5m; "
            "--quick: tiny]",
        ),
    ] = None,
    batch: Annotated[
        int | None, _size("Sequences decoded together. [default: 8; --quick: 4]")
    ] = None,
    prompt_min: Annotated[
        int | None, _size("Tokens of the shortest prompt. [default: 64; --quick: 16]")
    ] = None,
    prompt_max: Annotated[
        int | None, _size("Tokens of the longest prompt. [default: 256; --quick: 48]")
    ] = None,
    new_tokens: Annotated[
        int | None, _size("Tokens generated for each. [default: 2048; --quick: 256]", 3)
    ] = None,
    budget: Annotated[int | None, _size("Rows that stay. [default: 512; --quick: 48]")] = None,
    buffer: Annotated[int | None, _size("Rows that may join. [default: 128; --quick: 16]")] = None,
    rounds: Annotated[
        int | None, _size("Times everybody takes a turn. [default: 5; --quick: 3]")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small run, in seconds.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Watch the memory over one long text instead.")
    ] = False,
    no_generate: Annotated[
        bool,
        typer.Option(
            "--no-generate", help="Leave generate() out, which may take most of the time."
        ),
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Tokens at which --memory looks. [default: 1000,2000,5000,10000,20000]",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", min=1e-3, help="What the memory delivers: shows how near speeds come."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights and prompts.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch. [default: torch's choice]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the figures as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw time per step against length: .png, .svg, .pdf."),
    ] = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Annotated[
        str, typer.Option(metavar="NAME", help="float32, bfloat16 or float16.")
    ] = "float32",
    device: Annotated[
        str, typer.Option(metavar="NAME", help="Where to run, such as cuda:0.")
    ] = "cpu",
    json: Json = False,
) -> None:
    """Measure the engine's speed against transformers' generate() with the full cache.

    On a model with random weights, of about 100 M parameters if nothing else is said;
    everybody takes turns in one process, and speeds are compared within a round. Where kvpress
    is installed, its presses of the policies' names take part.
    """
    wanted = sizes(
        quick=quick,
        memory=memory,
        shape=shape,
        batch=batch,
        prompt_min=prompt_min,
        prompt_max=prompt_max,
        new_tokens=new_tokens,
        budget=budget,
        buffer=buffer,
        rounds=rounds,
        lengths=tuple(positive_ints("--lengths", lengths)),
    )
    _check_outputs(output, plot, memory=memory)
    register_plugins(plugin)
    # Imported here: torch takes a second, and help is wanted at once.
    from kvpolicy.lab.cli.benchrun import prepare, race, watch_memory

    made = prepare(
        wanted,
        preset=preset,
        policies=split_list(policies),
        plans=plan or [],
        overrides=overrides or [],
        longest=wanted.prompt_max + (max(wanted.lengths) if memory else wanted.new_tokens) + 1,
        seed=seed,
        threads=threads,
        dtype=dtype,
        device=device,
        bandwidth_gb_s=bandwidth,
    )
    if memory:
        watch_memory(made, output=output, json=json)
    else:
        race(made, with_generate=not no_generate, output=output, plot=plot, json=json)


def _check_outputs(output: Path | None, plot: Path | None, *, memory: bool) -> None:
    """Before minutes of work, not after."""
    if output is not None:
        check_new_file(output)
    if plot is None:
        return
    if memory:
        msg = "--plot draws the time of steps, which --memory does not compare; leave one out."
        raise KVPolicyError(msg)
    if plot.suffix not in PICTURES:
        msg = f"--plot was given {plot}; a name that ends in {', '.join(PICTURES)} is wanted."
        raise KVPolicyError(msg)
    check_new_file(plot, option="--plot")
