"""A benchmark under way: prepared, shown as it goes, and what comes of it."""

import json as jsonlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cli.app import Interrupted
from kvpolicy.cli.output import Progress, info, print_json, print_text, terminal_width
from kvpolicy.files import atomic_write
from kvpolicy.lab.bench.bench import Turn, Workload, line_up, measure
from kvpolicy.lab.bench.memory import Reading, watch
from kvpolicy.lab.bench.models import random_model, shape_named, weight_bytes
from kvpolicy.lab.bench.plot import save_bench_plot
from kvpolicy.lab.bench.summary import Memory, standings
from kvpolicy.lab.cli.benchsizes import Sizes
from kvpolicy.lab.cli.benchtables import memory_table, speed_table
from kvpolicy.lab.store.session import describe_session
from kvpolicy.lab.sweep.grid import Cell, build_cells
from kvpolicy.lab.sweep.prepare import choose


@attrs.frozen
class Prepared:
    """A benchmark, ready to run.

    Attributes:
        sizes: How much is done.
        workload: What every contender does.
        model: With random weights.
        cells: The engine's plans.
        dtype: Precision of the model.
        bandwidth_gb_s: What the memory delivers, if it is known.
        session: When and how it was begun, as `describe_session` tells it.
    """

    sizes: Sizes
    workload: Workload
    model: PreTrainedModel
    cells: Sequence[Cell]
    dtype: str
    bandwidth_gb_s: float | None
    session: dict[str, Any]

    @property
    def memory(self) -> Memory | None:
        """What the limit of a step is taken from."""
        if self.bandwidth_gb_s is None:
            return None
        return Memory(weight_bytes(self.model), self.bandwidth_gb_s * 1e9)

    def describe(self) -> dict[str, Any]:
        """Plain data: what was measured, and where."""
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
    wanted: Sizes,
    *,
    preset: str | None,
    policies: Sequence[str],
    plans: Sequence[Path],
    overrides: Sequence[str],
    longest: int,
    seed: int,
    threads: int | None,
    dtype: str,
    device: str,
    bandwidth_gb_s: float | None,
) -> Prepared:
    """Resolve the plans and build the model, in this order: plans are wrong more often.

    Args:
        wanted: How much is done.
        preset: Whose series are run.
        policies: Stacks to run instead.
        plans: Plan files to run.
        overrides: ``--set`` strings.
        longest: Tokens a sequence may have.
        seed: Of weights and prompts.
        threads: Threads of torch; its own choice if not given.
        dtype: Precision of the model.
        device: Where it is.
        bandwidth_gb_s: What the memory delivers, if it is known.

    Raises:
        KVPolicyError: Something does not exist, or does not fit.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    shape = shape_named(wanted.shape)
    chosen = choose(
        preset, policies=policies, plans=plans, budgets=[wanted.budget], buffer=wanted.buffer
    )
    cells = build_cells(
        chosen.series,
        num_layers=shape.num_layers,
        budgets=[wanted.budget],
        buffer=wanted.buffer,
        overrides=overrides,
    )
    model = random_model(shape, seed, max_positions=longest, dtype=dtype, device=device)
    workload = Workload(wanted.batch, wanted.prompt_min, wanted.prompt_max, wanted.new_tokens, seed)
    session = describe_session(["kvpolicy", *sys.argv[1:]], workers=1)
    return Prepared(wanted, workload, model, cells, dtype, bandwidth_gb_s, session)


def race(
    made: Prepared, *, with_generate: bool, output: Path | None, plot: Path | None, json: bool
) -> None:
    """Let all contenders take turns, and show how they did.

    Args:
        made: What is measured.
        with_generate: Whether transformers' ``generate`` takes part.
        output: Where the figures go, too.
        plot: Where the picture goes.
        json: Whether the figures are printed for machines.

    Raises:
        Interrupted: Before the last round was complete; those that were are shown.
    """
    contenders, absent = line_up(made.model, made.cells, with_generate=with_generate)
    for reason in absent.values():
        info(f"{reason}; going on without it.")
    rounds, turns = made.sizes.rounds, list[Turn]()
    vocab_size = made.model.config.vocab_size
    moments = measure(contenders, made.workload, vocab_size, rounds=rounds)
    with Progress(rounds * len(contenders)) as progress:
        progress.update("warming up", 0)
        interrupted = _collect(moments, turns, progress, lambda turn: _said(turn, made.workload))
    found = standings(turns, contenders, made.workload, made.memory)
    if found:
        record = made.describe() | {
            "absent": absent,
            "standings": [attrs.asdict(standing) for standing in found],
        }
        _hand_out(record, speed_table(found, terminal_width()), output, json=json)
        if plot is not None:
            save_bench_plot(found, plot, title=_title(made))
    if interrupted:
        num_complete = len(found[0].rounds) if found else 0
        msg = f"interrupted; {num_complete} of {rounds} rounds were complete and count."
        raise Interrupted(msg)


def watch_memory(made: Prepared, *, output: Path | None, json: bool) -> None:
    """Generate one long text under each plan, and show what was held on the way.

    Args:
        made: What is measured.
        output: Where the figures go, too.
        json: Whether the figures are printed for machines.

    Raises:
        Interrupted: Before the last reading; those that were made are shown.
    """
    lengths, readings = made.sizes.lengths, list[Reading]()
    prompt = made.workload.prompts(made.model.config.vocab_size)[0]
    moments = (
        reading for cell in made.cells for reading in watch(made.model, cell, prompt, lengths)
    )
    total = len(lengths) * len(made.cells)
    with Progress(total) as progress:
        interrupted = _collect(
            moments, readings, progress, lambda one: f"{one.name}: {one.new_tokens:,} tokens"
        )
    if readings:
        record = made.describe() | {"readings": [attrs.asdict(one) for one in readings]}
        _hand_out(record, memory_table(readings, terminal_width()), output, json=json)
    if interrupted:
        msg = f"interrupted; {len(readings)} of {total} readings were made and are shown."
        raise Interrupted(msg)


def _collect(
    moments: Iterable[Any], kept: list[Any], progress: Progress, words: Callable[[Any], str]
) -> bool:
    """Keep what comes; whether the user has had enough before the end."""
    try:
        for moment in moments:
            kept.append(moment)
            progress.log(words(moment))
            progress.update("", len(kept))
    except KeyboardInterrupt:
        return True
    return False


def _said(turn: Turn, workload: Workload) -> str:
    steps = turn.effort.steps_s
    speed = workload.batch * len(steps) / sum(steps)
    return f"round {turn.round + 1}, {turn.name}: {speed:.0f} tokens/s"


def _title(made: Prepared) -> str:
    size, work = made.sizes, made.workload
    return (
        f"{made.model.num_parameters() / 1e6:.3g} M parameters, {made.dtype}, batch {work.batch}, "
        f"prompts of {work.prompt_min}-{work.prompt_max}, budget {size.budget} + {size.buffer}"
    )


def _hand_out(record: dict[str, Any], table: str, output: Path | None, *, json: bool) -> None:
    if output is not None:
        atomic_write(output, jsonlib.dumps(record, indent=2) + "\n")
    if json:
        print_json(record, indent=2)
    else:
        print_text(table + "\n")
