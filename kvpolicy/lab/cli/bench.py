"""``kvpolicy bench``: the engine's speed under each policy, compared with ``generate`` and kvpress.

``--json`` prints and ``--output`` writes ``{"workload", "shape", "dtype", "device", "session",
"num_parameters", "weight_bytes", "bandwidth_gb_s", "absent", "standings"}``, with the fields of
`kvpolicy.lab.bench.summary.BenchResult` in ``standings``. With ``--memory`` there is ``readings``
in place of ``standings``, with the fields of `kvpolicy.lab.bench.memory.Reading`.
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

_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")

app = typer.Typer(
    help="Measure the engine's speed against generate().",
    rich_help_panel="Experiments",
    add_completion=False,
)


def _size(help_: str, minimum: int = 1) -> Any:
    return typer.Option(min=minimum, help=help_)


@app.command(
    epilog=examples(
        "kvpolicy bench --quick",
        "kvpolicy bench --policies h2o,snapkv --batch 16 --output speed.json",
    )
)
def bench(
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Sweep whose policies to run. [default: baselines]"),
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
    rounds: Annotated[int | None, _size("Number of rounds. [default: 5; --quick: 3]")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small run of a few seconds.")] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure memory over one long text instead.")
    ] = False,
    no_generate: Annotated[
        bool,
        typer.Option(
            "--no-generate", help="Leave out generate(), which may take most of the time."
        ),
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Tokens at which --memory measures. [default: 1000,2000,5000,10000,20000]",
        ),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S", min=1e-3, help="Bandwidth of the memory, to compare speeds with."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for weights and prompts.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch. [default: torch's choice]")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results as JSON.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot time per step against length: .png, .svg, .pdf."),
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

    The model has random weights, about 100 M parameters by default. All contenders take turns in
    one process, and speeds are compared within a round. If kvpress is installed, its presses with
    the policies' names take part.
    """
    _check_outputs(output, plot, memory=memory)
    register_plugins(plugin)
    # Imported here: torch takes a second to import, which --help need not wait for.
    from kvpolicy.lab.cli.bench_run import choose_sizes, compare_speed, prepare, track_memory

    sizes = choose_sizes(
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
        lengths=tuple(sorted(set(positive_ints("--lengths", lengths)))) or None,
    )
    benchmark = prepare(
        sizes,
        preset=preset,
        policies=split_list(policies),
        plans=plan or [],
        overrides=overrides or [],
        max_positions=sizes.prompt_max + (max(sizes.lengths) if memory else sizes.new_tokens) + 1,
        seed=seed,
        threads=threads,
        dtype=dtype,
        device=device,
        bandwidth_gb_s=bandwidth,
    )
    if memory:
        track_memory(benchmark, output=output, json=json)
    else:
        compare_speed(benchmark, with_generate=not no_generate, output=output, plot=plot, json=json)


def _check_outputs(output: Path | None, plot: Path | None, *, memory: bool) -> None:
    """Refuse wrong file names before minutes of work."""
    if output is not None:
        check_new_file(output)
    if plot is None:
        return
    if memory:
        msg = "--plot draws the time of steps, which --memory does not compare; leave one out."
        raise KVPolicyError(msg)
    if plot.suffix not in _FIGURE_SUFFIXES:
        msg = f"--plot was given {plot}; give a name that ends in {', '.join(_FIGURE_SUFFIXES)}."
        raise KVPolicyError(msg)
    check_new_file(plot, option="--plot")
