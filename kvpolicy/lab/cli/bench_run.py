"""Runs ``kvpolicy bench``: workloads, jobs in turns, diagnostics, and their progress."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cli.output import Progress, info
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import Contender
from kvpolicy.lab.bench.contenders.vllm import vllm_contender
from kvpolicy.lab.bench.diagnostics.launches import Launches, launches_alone, launches_under
from kvpolicy.lab.bench.diagnostics.memory import Reading, measure_memory
from kvpolicy.lab.bench.models import kv_row_bytes
from kvpolicy.lab.bench.operating_points.best_batch import best_batch
from kvpolicy.lab.bench.rounds.summary import complete_rounds
from kvpolicy.lab.bench.rounds.turn_file import TurnFile
from kvpolicy.lab.bench.rounds.turns import Job, Turn, jobs_of, measure
from kvpolicy.lab.bench.workload import Decode, Text, Workload
from kvpolicy.lab.sweep.grid import Cell

GPU_BATCHES = (1, 8, 32)  # besides the best one

# Starts contenders that run until its block ends.
Starting = AbstractContextManager[Sequence[Contender]]


def workloads_of(mode: str, sizes: Mapping[str, Any], seed: int) -> list[Workload]:
    """The workloads; those of --max-batch and --gpu get each contender's own batch later."""
    batch, lengths, steps = sizes["batch"], sizes["lengths"], sizes["steps"]
    if mode == "text":
        prompts = sizes["prompt_min"], sizes["prompt_max"]
        return [Text(batch, *prompts, sizes["new_tokens"], seed)]
    if mode == "gpu":
        batches = [Decode(one, lengths[0], steps, seed, f"batch {one}") for one in GPU_BATCHES]
        return [*batches, Decode(1, lengths[0], steps, seed, "best batch")]
    if mode == "max_batch":
        return [Decode(1, lengths[0], steps, seed, "best batch")]
    return [Decode(batch, held, steps, seed) for held in lengths]


@contextmanager
def starting_vllm(
    model: PreTrainedModel,
    python: Path,
    works: Sequence[Workload],
    limit_bytes: float,
    sizes: Mapping[str, Any],
) -> Iterator[Sequence[Contender]]:
    """Start vLLM with memory for the largest work; it runs until the block ends."""
    info(f"starting vLLM of {python}")
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    has_own_batch = any(work.name == "best batch" for work in works)
    longest = model.config.max_position_embeddings
    rows = max(
        work.batch * (longest if isinstance(work, Text) else work.held + 2 * sizes["steps"] + 64)
        for work in works
    )
    needed = limit_bytes if has_own_batch else rows * kv_row_bytes(model)
    with vllm_contender(model, python, kv_bytes=round(needed), most_tokens=longest) as contender:
        yield [contender]


def run_in_turns(
    mode: str,
    groups: Sequence[tuple[Sequence[Contender], Starting]],
    works: Sequence[Workload],
    limit_bytes: float,
    turns: TurnFile,
    rounds: int,
) -> tuple[list[Job], str | None]:
    """Run each group of contenders in turns: the jobs, and what an interruption has left."""
    jobs: list[Job] = []
    for contenders, starting in groups:
        with starting as started:
            of_group = _jobs(mode, [*contenders, *started], works, limit_bytes, turns)
            jobs += of_group
            if interruption := _run_turns(of_group, turns, rounds):
                return jobs, interruption
    return jobs, None


def _jobs(
    mode: str,
    contenders: Sequence[Contender],
    works: Sequence[Workload],
    limit_bytes: float,
    turns: TurnFile,
) -> list[Job]:
    """What to run in each round; searches best batches that are not known yet."""
    if mode not in ("max_batch", "gpu"):
        return jobs_of(contenders, works)
    *fixed, best = works
    jobs = jobs_of(contenders, fixed)
    with_cache = [one for one in contenders if one.has_cache and one.supports(best)]
    for contender in with_cache:
        batch = _best_batch(contender, best, limit_bytes, turns)  # type: ignore[arg-type]
        if batch is None:
            info(f"{contender.name} cannot hold one sequence; it is left out.")
        else:
            jobs.append(Job(contender, attrs.evolve(best, batch=batch)))
    if not jobs:
        msg = "no contender can hold one sequence; raise --memory-limit or lower --lengths."
        raise KVPolicyError(msg)
    return jobs


def _best_batch(
    contender: Contender, work: Decode, limit_bytes: float, turns: TurnFile
) -> int | None:
    if contender.name not in turns.batches:
        name = contender.name
        info(f"searching the best batch of {name}")
        found = best_batch(contender, work, limit_bytes, lambda line: info(f"{name}, {line}"))
        turns.add_batch(name, found)
    return turns.batches[contender.name]


def _run_turns(jobs: Sequence[Job], turns: TurnFile, rounds: int) -> str | None:
    """Run all jobs in turns; returns what an interruption has left, if there was one."""
    batch_of = {job.name: job.work.batch for job in jobs}
    done = {turn.key for turn in turns.turns if turn.job in batch_of}

    def format_turn(turn: Turn) -> str:
        name, work = turn.job
        speed = batch_of[turn.job] / turn.measured.mean_step_s
        return f"round {turn.round + 1}, {name}, {work}: {speed:.0f} tokens/s"

    measured = measure(jobs, rounds=rounds, done=done)
    if _collect(measured, turns.add, rounds * len(jobs), format_turn, num_done=len(done)):
        return None
    num_complete = len(complete_rounds(turns.turns, jobs))
    return f"interrupted; {num_complete} of {rounds} rounds were complete and count."


def count_launches(model: PreTrainedModel, cells: Sequence[Cell], work: Workload) -> list[Launches]:
    """What a step asks of a device: the model alone, and the engine under each plan."""
    assert isinstance(work, Decode), "the mode has no texts"
    return [launches_alone(model, work), *(launches_under(model, cell, work) for cell in cells)]


def track_memory(
    model: PreTrainedModel, cells: Sequence[Cell], sizes: Mapping[str, Any], seed: int
) -> tuple[list[Reading], str | None]:
    """Generate a long text under each plan; also returns what an interruption has left."""
    readings: list[Reading] = []
    lengths = sizes["lengths"]
    text = Text(1, sizes["prompt_min"], sizes["prompt_max"], max(lengths), seed)
    prompt = text.prompts(model.config.vocab_size)[0]
    measured = chain.from_iterable(measure_memory(model, cell, prompt, lengths) for cell in cells)
    total = len(lengths) * len(cells)

    def format_reading(reading: Reading) -> str:
        return f"{reading.name}: {reading.new_tokens:,} tokens"

    if _collect(measured, readings.append, total, format_reading):
        return readings, None
    return readings, f"interrupted; {len(readings)} of {total} readings were taken and are shown."


def _collect(
    measured: Iterable[Any],
    keep: Callable[[Any], None],
    total: int,
    format_line: Callable[[Any], str],
    *,
    num_done: int = 0,
) -> bool:
    """Collect measurements and show progress.

    Args:
        measured: Measures while it is iterated over.
        keep: Receives each measurement.
        total: Number of measurements.
        format_line: The line to print for a measurement.
        num_done: How many of them were there before.

    Returns:
        Whether all were collected; if not, the user has pressed Ctrl-C.
    """
    with Progress(total, num_done) as progress:
        progress.update("", num_done)
        try:
            for number, one in enumerate(measured, num_done + 1):
                progress.log(format_line(one))
                keep(one)
                progress.update("", number)
        except KeyboardInterrupt:
            return False
    return True
