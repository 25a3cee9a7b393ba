"""The engine under one plan, as a contender."""

import sys
import time
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from kvpolicy.engine.engine import Engine, Run
from kvpolicy.engine.extensions.base import Extension
from kvpolicy.engine.limits import Limits
from kvpolicy.engine.step import Step
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.bench.contenders.contender import GENERATE, Contender, Measurement
from kvpolicy.lab.bench.contenders.fill import fill_run
from kvpolicy.lab.bench.contenders.forward import better_of_two
from kvpolicy.lab.bench.profile import profile_steps
from kvpolicy.lab.bench.timing import synchronized_time
from kvpolicy.lab.bench.workload import Decode, Prefill, Text
from kvpolicy.lab.looks import policy_of
from kvpolicy.lab.sweep.grid import Cell

_PROMPT = 4  # tokens that are prefilled before a cache is filled
_WARM_PROMPT = 4096  # tokens: several chunks, with compactions
_WARM = 2  # tokens of a text after its prompt and one decode step
# Steps over a filled cache before those that are measured: the first fills a sequence up, the
# second compacts it, and tokens that are read behind the device follow in the third.
_SETTLING = 3
_ANY_BATCH = sys.maxsize  # slots: a run has as many as requests


def engine_under(
    model: PreTrainedModel,
    cell: Cell,
    *,
    references: Mapping[str, str] | None = None,
    compile: bool = False,
) -> Contender:
    """The engine under one plan.

    Args:
        model: The model.
        cell: The plan.
        references: Names of the contenders with which its speed is compared.
        compile: Whether decode steps are compiled.

    Raises:
        ModelError: The model cannot be compiled here.
    """
    # One for all turns, since an engine compiles its steps for itself.
    engine = Engine(
        model, None, cell.resolved, slots=_ANY_BATCH, compile=compile, extensions=[RowsAttended]
    )

    def decode(work: Decode) -> Measurement:
        run = filled_run(engine, work, steps=_room(engine, work))
        for _ in range(_SETTLING):
            run.step()
        before = run.report
        measured = _measure_steps(run, lambda taken: taken >= work.steps)
        after = run.report
        decode_s = after.decode_s - before.decode_s
        profile = None
        if work.profiled:
            profile = profile_steps(lambda: _take_steps(run, work.profiled), engine.adapter.device)
        return Measurement(
            **measured,
            kv_bytes=after.peak_kv_bytes,
            policy_share=(after.decode_policy_s - before.decode_policy_s) / decode_s,
            profile=profile,
        )

    def text(work: Text) -> Measurement:
        prompts = work.prompts(model.config.vocab_size)
        run = engine.generate(prompts, max_new_tokens=work.new_tokens, stop_ids=())
        warm_up(run)
        measured = _measure_steps(run, lambda _: run.done)
        report = run.report
        return Measurement(
            **measured,
            kv_bytes=report.peak_kv_bytes,
            prefill_s=report.prefill_s,
            policy_share=report.policy_share,
        )

    has_brought_in = False

    def prefill(work: Prefill) -> Measurement:
        nonlocal has_brought_in
        prompts = work.prompts(model.config.vocab_size)
        kv_bytes, path = 0, ""

        def bring_in(num_tokens: int | None = None) -> None:
            nonlocal kv_bytes, path
            some = [prompt[:num_tokens] for prompt in prompts]
            run = engine.generate(some, max_new_tokens=1, stop_ids=())
            run.results()
            kv_bytes, path = run.report.peak_kv_bytes, run.report.path

        if not has_brought_in:  # kernels are compiled, and the model recorded
            bring_in(_WARM_PROMPT)
            has_brought_in = True
        seconds = better_of_two(bring_in, engine.adapter.device)
        return Measurement(
            (seconds,), kv_bytes=kv_bytes, read_bytes=0, prefill_s=seconds, path=path
        )

    def batch_within(work: Decode, num_bytes: float) -> int:
        """As many slots as a server would have in this memory."""
        longest = work.held + _room(engine, work) + _PROMPT
        try:
            limits = Limits.of(
                engine, max_len=longest, max_prompt_len=_PROMPT, kv_memory=int(num_bytes)
            )
        except KVPolicyError:  # no room for one sequence
            return 0
        return limits.num_slots

    buffers = [layer.buffer for layer in cell.resolved.layers if layer.bounded and layer.budget]
    return Contender(
        name=cell.series,
        decode=decode,
        text=text,
        # Only decode steps are compiled.
        prefill=None if compile else prefill,
        batch_within=batch_within,
        budget=cell.budget,
        references={GENERATE: GENERATE} if references is None else references,
        policy=policy_of(cell.resolved.to_dict()),
        period=max(buffers, default=1),
    )


def evicts(cell: Cell) -> bool:
    """Whether a plan ever evicts."""
    return any(layer.bounded and layer.budget for layer in cell.resolved.layers)


def filled_run(engine: Engine, work: Decode, *, steps: int) -> Run:
    """A run in a steady state at which so many steps can be taken, and one more before them."""
    # Nothing is left to the texts' end: the run is dropped in the middle.
    most = work.held + steps + _PROMPT
    short = [prompt[:_PROMPT] for prompt in work.prompts(engine.adapter.vocab_size)]
    run = engine.generate(short, max_new_tokens=most, stop_ids=())
    recorded = run.core.runner.recorded
    if recorded is not None:
        recorded.waits = 0  # a steady state has come that far
    warm_up(run)
    fill_run(run, work.held, seed=work.seed)
    return run


def warm_up(run: Run) -> None:
    """Bring prompts in, and do the first decode step, which warms up the others."""
    run.step()
    while any(len(seq.tokens) < _WARM for seq in run.active):
        run.step()


def _room(engine: Engine, work: Decode) -> int:
    """Steps for which there must be room: some are read behind others, some profiled twice."""
    together = engine.steps_per_read
    profiled = 2 * (work.profiled + together) if work.profiled else 0
    return _SETTLING + work.steps + 2 * together + profiled


def _take_steps(run: Run, least: int) -> int:
    """Take at least so many steps, and return how many they were."""
    num_steps = 0
    while num_steps < least:
        num_active = len(run.active)
        num_steps += max(len(run.step().tokens) // num_active, 1)
    return num_steps


class RowsAttended(Extension):
    """Notes the rows that a step finds, after what was due has left.

    Attributes:
        rows: Rows of all slots in each layer, ``[layers]``.
    """

    rows: np.ndarray

    def before(self, step: Step) -> None:
        """A step is about to run."""
        self.rows = self.cache.rows.sum(axis=1)


def _measure_steps(run: Run, ends: Callable[[int], bool]) -> dict[str, Any]:
    """Take steps until the end: their seconds, compactions, and the bytes that they attend to.

    Where the engine reads tokens after the next step is launched, reading them is the wait for the
    device, and a step lasts from one reading to the next: another wait would be a gap. So the step
    before has ended with a reading.
    """
    device, cache = run.engine.adapter.device, run.cache
    row_bytes = [layer.row_bytes for layer in cache.layers]
    with_rows = [layer.index for layer in cache.layers_with_rows]
    steps_s: list[float] = []
    compacted: list[int] = []
    attended: list[int] = []
    rows: list[float] = []
    reads_behind = run.engine.steps_per_read > 1
    ended = time.perf_counter()
    while not ends(len(steps_s)):
        num_active, before = len(run.active), run.report.compactions
        start = ended if reads_behind else synchronized_time(device)
        events = run.step()
        ended = time.perf_counter() if reads_behind else synchronized_time(device)
        elapsed_s = ended - start
        assert not any(result.error for result in events.results), events.results
        num_steps = max(len(events.tokens) // num_active, 1)
        held = run.extension(RowsAttended).rows
        steps_s += [elapsed_s / num_steps] * num_steps
        # A step attends to the rows before it and to its own.
        for number in range(1, num_steps + 1):
            found = held + number * num_active
            attended.append(int(row_bytes @ found))
            rows.append(found[with_rows].mean() / num_active)
        compacted += [run.report.compactions - before] + [0] * (num_steps - 1)
    return {
        "steps_s": tuple(steps_s),
        "compacted": tuple(compacted),
        "read_bytes": fmean(attended),
        "rows_mean": float(fmean(rows)),
        "path": run.report.path,
    }
