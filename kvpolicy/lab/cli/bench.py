"""``kvpolicy bench``: the engine's speed under each policy, beside what else a user could take.

``--json`` prints and ``bench.json`` in the folder of ``--output`` has ``{"works", "shape", "dtype",
"device", "session", "num_parameters", "weight_bytes", "absent", "choices", "standings", "prefills",
"missing"}``; what turns measured is in ``turns.jsonl`` beside it. With ``--memory`` there is
``readings`` in place of ``standings``, and with ``--launches`` there are ``launches``, which are
none on the device ``meta``, ``kernels``, and for a ``--shape`` ``prompts``. Their fields are those
of the classes in `kvpolicy.lab.bench`: `rounds.summary.BenchResult` in ``standings``,
`rounds.summary.PrefillResult` in ``prefills``, `rounds.turns.Missing` in ``missing``,
`operating_points.at_accuracy.Choice` in ``choices``, `diagnostics.memory.Reading` in ``readings``,
`diagnostics.launches.Launches` in ``launches``, `diagnostics.kernels.Kernels` in ``kernels`` and
`diagnostics.prompt_kernels.PromptKernels` in ``prompts``.
"""

import json as jsonlib
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.options import (
    SOME_FAILED,
    Json,
    Overrides,
    Plugins,
    WeightForm,
    check_new_file,
    examples,
    parse_ints,
    parse_names,
    register_plugins,
    tell_packing,
)
from kvpolicy.cli.output import info, print_json, print_text
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write
from kvpolicy.lab.cli.bench_sizes import choose_sizes, positions_needed, without_effect

if TYPE_CHECKING:
    from kvpolicy.lab.bench.operating_points.at_accuracy import Choice
    from kvpolicy.lab.bench.rounds.turns import Missing
    from kvpolicy.lab.sweep.grid import Cell

_FIGURE_SUFFIXES = (".png", ".svg", ".pdf")

_GPU_WITHOUT = "generate,generate_batch,kvpress"
_GPU_SHARE = 0.9  # of the memory that the model leaves free: activations and graphs have the rest
_GPU_MINUTES, _GPU_MINUTES_WITH_RIVALS = 4.0, 10.0
_GPU_FOLDER = Path("kvpolicy-bench")
_CHECKS = "tokens and compactions"

app = typer.Typer(
    help="Measure the engine's speed against generate(), vLLM and others.",
    rich_help_panel="Experiments",
    add_completion=False,
)


def _size(help_: str, minimum: int = 1) -> Any:
    return typer.Option(min=minimum, help=help_)


@app.command(
    epilog=examples(
        "kvpolicy bench --quick",
        "kvpolicy bench --vllm-python ~/vllm/bin/python --output speed",
        "kvpolicy bench --at-accuracy 0.02 --sweep kvpolicy-ablate/default",
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
    without: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Leave out: generate, generate_batch, kvpress, 'model alone', 'machine limit'. "
            f"[--gpu: {_GPU_WITHOUT}]",
        ),
    ] = None,
    vllm_python: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run vLLM, too, with the Python of its environment."),
    ] = None,
    openvino_python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="OpenVINO GenAI likewise, on a CPU.")
    ] = None,
    llama_cpp_python: Annotated[
        Path | None, typer.Option(metavar="FILE", help="llama.cpp likewise, on a CPU.")
    ] = None,
    at_accuracy: Annotated[
        float | None,
        typer.Option(
            metavar="LOSS",
            min=0,
            max=1,
            help="Run each policy of --sweep at its smallest budget whose accuracy is at most so "
            "far below the full cache's, such as 0.02.",
        ),
    ] = None,
    sweep: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Results of kvpolicy ablate, for --at-accuracy."),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Generate whole texts instead of steps at --lengths.")
    ] = False,
    max_batch: Annotated[
        bool,
        typer.Option("--max-batch", help="Run each contender at the largest batch that fits."),
    ] = False,
    memory: Annotated[
        bool, typer.Option("--memory", help="Measure memory over one long text instead.")
    ] = False,
    launches: Annotated[
        bool,
        typer.Option(
            "--launches",
            help="Count operations of steps, compactions and prompts, and values the host reads.",
        ),
    ] = False,
    gpu: Annotated[
        bool,
        typer.Option(
            "--gpu",
            help="Check the kernels on the GPU; then measure --batches and the largest that fits, "
            "prompts, and what the GPU does in a step.",
        ),
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Tokens held. [default: 512,2048,4096,8192,16384; --max-batch and "
            "--at-accuracy: 4096; "
            "--memory: 1000,...,20000; --launches: 2048; --gpu: 8704; --quick: 64,128]",
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Batches of --gpu, the first of which come first. [default: 32,1,8; --quick: 4,1]",
        ),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="N,...",
            help="Tokens of the prompts that --gpu brings in. [default: 4096,32768; "
            "--quick: 64,128]",
        ),
    ] = None,
    steps: Annotated[
        int | None, _size("Decode steps measured, at least. [default: 16; --gpu: 48; --quick: 8]")
    ] = None,
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Size of the model: tiny, host, 5m, 30m, 100m, 135m, 8b or qwen3-8b. [default: "
            "100m; --memory: 5m; --launches: host; --gpu: qwen3-8b; --quick: tiny]",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A real model in place of --shape: installed, hub id, or folder."
        ),
    ] = None,
    batch: Annotated[
        int | None, _size("Sequences decoded together. [default: 8; --quick: 4]")
    ] = None,
    memory_limit: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            min=1e-6,
            help="Memory for keys and values with --max-batch. [default: 1; --gpu: 90 % of what "
            "the model leaves free]",
        ),
    ] = None,
    prompt_min: Annotated[
        int | None, _size("Tokens of the shortest prompt of a text. [default: 64; --quick: 16]")
    ] = None,
    prompt_max: Annotated[
        int | None, _size("Tokens of the longest prompt of a text. [default: 256; --quick: 48]")
    ] = None,
    new_tokens: Annotated[
        int | None, _size("Tokens generated for each text. [default: 2048; --quick: 256]", 3)
    ] = None,
    budget: Annotated[
        int | None, _size("Rows that stay. [default: 512; --gpu: 1024; --quick: 48]")
    ] = None,
    buffer: Annotated[
        int | None, _size("Rows that may join. [default: 128; --launches and --quick: 16]")
    ] = None,
    rounds: Annotated[
        int | None, _size("Number of rounds. [default: 5; --gpu: 1; --quick: 3]")
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Begin nothing that would end later; what is left out is named. [default: no "
            "limit; --gpu: 4, and 10 with vLLM]",
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A small run of a few seconds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for weights and prompts.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of torch. [default: torch's choice]")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write every turn as it ends; the same command continues. [--gpu: "
            "kvpolicy-bench/NAME]",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Plot time per step against length: .png, .svg, .pdf."),
    ] = None,
    cpu_weights: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help="Measure all with weights in these forms for CPUs, too: packed, bf16, int8.",
        ),
    ] = None,
    compile: Annotated[
        bool,
        typer.Option(
            "--compile",
            help="Measure the engine, generate and the model alone with compiled decode steps, "
            "too; compiling takes a minute or more for each plan.",
        ),
    ] = False,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="float32, bfloat16 or float16. [default: float32; --gpu: bfloat16]",
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Where to run, such as cuda:0; --launches counts the kernels of a GPU on meta, "
            "too, which needs no memory. [default: cpu; --gpu: cuda]",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure the engine's speed beside transformers, kvpress and other engines.

    Decode steps at several lengths, of caches that are filled directly: tokens held are rows in a
    full cache, and a policy holds its budget. The model has random weights, about 100 M parameters
    by default, unless --model names one. All contenders take turns, and speeds are compared within
    a round.
    """
    started = time.monotonic()
    mode = _mode(text=text, max_batch=max_batch, memory=memory, launches=launches, gpu=gpu)
    _check_options(mode, plot, at_accuracy, sweep, preset or policies or plan)
    _check_forms(mode, **{"cpu-weights": cpu_weights is not None, "compile": compile})
    weight_forms = _weight_forms(cpu_weights)
    if minutes is not None and mode in ("memory", "launches"):
        msg = f"--{mode} has no turns to leave out; leave out --minutes."
        raise KVPolicyError(msg)
    if model is not None and shape is not None:
        msg = "bench was given --model and --shape, which both say what is measured; give one."
        raise KVPolicyError(msg)
    register_plugins(plugin)
    given_sizes: dict[str, Any] = {
        "shape": shape,
        "batch": batch,
        "steps": steps,
        "prompt_min": prompt_min,
        "prompt_max": prompt_max,
        "new_tokens": new_tokens,
        "budget": budget,
        "buffer": buffer,
        "rounds": rounds,
        "lengths": sorted(set(parse_ints("--lengths", lengths))),
        "prefill": sorted(set(parse_ints("--prefill", prefill))),
        "batches": list(dict.fromkeys(parse_ints("--batches", batches))),
        "memory_limit": memory_limit,
    }
    sizes = choose_sizes(mode, at_accuracy=at_accuracy is not None, quick=quick, **given_sizes)
    if (note := without_effect(mode, **given_sizes)) is not None:
        info(f"{note}.")
    without = without or (_GPU_WITHOUT if gpu else None)
    device = device or ("cuda" if gpu else "cpu")
    dtype = dtype or ("bfloat16" if gpu else "float32")
    if gpu and minutes is None:
        has_rivals = any([vllm_python, openvino_python, llama_cpp_python])
        minutes = _GPU_MINUTES_WITH_RIVALS if has_rivals else _GPU_MINUTES
    # Imported here: torch takes a second to import, which --help need not wait for.
    import torch

    from kvpolicy.compat import has_meta_forwards
    from kvpolicy.lab.bench.contenders.build import build_contenders
    from kvpolicy.lab.bench.contenders.contender import LLAMA_CPP, OPENVINO, VLLM, Contender
    from kvpolicy.lab.bench.contenders.form import Form
    from kvpolicy.lab.bench.contenders.rivals.known import KNOWN
    from kvpolicy.lab.bench.models import named_model, random_model, shape_named
    from kvpolicy.lab.bench.roofline import Machine, ModelSize
    from kvpolicy.lab.bench.rounds.plot import save_bench_plot
    from kvpolicy.lab.bench.rounds.summary import summarize, summarize_prefills
    from kvpolicy.lab.bench.rounds.time_limit import TimeLimit
    from kvpolicy.lab.bench.rounds.turn_file import make_folder, open_turns
    from kvpolicy.lab.cli.bench_run import (
        Rules,
        Starting,
        count_kernels,
        count_launches,
        count_prompts,
        failed_checks,
        room_for,
        run_in_turns,
        starting_rivals,
        track_memory,
        workloads_of,
    )
    from kvpolicy.lab.cli.bench_tables import (
        choices_table,
        gpu_tables,
        kernels_table,
        launches_table,
        memory_table,
        prompt_kernels_table,
        speed_tables,
    )
    from kvpolicy.lab.store.session import describe_session
    from kvpolicy.lab.sweep.grid import digest
    from kvpolicy.model.fingerprint import model_fingerprint

    if output is not None:
        make_folder(output)
    if gpu and device.startswith("cuda") and not torch.cuda.is_available():
        msg = (
            "--gpu needs a GPU with CUDA, and torch finds none; leave it out to measure a CPU, or "
            "walk through it with --gpu --device cpu --quick."
        )
        raise KVPolicyError(msg)
    if device.startswith("meta"):
        _check_meta(mode)
    if threads is not None:
        torch.set_num_threads(threads)
    pythons = {VLLM: vllm_python, OPENVINO: openvino_python, LLAMA_CPP: llama_cpp_python}
    rivals = [(KNOWN[name], python) for name, python in pythons.items() if python is not None]
    positions = positions_needed(mode, sizes)
    if model is None:
        model_shape = shape_named(sizes["shape"])
        num_layers, described_shape = model_shape.num_layers, attrs.asdict(model_shape)
        described_shape = {"name": sizes["shape"], **described_shape}
    else:
        decoder = named_model(model, positions=positions, dtype=dtype, device=device)
        num_layers = decoder.config.num_hidden_layers
        described_shape = {"name": model, "fingerprint": model_fingerprint(decoder)}
    # Plans are resolved before a model is built, so that their errors show early.
    choices = [] if at_accuracy is None else _choices(sweep, at_accuracy)
    cells = _cells(
        choices,
        sizes,
        num_layers,
        preset=preset,
        policies=parse_names("--policies", policies),
        plans=plan or [],
        overrides=overrides or [],
    )
    works = workloads_of(mode, sizes, seed)
    if model is None:
        decoder = random_model(
            model_shape, seed, max_positions=positions, dtype=dtype, device=device
        )
    size = ModelSize.of(decoder)
    record: dict[str, Any] = {
        "works": [attrs.asdict(work) for work in works],
        "shape": described_shape,
        "dtype": dtype,
        "device": str(decoder.device),
        "session": describe_session(["kvpolicy", *sys.argv[1:]], workers=1),
        "num_parameters": decoder.num_parameters(),
        "weight_bytes": size.weight_bytes,
    }
    if mode == "memory":
        readings, interruption = track_memory(decoder, cells, sizes, seed)
        if readings:
            record["readings"] = [attrs.asdict(reading) for reading in readings]
            _print_results(record, memory_table(readings), output, json=json)
        if interruption is not None:
            raise Interrupted(interruption)
        return

    if mode == "launches":
        launches_of = count_launches(decoder, cells, works[0])
        kernels_of = count_kernels(decoder, cells, works[0])
        record["launches"] = [attrs.asdict(one) for one in launches_of]
        record["kernels"] = [attrs.asdict(one) for one in kernels_of]
        tables = [launches_table(launches_of)] if launches_of else []
        tables.append(kernels_table(kernels_of))
        if model is None and has_meta_forwards():
            prompts_of = count_prompts(model_shape, cells, dtype)
            record["prompts"] = [attrs.asdict(one) for one in prompts_of]
            tables.append(prompt_kernels_table(prompts_of, num_layers))
        _print_results(record, "\n\n".join(tables), output, json=json)
        return

    forms = [Form.plain(decoder)]
    for weight_form in weight_forms:
        form = Form.packed(decoder, weight_form.value)
        tell_packing(form.model, weight_form)
        forms += [] if form.model is decoder else [form]
    if compile:
        forms.append(Form.compiled(decoder))
    built = build_contenders(forms, cells, without=parse_names("--without", without))
    for reason in built.absent.values():
        info(f"{reason}; it is left out.")
    limit_bytes = sizes["memory_limit"] * 1e9
    if gpu and memory_limit is None and decoder.device.type == "cuda":
        limit_bytes = _GPU_SHARE * torch.cuda.mem_get_info(decoder.device)[0]
    described = {
        **{name: record[name] for name in ("works", "shape", "dtype", "device")},
        "plans": {cell.series: cell.digest for cell in cells},
        "contenders": [one.name for one in built.all] + [rival.name for rival, _ in rivals],
        "threads": torch.get_num_threads(),
        "versions": record["session"]["versions"],
    }
    if gpu and output is None:
        output = _GPU_FOLDER / f"gpu-{digest(described)[:8]}"
        info(f"writing to {output}; the same command continues there")
    time_limit = None
    if minutes is not None:
        time_limit = TimeLimit(started + 60 * minutes, Machine.of(decoder), size)
    rules = Rules(sizes["rounds"], size, limit_bytes, time_limit, goes_on=gpu)
    failed: list[Missing] = []
    with open_turns(output, described) as turns:
        if turns.turns:
            info(f"{len(turns.turns)} turns of {output} are kept; only what is missing is measured")
        if gpu and _CHECKS not in turns.passed:
            info(f"checking tokens and compactions on {device}")
            num_compactions = 10 if quick else 1000
            failed = failed_checks(decoder.device, cells, num_compactions=num_compactions)
            if not failed:
                turns.add_passed(_CHECKS)
        groups: list[tuple[Sequence[Contender], Starting]] = [(built.all, nullcontext(()))]
        if rivals:
            room = room_for(works, limit_bytes, sizes, size.row_bytes)
            names = [form.name for form in forms]
            others = starting_rivals(rivals, decoder, names, room, time_limit)
            # On a GPU each has the memory for itself.
            groups = [(built.all, nullcontext(())), ((), others)] if gpu else [(built.all, others)]
        outcome = run_in_turns(groups, works, turns, rules)
        outcome.missing[:0] = failed
        found = summarize(turns.turns, outcome.jobs, size)
        prefills = summarize_prefills(turns.turns, outcome.jobs)
        if found or prefills:
            record |= {
                "absent": built.absent,
                "choices": [_plain(choice) for choice in choices],
                "standings": [attrs.asdict(one) for one in found],
                "prefills": [attrs.asdict(one) for one in prefills],
                "missing": [attrs.asdict(one) for one in outcome.missing],
            }
            tables = [gpu_tables(found, prefills) if gpu else speed_tables(found)]
            if at_accuracy is not None:
                tables.insert(0, choices_table(choices, at_accuracy))
            _print_results(record, "\n\n".join(tables), output, json=json)
        if found and plot is not None:
            title = (
                f"{decoder.num_parameters() / 1e6:.3g} M parameters, {dtype}, "
                f"batch {sizes['batch']}, budget {sizes['budget']} + {sizes['buffer']}"
            )
            save_bench_plot(found, plot, title=title)
    if outcome.interruption is not None:
        raise Interrupted(outcome.interruption)
    _tell_missing(outcome.missing)


# Options


def _mode(**given: bool) -> str:
    """The kind of work: ``"decode"``, or the name of the one option that was given."""
    chosen = [name for name, is_given in given.items() if is_given]
    if len(chosen) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in chosen)
        msg = f"bench was given {names}, which are different workloads; give one of them."
        raise KVPolicyError(msg)
    return next(iter(chosen), "decode")


def _check_options(
    mode: str, plot: Path | None, at_accuracy: float | None, sweep: Path | None, plans: object
) -> None:
    """Refuse what does not fit together before minutes of work."""
    if (at_accuracy is None) != (sweep is None):
        msg = "--at-accuracy and --sweep need each other: --at-accuracy 0.02 --sweep FOLDER."
        raise KVPolicyError(msg)
    if at_accuracy is not None and plans:
        msg = "--at-accuracy runs the plans of --sweep; leave out --preset, --policies and --plan."
        raise KVPolicyError(msg)
    if at_accuracy is not None and mode in ("memory", "launches"):
        msg = f"--{mode} measures no speed; leave it or --at-accuracy out."
        raise KVPolicyError(msg)
    if plot is None:
        return
    if mode not in ("decode", "text"):
        msg = f"--plot draws steps against lengths, which --{mode.replace('_', '-')} has not."
        raise KVPolicyError(msg)
    if plot.suffix not in _FIGURE_SUFFIXES:
        msg = f"--plot was given {plot}; give a name that ends in {', '.join(_FIGURE_SUFFIXES)}."
        raise KVPolicyError(msg)
    check_new_file(plot, option="--plot")


def _check_forms(mode: str, **given: bool) -> None:
    """Refuse forms of the model where only the model as it is is decoder."""
    if mode in ("memory", "launches"):
        for name in (name for name, is_given in given.items() if is_given):
            msg = f"--{mode} measures the model as it is; leave out --{name}."
            raise KVPolicyError(msg)


def _weight_forms(names: str | None) -> list[WeightForm]:
    """The forms of weights that are measured beside the plain one."""
    known = {one.value: one for one in WeightForm if one is not WeightForm.plain}
    given = list(dict.fromkeys(parse_names("--cpu-weights", names)))
    for name in given:
        if name not in known:
            msg = (
                f"--cpu-weights was given {name!r}, which is no form that is measured beside the "
                f"plain weights; choose of {', '.join(known)}."
            )
            raise KVPolicyError(msg)
    return [known[name] for name in given]


def _check_meta(mode: str) -> None:
    """Refuse a model without memory where nothing can be counted on it.

    Raises:
        KVPolicyError: Something else is asked, or this transformers does not compute there.
    """
    from kvpolicy.compat import has_meta_forwards

    if mode != "launches":
        msg = "--device meta has no memory, so nothing can be timed there; give --launches with it"
        raise KVPolicyError(msg)
    if not has_meta_forwards():
        msg = (
            "--device meta needs a newer transformers, this one does not compute there; install "
            "transformers 5.17 or newer, or leave --device out for a shape that fits into memory"
        )
        raise KVPolicyError(msg)


def _choices(sweep: Path | None, margin: float) -> "list[Choice]":
    from kvpolicy.lab.analysis.pooling import pool
    from kvpolicy.lab.analysis.select import open_runs
    from kvpolicy.lab.bench.operating_points.at_accuracy import choose_budgets

    choices = choose_budgets(pool(open_runs([str(sweep)], warn=info)), margin)
    if all(choice.plan is None for choice in choices):
        lows = {one.series: one.difference.low for one in choices if one.difference is not None}
        nearest = max(lows, key=lambda series: lows[series], default=None)
        so_far = "" if nearest is None else f"; {nearest} may lose {-lows[nearest]:.1%}"
        msg = (
            f"no policy of {sweep} has a budget whose accuracy is at most {margin:.1%} below the "
            f"full cache's by its interval{so_far}: run the sweep with larger budgets or more "
            "items."
        )
        raise KVPolicyError(msg)
    return choices


def _cells(
    choices: "Sequence[Choice]", sizes: Mapping[str, Any], num_layers: int, **given: Any
) -> "list[Cell]":
    """The engine's plans: those of a sweep's choices, or those that the user named."""
    from kvpolicy.lab.sweep.grid import build_cells
    from kvpolicy.lab.sweep.prepare import load_series

    overrides = given.pop("overrides")
    rows = {"budgets": [sizes["budget"]], "buffer": sizes["buffer"]}
    if choices:
        series = [choice.plan for choice in choices if choice.plan is not None]
    else:
        series = load_series(given.pop("preset"), **given, **rows)
    return build_cells(series, num_layers=num_layers, overrides=overrides, **rows)


# Results


def _tell_missing(missing: "Sequence[Missing]") -> None:
    """Say what is missing; the status of the command says whether something has failed."""
    failed = [", ".join(one.job) for one in missing if one.failed]
    if num_left_out := len(missing) - len(failed):
        info(f"{num_left_out} measurements were left out; the same command tries them again")
    if failed:
        info(f"failed: {'; '.join(failed)}; the same command tries again")
        raise typer.Exit(SOME_FAILED)


def _plain(choice: "Choice") -> dict[str, Any]:
    plain = attrs.asdict(choice)
    return plain | {"plan": None if choice.plan is None else choice.plan.plan}


def _print_results(
    record: Mapping[str, Any], table: str, output: Path | None, *, json: bool
) -> None:
    from kvpolicy.lab.bench.rounds.turn_file import RESULT

    if output is not None:
        atomic_write(output / RESULT, jsonlib.dumps(record, indent=2) + "\n")
    if json:
        print_json(record, indent=2)
    else:
        print_text(table + "\n")
