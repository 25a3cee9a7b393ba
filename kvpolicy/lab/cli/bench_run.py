"""Runs ``kvpolicy bench``: workloads, jobs in turns, diagnostics, and their progress."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import attrs
import torch
from transformers import PreTrainedModel

from kvpolicy.cli.output import Progress, info
from kvpolicy.errors import KVPolicyError, error_summary
from kvpolicy.lab.bench.contenders.contender import Contender, Measurement
from kvpolicy.lab.bench.contenders.rivals.rival import Rival, Room
from kvpolicy.lab.bench.diagnostics.checks import check_compactions, check_tokens
from kvpolicy.lab.bench.diagnostics.kernels import Kernels, kernels_of
from kvpolicy.lab.bench.diagnostics.launches import Launches, launches_alone, launches_under
from kvpolicy.lab.bench.diagnostics.memory import Reading, measure_memory
from kvpolicy.lab.bench.diagnostics.prompt_kernels import PromptKernels, prompt_kernels_of
from kvpolicy.lab.bench.models import Shape, random_model
from kvpolicy.lab.bench.operating_points.largest_batch import LARGEST, largest_batch
from kvpolicy.lab.bench.roofline import Machine, ModelSize, least_step_s
from kvpolicy.lab.bench.rounds.summary import complete_rounds
from kvpolicy.lab.bench.rounds.time_limit import TimeLimit
from kvpolicy.lab.bench.rounds.turn_file import TurnFile
from kvpolicy.lab.bench.rounds.turns import Job, Missing, Turn, jobs_of, measure
from kvpolicy.lab.bench.workload import Decode, Prefill, Text, Workload
from kvpolicy.lab.sweep.grid import Cell

_PROFILED = 8  # steps: the engine takes as many at a time on a GPU
_START_S = 90  # of another engine

# Starts contenders that run until its block ends.
Starting = AbstractContextManager[Sequence[Contender]]


def workloads_of(mode: str, sizes: Mapping[str, Any], seed: int) -> list[Workload]:
    """The workloads; at the largest batch, each contender gets its own later."""
    batch, lengths, steps = sizes["batch"], sizes["lengths"], sizes["steps"]
    if mode == "text":
        prompts = sizes["prompt_min"], sizes["prompt_max"]
        return [Text(batch, *prompts, sizes["new_tokens"], seed)]
    if mode == "gpu":
        return _workloads_of_gpu(lengths[0], steps, sizes["prefill"], sizes["batches"], seed)
    if mode == "max_batch":
        return [Decode(1, lengths[0], steps, seed, LARGEST)]
    return [Decode(batch, held, steps, seed) for held in lengths]


def _workloads_of_gpu(
    held: int, steps: int, prompts: Sequence[int], batches: Sequence[int], seed: int
) -> list[Workload]:
    """What matters most comes first, should the time be up."""

    def at(batch: int, name: str = "") -> Decode:
        name = name or f"batch {batch}"
        return Decode(batch, held, steps, seed, name, compacts_all=False, profiled=_PROFILED)

    fixed = [at(batch) for batch in batches]
    brought_in = [Prefill(num, seed=seed) for num in prompts]
    return [*fixed[:1], *brought_in[:1], *fixed[1:], *brought_in[1:], at(1, LARGEST)]


@contextmanager
def starting_rivals(
    rivals: Sequence[tuple[Rival, Path]],
    model: PreTrainedModel,
    forms: Sequence[str],
    room: Room,
    time_limit: TimeLimit | None,
) -> Iterator[Sequence[Contender]]:
    """Start other engines, each with its interpreter; they run until the block ends."""
    found: list[Contender] = []
    with ExitStack() as stack:
        for rival, python in rivals:
            if time_limit is not None and time_limit.left_s < _START_S:
                left = f"{time_limit.left_s:.0f} s are left, and it takes {_START_S} to start"
                info(f"{rival.name} is left out: {left}; give more --minutes.")
                continue
            info(f"starting {rival.name} of {python}")
            if model.device.type == "cuda":
                torch.cuda.empty_cache()
            found += stack.enter_context(rival.started(model, python, room, forms=forms))
        yield found


def room_for(
    works: Sequence[Workload], limit_bytes: float, sizes: Mapping[str, Any], row_bytes: float
) -> Room:
    """What another engine must have room for: the largest work."""

    def tokens(work: Workload) -> int:
        if isinstance(work, Decode):
            return work.held + 2 * sizes["steps"] + 64
        return work.num_tokens if isinstance(work, Prefill) else work.prompt_max + work.new_tokens

    longest = max(map(tokens, works))
    batch = max(work.batch for work in works)
    needed = max(work.batch * tokens(work) for work in works) * row_bytes
    if any(work.name == LARGEST for work in works):
        needed = limit_bytes
        batch = max(batch, int(limit_bytes / (longest * row_bytes)))
    return Room(round(needed), longest, batch)


@attrs.frozen
class Rules:
    """How contenders are run in turns.

    Attributes:
        rounds: Number of rounds.
        size: Size of the model.
        most_bytes: The most bytes of keys and values at the largest batch.
        time_limit: Leaves out what would take too long; ``None``: nothing is left out.
        goes_on: Whether what raises or does not fit is left out, and others are measured.
    """

    rounds: int
    size: ModelSize
    most_bytes: float
    time_limit: TimeLimit | None = None
    goes_on: bool = False

    def reason_against(self, job: Job) -> str | None:
        """Why a job is left out; ``None``: it is measured."""
        work = job.work
        if self.goes_on and isinstance(work, Decode) and job.contender.has_cache:
            row_bytes = self.size.row_bytes
            if largest_batch(job.contender, work, self.most_bytes, row_bytes) < work.batch:
                return "does not fit into the memory"
        return None if self.time_limit is None else self.time_limit.reason_against(job)


@attrs.define
class Outcome:
    """What came of running contenders in turns.

    Attributes:
        jobs: What was measured in the round in which most was.
        missing: What was left out or has failed.
        interruption: What an interruption has left; ``None`` if there was none.
    """

    jobs: list[Job] = attrs.field(factory=list)
    missing: list[Missing] = attrs.field(factory=list)
    interruption: str | None = None


def failed_checks(
    device: torch.device, cells: Sequence[Cell], *, num_compactions: int
) -> list[Missing]:
    """Check the kernels of a device; what fails is told at once, and the others are checked."""
    compacts = partial(check_compactions, device, repeats=num_compactions)
    checks: list[tuple[tuple[str, str], Callable[[], None]]] = [
        *(((cell.series, "tokens"), partial(check_tokens, device, [cell])) for cell in cells),
        ((str(device), "compactions"), compacts),
    ]
    failed = []
    for name, check in checks:
        try:
            check()
        except Exception as error:  # whatever breaks on another device
            reason = str(error) if isinstance(error, KVPolicyError) else error_summary(error)
            info(f"check of {', '.join(name)}: failed, {reason}")
            failed.append(Missing(0, name, reason, failed=True))
    return failed


def run_in_turns(
    groups: Sequence[tuple[Sequence[Contender], Starting]],
    works: Sequence[Workload],
    turns: TurnFile,
    rules: Rules,
) -> Outcome:
    """Run each group of contenders in turns.

    Raises:
        KVPolicyError: There is nothing to run, because nobody can hold one sequence.
    """
    outcome, all_jobs = Outcome(), list[Job]()
    for contenders, starting in groups:
        with starting as started:
            all_jobs += (jobs := _jobs([*contenders, *started], works, turns, rules))
            if jobs:
                _run_turns(jobs, turns, rules, outcome)
            if outcome.interruption:
                break
    if not all_jobs:
        msg = "no contender can hold one sequence; raise --memory-limit or lower --lengths."
        raise KVPolicyError(msg)
    return outcome


def _jobs(
    contenders: Sequence[Contender], works: Sequence[Workload], turns: TurnFile, rules: Rules
) -> list[Job]:
    """What to run in each round; at the largest batch, each contender has its own."""
    jobs = []
    for job in jobs_of(contenders, works):
        contender, work = job.contender, job.work
        if not isinstance(work, Decode) or work.label != LARGEST:
            jobs.append(job)
        elif contender.has_cache:
            most_bytes = rules.most_bytes
            batch = turns.batch_of(job.name) or largest_batch(
                contender, work, most_bytes, rules.size.row_bytes
            )
            if batch:
                jobs.append(attrs.evolve(job.at(batch), most_bytes=most_bytes))
            else:
                info(f"{contender.name} cannot hold one sequence; it is left out.")
    return jobs


def _run_turns(jobs: Sequence[Job], turns: TurnFile, rules: Rules, outcome: Outcome) -> None:
    """Run all jobs in turns; each turn is stored and printed as it ends."""
    job_of = {job.name: job for job in jobs}
    done = {turn.key for turn in turns.turns if turn.job in job_of}
    machine: Machine | None = None

    def know(turn: Turn) -> None:
        nonlocal machine
        machine = turn.measured.machine or machine
        if rules.time_limit is not None:
            rules.time_limit.learn(job_of[turn.job], turn.measured)

    def keep(found: Turn | Missing) -> None:
        if isinstance(found, Turn):
            turns.add(found)
            know(found)
        else:
            outcome.missing.append(found)

    def describe(found: Turn | Missing) -> str:
        start = f"round {found.round + 1}, {', '.join(found.job)}: "
        if isinstance(found, Missing):
            return f"{start}{'failed' if found.failed else 'left out'}, {found.reason}"
        job = job_of[found.job]
        limit = machine if job.contender.has_limit else None
        return start + describe_turn(found.measured, job.work, limit, rules.size)

    for turn in turns.turns:
        if turn.key in done:
            know(turn)
    measured = measure(
        jobs,
        rounds=rules.rounds,
        done=done,
        leave_out=rules.reason_against,
        goes_on=rules.goes_on,
    )
    total = rules.rounds * len(jobs)
    is_complete = _collect(measured, keep, total, describe, num_done=len(done))
    by_round: dict[int, set[tuple[str, str]]] = {}
    for turn in turns.turns:
        by_round.setdefault(turn.round, set()).add(turn.job)
    mine = [job for job in jobs if job.name in max(by_round.values(), key=len, default=())]
    outcome.jobs += mine
    if not is_complete:
        num_complete = len(complete_rounds(turns.turns, mine))
        outcome.interruption = (
            f"interrupted; {num_complete} of {rules.rounds} rounds were complete and count."
        )


def describe_turn(
    measured: Measurement, work: Workload, machine: Machine | None, size: ModelSize
) -> str:
    """The line of one turn."""
    seconds = measured.mean_step_s
    if isinstance(work, Prefill):
        return f"{seconds:.3g} s, {work.batch * work.num_tokens / seconds:,.0f} tokens/s"
    parts = [f"{1e3 * seconds:.3g} ms per step, {measured.batch / seconds:,.0f} tokens/s"]
    if work.name == LARGEST:
        parts.insert(0, f"batch {measured.batch}")
    if machine is not None:
        least = least_step_s(machine, size, measured.batch, measured.read_bytes)
        parts.append(f"{least / seconds:.0%} of the limit")
    if measured.profile is not None:
        parts.append(f"{measured.profile.launches:,.0f} launches")
    return ", ".join(parts)


def count_launches(model: PreTrainedModel, cells: Sequence[Cell], work: Workload) -> list[Launches]:
    """What a step asks of a device: the model alone, and the engine under each plan.

    Nothing if the model has no weights in memory.
    """
    assert isinstance(work, Decode), "the mode has no texts"
    if model.device.type == "meta":
        return []
    return [launches_alone(model, work), *(launches_under(model, cell, work) for cell in cells)]


def count_kernels(model: PreTrainedModel, cells: Sequence[Cell], work: Workload) -> list[Kernels]:
    """What a GPU launches in a step under each plan."""
    assert isinstance(work, Decode), "the mode has no texts"
    return [kernels_of(model, cell, work) for cell in cells]


def count_prompts(shape: Shape, cells: Sequence[Cell], dtype: str) -> list[PromptKernels]:
    """What a GPU launches for a chunk of a prompt under each plan.

    Args:
        shape: That of the model, whose number of layers does not matter.
        cells: The plans, for a model of any number of layers.
        dtype: Precision of its weights.
    """

    def model(num_layers: int, positions: int) -> PreTrainedModel:
        other = attrs.evolve(shape, num_layers=num_layers)
        return random_model(other, 0, max_positions=positions, dtype=dtype, device="meta")

    return [prompt_kernels_of(model, cell) for cell in cells]


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
                keep(one)  # first of all: what is stored is not lost
                progress.log(format_line(one))
                progress.update("", number)
        except KeyboardInterrupt:
            return False
    return True
