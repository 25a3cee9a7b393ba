"""``kvpolicy bench``: the engine's speed under each policy, compared with ``generate`` and kvpress.

``--json`` prints and ``--output`` writes ``{"workload", "shape", "dtype", "device", "session",
"num_parameters", "weight_bytes", "bandwidth_gb_s", "absent", "standings"}``, with the fields of
`kvpolicy.lab.bench.summary.BenchResult` in ``standings``; ``baseline`` is called ``rival`` there.
With ``--memory`` there is ``readings`` in place of ``standings``, with the fields of
`kvpolicy.lab.bench.memory.Reading`.
"""

import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.options import (
    Json,
    Overrides,
    Plugins,
    check_new_file,
    examples,
    parse_ints,
    parse_names,
    register_plugins,
)
from kvpolicy.cli.output import (
    Progress,
    format_bytes,
    info,
    print_json,
    print_text,
    terminal_width,
)
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvpolicy.lab.bench.bench import Workload
    from kvpolicy.lab.bench.contender import Contender
    from kvpolicy.lab.bench.memory import Reading
    from kvpolicy.lab.bench.summary import BenchResult, Ratio
    from kvpolicy.lab.sweep.grid import Cell

_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")

# Sizes of a benchmark by option: the default, and the default with --quick.
_DEFAULTS: Mapping[str, tuple[Any, Any]] = {
    "shape": ("100m", "tiny"),
    "batch": (8, 4),
    "prompt_min": (64, 16),
    "prompt_max": (256, 48),
    "new_tokens": (2048, 256),
    "budget": (512, 48),
    "buffer": (128, 16),
    "rounds": (5, 3),
    "lengths": ([1000, 2000, 5000, 10_000, 20_000], [100, 200, 500]),
}
_MEMORY_SHAPE = "5m"  # a whole run of the larger model would take hours

# Columns of the table of speeds; those without any value are left out.
_COLUMNS: "Mapping[str, Callable[[BenchResult], str]]" = {
    "": lambda one: one.name,
    "budget": lambda one: "all" if one.budget is None else f"{one.budget:g}",
    "tok/s": lambda one: f"{one.decode_tok_s:.0f}",
    "x generate": lambda one: "" if one.ratio is None else f"{one.ratio.median:.2f}",
    "least - most": lambda one: _span(one.ratio),
    "ms/step": lambda one: f"{one.step_ms:.1f}",
    "p95": lambda one: f"{one.step_p95_ms:.1f}",
    "prefill tok/s": lambda one: _number(one.prefill_tok_s, ".0f"),
    "policy": lambda one: _number(one.policy_share, ".1%"),
    "KV cache": lambda one: format_bytes(one.kv_bytes),
    "of limit": lambda one: _number(one.limit_share, ".0%"),
}

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
    sizes = _choose_sizes(
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
        lengths=sorted(set(parse_ints("--lengths", lengths))),
    )
    # Imported here: torch takes a second to import, which --help need not wait for.
    import torch

    from kvpolicy.lab.bench.bench import Workload, build_contenders
    from kvpolicy.lab.bench.models import random_model, shape_named, weight_bytes
    from kvpolicy.lab.bench.plot import save_bench_plot
    from kvpolicy.lab.store.session import describe_session
    from kvpolicy.lab.sweep.grid import build_cells
    from kvpolicy.lab.sweep.prepare import load_series

    if threads is not None:
        torch.set_num_threads(threads)
    workload = Workload(
        sizes["batch"], sizes["prompt_min"], sizes["prompt_max"], sizes["new_tokens"], seed
    )
    model_shape = shape_named(sizes["shape"])
    rows = {"budgets": [sizes["budget"]], "buffer": sizes["buffer"]}
    # Plans are resolved before the model is built, so that their errors show early.
    series = load_series(
        preset, policies=parse_names("--policies", policies), plans=plan or [], **rows
    )
    cells = build_cells(
        series, num_layers=model_shape.num_layers, overrides=overrides or [], **rows
    )
    longest = sizes["prompt_max"] + (max(sizes["lengths"]) if memory else sizes["new_tokens"])
    model = random_model(model_shape, seed, max_positions=longest + 1, dtype=dtype, device=device)
    record = {
        "workload": attrs.asdict(workload),
        "shape": {"name": sizes["shape"], **attrs.asdict(model_shape)},
        "dtype": dtype,
        "device": str(model.device),
        "session": describe_session(["kvpolicy", *sys.argv[1:]], workers=1),
        "num_parameters": model.num_parameters(),
        "weight_bytes": weight_bytes(model),
        "bandwidth_gb_s": bandwidth,
    }

    if memory:
        readings, interruption = _track_memory(model, cells, workload, sizes["lengths"])
        if readings:
            record["readings"] = [attrs.asdict(reading) for reading in readings]
            _print_results(record, _memory_table(readings), output, json=json)
    else:
        contenders, absent = build_contenders(model, cells, with_generate=not no_generate)
        for reason in absent.values():
            info(f"{reason}; it is left out.")
        found, interruption = _compare_speed(
            model, contenders, workload, sizes["rounds"], bandwidth
        )
        if found:
            record |= {"absent": absent, "standings": [_standing(one) for one in found]}
            _print_results(record, _speed_table(found), output, json=json)
        if found and plot is not None:
            title = (
                f"{model.num_parameters() / 1e6:.3g} M parameters, {dtype}, "
                f"batch {workload.batch}, prompts of {workload.prompt_min}-{workload.prompt_max}, "
                f"budget {sizes['budget']} + {sizes['buffer']}"
            )
            save_bench_plot(found, plot, title=title)
    if interruption is not None:
        raise Interrupted(interruption)


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


def _choose_sizes(*, quick: bool, memory: bool, **given: Any) -> dict[str, Any]:
    """The sizes that the user gave, and defaults for the others."""
    sizes = {name: given[name] or default[quick] for name, default in _DEFAULTS.items()}
    if memory and not quick:
        sizes["shape"] = given["shape"] or _MEMORY_SHAPE
    if sizes["prompt_max"] < sizes["prompt_min"]:
        msg = f"--prompt-max {sizes['prompt_max']} is below --prompt-min {sizes['prompt_min']}."
        raise KVPolicyError(msg)
    return sizes


def _compare_speed(
    model: "PreTrainedModel",
    contenders: "Sequence[Contender]",
    workload: "Workload",
    rounds: int,
    bandwidth: float | None,
) -> "tuple[list[BenchResult], str | None]":
    """Run all contenders in turns; also returns what an interruption has left, if there was one."""
    from kvpolicy.lab.bench.bench import Turn, measure
    from kvpolicy.lab.bench.models import weight_bytes
    from kvpolicy.lab.bench.summary import summarize

    turns: list[Turn] = []

    def format_turn(turn: Turn) -> str:
        (name, measured), number = turn, len(turns) // len(contenders) + 1
        return f"round {number}, {name}: {workload.batch / measured.mean_step_s:.0f} tokens/s"

    measured = measure(contenders, workload, model.config.vocab_size, rounds=rounds)
    is_complete = _collect(measured, turns, rounds * len(contenders), format_turn)
    found = summarize(
        turns,
        contenders,
        workload,
        weight_bytes=weight_bytes(model),
        bandwidth_gb_s=bandwidth,
    )
    if is_complete:
        return found, None
    num_complete = len(turns) // len(contenders)
    return found, f"interrupted; {num_complete} of {rounds} rounds were complete and count."


def _track_memory(
    model: "PreTrainedModel", cells: "Sequence[Cell]", workload: "Workload", lengths: Sequence[int]
) -> "tuple[list[Reading], str | None]":
    """Generate a long text under each plan; also returns what an interruption has left."""
    from kvpolicy.lab.bench.memory import measure_memory

    readings: list[Reading] = []
    prompt = workload.prompts(model.config.vocab_size)[0]
    measured = chain.from_iterable(measure_memory(model, cell, prompt, lengths) for cell in cells)
    total = len(lengths) * len(cells)
    if _collect(measured, readings, total, lambda one: f"{one.name}: {one.new_tokens:,} tokens"):
        return readings, None
    return readings, f"interrupted; {len(readings)} of {total} readings were taken and are shown."


def _collect(
    measured: Iterable[Any], collected: list[Any], total: int, format_line: Callable[[Any], str]
) -> bool:
    """Collect measurements and show progress.

    Args:
        measured: Measures while it is iterated over.
        collected: Receives the measurements.
        total: Number of measurements.
        format_line: The line to print for a measurement, before that is collected.

    Returns:
        Whether all were collected; if not, the user has pressed Ctrl-C.
    """
    with Progress(total) as progress:
        progress.update("warming up", 0)
        try:
            for one in measured:
                progress.log(format_line(one))
                collected.append(one)
                progress.update("", len(collected))
        except KeyboardInterrupt:
            return False
    return True


def _standing(result: "BenchResult") -> dict[str, Any]:
    """Plain data of a result under the keys of the result file, where a baseline is a rival."""
    standing = attrs.asdict(result)
    standing["rival"] = standing.pop("baseline")
    standing["rival_ratio"] = standing.pop("baseline_ratio")
    return standing


def _print_results(
    record: Mapping[str, Any], table: str, output: Path | None, *, json: bool
) -> None:
    if output is not None:
        atomic_write(output, jsonlib.dumps(record, indent=2) + "\n")
    if json:
        print_json(record, indent=2)
    else:
        print_text(table + "\n")


def _speed_table(found: "Sequence[BenchResult]") -> str:
    """One row for each contender, and one line for each comparison with another library."""
    columns = {
        header: [format_value(one) for one in found] for header, format_value in _COLUMNS.items()
    }
    shown = {header: cells for header, cells in columns.items() if any(cells)}
    rows = [[cell or "-" for cell in row] for row in zip(*shown.values(), strict=True)]
    table = format_table(list(shown), rows, right=range(1, len(shown)), width=terminal_width())
    comparisons = [
        f"{one.name}: {ratio.median:.2f} x {one.baseline} ({_span(ratio)})"
        for one in found
        if (ratio := one.baseline_ratio) is not None
    ]
    return "\n".join([table, *comparisons])


def _memory_table(readings: "Sequence[Reading]") -> str:
    headers = ["", "tokens", "KV cache", "if all stayed", "process", "ms/step"]
    rows = [
        [
            one.name,
            f"{one.new_tokens:,}",
            format_bytes(one.kv_bytes),
            format_bytes(one.full_bytes),
            format_bytes(one.rss_bytes),
            f"{one.step_ms:.2f}",
        ]
        for one in readings
    ]
    return format_table(headers, rows, right=range(1, len(headers)), width=terminal_width())


def _number(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _span(ratio: "Ratio | None") -> str:
    return "" if ratio is None else f"{ratio.low:.2f} - {ratio.high:.2f}"
