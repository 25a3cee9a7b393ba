"""Running a benchmark: preparation, progress, and tables of results."""

import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cli.app import Interrupted
from kvpolicy.cli.output import (
    Progress,
    format_bytes,
    format_table,
    info,
    print_json,
    print_text,
    terminal_width,
)
from kvpolicy.errors import KVPolicyError
from kvpolicy.files import atomic_write
from kvpolicy.lab.bench.bench import Turn, Workload, build_contenders, measure
from kvpolicy.lab.bench.memory import Reading, measure_memory
from kvpolicy.lab.bench.models import random_model, shape_named, weight_bytes
from kvpolicy.lab.bench.plot import save_bench_plot
from kvpolicy.lab.bench.summary import BenchResult, MemoryBandwidth, Ratio, summarize
from kvpolicy.lab.store.session import describe_session
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.prepare import load_series


@attrs.frozen
class Sizes:
    """Size of a benchmark.

    Attributes:
        shape: Name of the model's shape.
        batch: Sequences decoded together.
        prompt_min: Tokens of the shortest prompt.
        prompt_max: Tokens of the longest prompt.
        new_tokens: Tokens generated for each sequence.
        budget: Rows that stay.
        buffer: Rows that may join.
        rounds: Number of rounds.
        lengths: Numbers of generated tokens at which memory is measured, rising.
    """

    shape: str = "100m"
    batch: int = 8
    prompt_min: int = 64
    prompt_max: int = 256
    new_tokens: int = 2048
    budget: int = 512
    buffer: int = 128
    rounds: int = 5
    lengths: tuple[int, ...] = (1000, 2000, 5000, 10_000, 20_000)


_QUICK = Sizes("tiny", 4, 16, 48, 256, 48, 16, 3, (100, 200, 500))
_LONG = attrs.evolve(Sizes(), shape="5m")  # a whole run of the larger model would take hours


def choose_sizes(*, quick: bool, memory: bool, **given: Any) -> Sizes:
    """Fill sizes that the user left open.

    Args:
        quick: Whether defaults are those of a quick run.
        memory: Whether memory is measured over a long text.
        given: Fields of `Sizes`; ``None`` for those left open.

    Raises:
        KVPolicyError: Two sizes do not go together.
    """
    base = _QUICK if quick else _LONG if memory else Sizes()
    sizes = attrs.evolve(base, **{name: one for name, one in given.items() if one is not None})
    if sizes.prompt_max < sizes.prompt_min:
        msg = f"--prompt-max {sizes.prompt_max} is below --prompt-min {sizes.prompt_min}."
        raise KVPolicyError(msg)
    return sizes


@attrs.frozen
class Benchmark:
    """A benchmark, ready to run.

    Attributes:
        sizes: Its sizes.
        workload: The work of every contender.
        model: A model with random weights.
        cells: The engine's plans.
        dtype: Precision of the model.
        bandwidth_gb_s: Bandwidth of the memory in GB/s, if known.
        session: When and how it was started, as `describe_session` returns it.
    """

    sizes: Sizes
    workload: Workload
    model: PreTrainedModel
    cells: Sequence[Cell]
    dtype: str
    bandwidth_gb_s: float | None
    session: dict[str, Any]

    @property
    def bandwidth(self) -> MemoryBandwidth | None:
        """The limit of a decode step, if the memory's bandwidth is known."""
        if self.bandwidth_gb_s is None:
            return None
        return MemoryBandwidth(weight_bytes(self.model), self.bandwidth_gb_s * 1e9)

    def describe(self) -> dict[str, Any]:
        """Plain data: what is measured, and where."""
        return {
            "workload": attrs.asdict(self.workload),
            "shape": {"name": self.sizes.shape} | attrs.asdict(shape_named(self.sizes.shape)),
            "dtype": self.dtype,
            "device": str(self.model.device),
            "session": self.session,
            "num_parameters": self.model.num_parameters(),
            "weight_bytes": weight_bytes(self.model),
            "bandwidth_gb_s": self.bandwidth_gb_s,
        }


def prepare(
    sizes: Sizes,
    *,
    preset: str | None,
    policies: Sequence[str],
    plans: Sequence[Path],
    overrides: Sequence[str],
    max_positions: int,
    seed: int,
    threads: int | None,
    dtype: str,
    device: str,
    bandwidth_gb_s: float | None,
) -> Benchmark:
    """Resolve the plans, then build the model: an error in a plan shows before the long part.

    Args:
        sizes: Sizes of the benchmark.
        preset: Name or file of the sweep whose policies are run.
        policies: Stacks to run instead.
        plans: Plan files to run.
        overrides: ``--set`` strings.
        max_positions: The most tokens of a sequence.
        seed: Random seed for weights and prompts.
        threads: Threads of torch; by default its own choice.
        dtype: Precision of the model.
        device: Device of the model.
        bandwidth_gb_s: Bandwidth of the memory in GB/s, if known.

    Raises:
        KVPolicyError: A name does not exist, or options do not go together.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    shape = shape_named(sizes.shape)
    series = load_series(
        preset, policies=policies, plans=plans, budgets=[sizes.budget], buffer=sizes.buffer
    )
    cells = build_cells(
        series,
        num_layers=shape.num_layers,
        budgets=[sizes.budget],
        buffer=sizes.buffer,
        overrides=overrides,
    )
    model = random_model(shape, seed, max_positions=max_positions, dtype=dtype, device=device)
    workload = Workload(sizes.batch, sizes.prompt_min, sizes.prompt_max, sizes.new_tokens, seed)
    session = describe_session(["kvpolicy", *sys.argv[1:]], workers=1)
    return Benchmark(sizes, workload, model, cells, dtype, bandwidth_gb_s, session)


def compare_speed(
    benchmark: Benchmark, *, with_generate: bool, output: Path | None, plot: Path | None, json: bool
) -> None:
    """Run all contenders in turns and print the results.

    Args:
        benchmark: The benchmark.
        with_generate: Whether to include transformers' ``generate``.
        output: File for the results, in addition.
        plot: File for the figure.
        json: Whether to print JSON instead of a table.

    Raises:
        Interrupted: Before the last round was complete; the complete ones are printed.
    """
    contenders, absent = build_contenders(
        benchmark.model, benchmark.cells, with_generate=with_generate
    )
    for reason in absent.values():
        info(f"{reason}; it is left out.")
    rounds, turns = benchmark.sizes.rounds, list[Turn]()
    vocab_size = benchmark.model.config.vocab_size
    measured = measure(contenders, benchmark.workload, vocab_size, rounds=rounds)
    with Progress(rounds * len(contenders)) as progress:
        progress.update("warming up", 0)
        interrupted = _collect(
            measured, turns, progress, lambda turn: _format_turn(turn, benchmark.workload)
        )
    found = summarize(turns, contenders, benchmark.workload, benchmark.bandwidth)
    if found:
        record = benchmark.describe() | {
            "absent": absent,
            "standings": [attrs.asdict(result) for result in found],
        }
        _print_results(record, _speed_table(found, terminal_width()), output, json=json)
        if plot is not None:
            save_bench_plot(found, plot, title=_title(benchmark))
    if interrupted:
        num_complete = len(found[0].rounds) if found else 0
        msg = f"interrupted; {num_complete} of {rounds} rounds were complete and count."
        raise Interrupted(msg)


def track_memory(benchmark: Benchmark, *, output: Path | None, json: bool) -> None:
    """Generate one long text under each plan and print memory on the way.

    Args:
        benchmark: The benchmark.
        output: File for the results, in addition.
        json: Whether to print JSON instead of a table.

    Raises:
        Interrupted: Before the last reading; the earlier ones are printed.
    """
    lengths, readings = benchmark.sizes.lengths, list[Reading]()
    prompt = benchmark.workload.prompts(benchmark.model.config.vocab_size)[0]
    measured = (
        reading
        for cell in benchmark.cells
        for reading in measure_memory(benchmark.model, cell, prompt, lengths)
    )
    total = len(lengths) * len(benchmark.cells)
    with Progress(total) as progress:
        interrupted = _collect(
            measured, readings, progress, lambda one: f"{one.name}: {one.new_tokens:,} tokens"
        )
    if readings:
        record = benchmark.describe() | {"readings": [attrs.asdict(one) for one in readings]}
        _print_results(record, _memory_table(readings, terminal_width()), output, json=json)
    if interrupted:
        msg = f"interrupted; {len(readings)} of {total} readings were taken and are shown."
        raise Interrupted(msg)


def _collect(
    measured: Iterable[Any],
    collected: list[Any],
    progress: Progress,
    format_line: Callable[[Any], str],
) -> bool:
    """Collect measurements; returns whether the user interrupted."""
    try:
        for one in measured:
            collected.append(one)
            progress.log(format_line(one))
            progress.update("", len(collected))
    except KeyboardInterrupt:
        return True
    return False


def _format_turn(turn: Turn, workload: Workload) -> str:
    steps = turn.measurement.steps_s
    speed = workload.batch * len(steps) / sum(steps)
    return f"round {turn.round + 1}, {turn.name}: {speed:.0f} tokens/s"


def _title(benchmark: Benchmark) -> str:
    sizes, parameters = benchmark.sizes, benchmark.model.num_parameters() / 1e6
    return (
        f"{parameters:.3g} M parameters, {benchmark.dtype}, batch {sizes.batch}, prompts of "
        f"{sizes.prompt_min}-{sizes.prompt_max}, budget {sizes.budget} + {sizes.buffer}"
    )


def _print_results(record: dict[str, Any], table: str, output: Path | None, *, json: bool) -> None:
    if output is not None:
        atomic_write(output, jsonlib.dumps(record, indent=2) + "\n")
    if json:
        print_json(record, indent=2)
    else:
        print_text(table + "\n")


def _speed_table(found: Sequence[BenchResult], width: int | None) -> str:
    """One row for each contender, and one line for each comparison with a rival."""
    has_ratio = any(one.ratio is not None for one in found)
    headers = ["", "budget", "tok/s", *(["x generate", "least - most"] if has_ratio else [])]
    headers += ["ms/step", "p95", "prefill tok/s", "policy", "KV cache"]
    has_limit = any(one.limit_share is not None for one in found)
    rows = [_speed_row(one) for one in found]
    if has_limit:
        headers.append("of limit")
        shares = ["-" if one.limit_share is None else f"{one.limit_share:.0%}" for one in found]
        rows = [[*row, share] for row, share in zip(rows, shares, strict=True)]
    table = format_table(headers, rows, right=range(1, len(headers)), width=width)
    return "\n".join([table, *filter(None, map(_rival_line, found))])


def _memory_table(readings: Sequence[Reading], width: int | None) -> str:
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
    return format_table(headers, rows, right=range(1, len(headers)), width=width)


def _speed_row(one: BenchResult) -> list[str]:
    ratio = one.ratio
    return [
        one.name,
        "all" if one.budget is None else f"{one.budget:g}",
        f"{one.decode_tok_s:.0f}",
        *([] if ratio is None else [f"{ratio.median:.2f}", _span(ratio)]),
        f"{one.step_ms:.1f}",
        f"{one.step_p95_ms:.1f}",
        "-" if one.prefill_tok_s is None else f"{one.prefill_tok_s:.0f}",
        "-" if one.policy_share is None else f"{one.policy_share:.1%}",
        format_bytes(one.kv_bytes),
    ]


def _rival_line(one: BenchResult) -> str | None:
    ratio = one.rival_ratio
    if ratio is None:
        return None
    return f"{one.name}: {ratio.median:.2f} x {one.rival} ({_span(ratio)})"


def _span(ratio: Ratio) -> str:
    return f"{ratio.low:.2f} - {ratio.high:.2f}"
