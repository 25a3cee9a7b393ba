"""Results of a benchmark over all complete rounds."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import attrs
import numpy as np

from kvpolicy.lab.bench.contenders.contender import FIRST_PLAN, FORWARD, LIMIT, Measurement
from kvpolicy.lab.bench.profile import StepProfile
from kvpolicy.lab.bench.roofline import ModelSize, least_step_s
from kvpolicy.lab.bench.rounds.turns import Job, Turn
from kvpolicy.lab.bench.workload import Decode, Prefill, Text

_NUM_POINTS = 64  # of a curve

# What was measured in a round, by the names of contender and work.
Round = Mapping[tuple[str, str], Measurement]


@attrs.frozen
class Spread:
    """A quantity over the rounds.

    Attributes:
        median: Median over the rounds.
        low: Minimum over the rounds.
        high: Maximum over the rounds.
    """

    median: float
    low: float
    high: float


@attrs.frozen
class BenchResult:
    """Result of one contender at one work.

    Attributes:
        name: The contender.
        work: The work.
        held: Tokens of each text; ``None`` for whole texts.
        batch: Sequences decoded together.
        policy: Policy that gives it its colour in figures; empty for none.
        budget: Rows that stay; ``None`` if nothing is evicted.
        mean_ms: Mean milliseconds of a decode step, compactions included.
        decode_tok_s: Decoded tokens per second of all sequences, median over rounds.
        prefill_tok_s: Prompt tokens per second without padding; ``None`` without a prefill.
        step_ms: Median milliseconds of a decode step, median over rounds.
        step_p95_ms: 95th percentile of the milliseconds of a decode step, median over rounds.
        ratios: Decode speed relative to other contenders at this work, by what they are called: to
            those of `Contender.references` that were measured.
        policy_cost: Share of a step that the policy takes, by difference to the first plan with as
            many rows: compactions and what attention sums for it included. ``None`` if that was
            not measured.
        policy_share: Share of the decode time spent in policies' own code; ``None`` if not
            measured.
        compactions: Compactions of one sequence in one layer during the measured steps of a
            round, median; ``None`` for contenders that do not count them.
        compacting_ratio: Milliseconds of a step in which any sequence is compacted, relative to one
            without, medians of both; ``None`` if there were not both kinds.
        rows_mean: Rows of keys and values that a sequence attends to, mean over steps.
        kv_bytes: Peak bytes of the cache.
        limit_ms: Least milliseconds of a step over as many rows, by the limit of the machine in the
            same round; ``None`` if that was not measured, or the contender's weights have fewer
            bytes.
        limit_share: These divided by its own milliseconds.
        path: How steps were run: ``"static"``, or ``"eager: REASON"``; empty if that is not known.
        device_bytes: Peak bytes allocated on a GPU; ``None`` without one.
        compile_s: Seconds in which torch compiled before the steps, in the round with most.
        rounds: Tokens per second in each round.
        profile: What a device did in a step, in the last round; ``None`` if that was not asked for.
        curve: Tokens generated so far, and median milliseconds of a step there, of whole texts.
    """

    name: str
    work: str
    held: int | None
    batch: int
    policy: str
    budget: float | None
    mean_ms: Spread
    decode_tok_s: float
    prefill_tok_s: float | None
    step_ms: float
    step_p95_ms: float
    ratios: Mapping[str, Spread]
    policy_cost: Spread | None
    policy_share: float | None
    compactions: float | None
    compacting_ratio: Spread | None
    rows_mean: float
    kv_bytes: int
    limit_ms: float | None
    limit_share: float | None
    path: str
    device_bytes: float | None
    compile_s: float
    rounds: tuple[float, ...]
    profile: StepProfile | None
    curve: tuple[tuple[float, float], ...]


@attrs.frozen
class PrefillResult:
    """Result of one contender at one prompt.

    Attributes:
        name: The contender.
        num_tokens: Tokens of the prompt.
        seconds: Seconds until it is in.
        tok_s: Tokens per second, median over rounds.
        over_forward: Its seconds, divided by those of transformers' forward in the same round;
            ``None`` if that was not measured.
        kv_bytes: Peak bytes of the cache.
        device_bytes: Peak bytes allocated on a GPU; ``None`` without one.
        path: How steps would be run, and why prompts are not fused, see `RunReport.path`; empty if
            that is not known.
    """

    name: str
    num_tokens: int
    seconds: Spread
    tok_s: float
    over_forward: Spread | None
    kv_bytes: int
    device_bytes: float | None
    path: str = ""


def complete_rounds(turns: Iterable[Turn], jobs: Sequence[Job]) -> list[Round]:
    """The rounds in which every job was measured."""
    rounds: dict[int, dict[tuple[str, str], Measurement]] = {}
    for turn in turns:
        rounds.setdefault(turn.round, {})[turn.job] = turn.measured
    names = {job.name for job in jobs}
    return [found for _, found in sorted(rounds.items()) if names <= found.keys()]


def summarize(turns: Iterable[Turn], jobs: Sequence[Job], size: ModelSize) -> list[BenchResult]:
    """Summarize decode steps and whole texts in all complete rounds.

    Args:
        turns: What was measured.
        jobs: The jobs.
        size: Size of the model.

    Returns:
        One result for each job, in order; none if no round is complete.
    """
    rounds = complete_rounds(turns, jobs)
    if not rounds:
        return []

    def result(job: Job) -> BenchResult:
        contender, work = job.contender, job.work
        measured = [found[job.name] for found in rounds]
        batch = measured[0].batch
        speeds = tuple(one.batch / one.mean_step_s for one in measured)
        prompt_tokens = sum(map(len, work.prompts(1))) if isinstance(work, Text) else 0

        def relative_to(other: str) -> Spread:
            """Speed relative to another contender at this work."""
            theirs = [one[other, work.name] for one in rounds]
            found = [one.mean_step_s / one.batch for one in theirs]
            return _spread(speed * step for speed, step in zip(speeds, found, strict=True))

        present = {
            called: other
            for called, other in contender.references.items()
            if (other, work.name) in rounds[0]
        }
        ratios = {called: relative_to(other) for called, other in present.items()}
        first = present.get(FIRST_PLAN)
        is_alike = first is not None and rounds[0][first, work.name].batch == batch
        least_ms = [
            _least_ms(found[job.name], _limit(found, work.name), size)
            if contender.has_limit
            else None
            for found in rounds
        ]

        return BenchResult(
            name=contender.name,
            work=work.name,
            held=work.held if isinstance(work, Decode) else None,
            batch=batch,
            policy=contender.policy,
            budget=contender.budget,
            mean_ms=_spread(one.mean_step_s * 1e3 for one in measured),
            decode_tok_s=median(speeds),
            prefill_tok_s=_median(
                None if one.prefill_s is None else prompt_tokens / one.prefill_s for one in measured
            ),
            step_ms=median(_percentile_ms(one, 50) for one in measured),
            step_p95_ms=median(_percentile_ms(one, 95) for one in measured),
            ratios=ratios,
            policy_cost=_one_minus(ratios[FIRST_PLAN]) if is_alike else None,
            policy_share=_median(one.policy_share for one in measured),
            compactions=_median(one.compactions for one in measured),
            compacting_ratio=_spread_or_none(map(_compacting_ratio, measured)),
            rows_mean=median(_rows_mean(one, size) for one in measured),
            kv_bytes=max(one.kv_bytes for one in measured),
            limit_ms=_median(least_ms),
            limit_share=_median(
                None if least is None else least / (one.mean_step_s * 1e3)
                for least, one in zip(least_ms, measured, strict=True)
            ),
            path=measured[0].path,
            device_bytes=_median(one.device_bytes for one in measured),
            compile_s=max(one.compile_s for one in measured),
            rounds=speeds,
            profile=measured[-1].profile,
            curve=_curve(measured) if isinstance(work, Text) else (),
        )

    return [result(job) for job in jobs if not isinstance(job.work, Prefill)]


def summarize_prefills(turns: Iterable[Turn], jobs: Sequence[Job]) -> list[PrefillResult]:
    """Summarize prefills in all complete rounds; the arguments are those of `summarize`."""
    rounds = complete_rounds(turns, jobs)
    found = []
    for job in jobs if rounds else ():
        contender, work = job.contender, job.work
        if not isinstance(work, Prefill):
            continue
        measured = [one[job.name] for one in rounds]
        forward = contender.references.get(FORWARD, ""), work.name
        over = [
            one[job.name].mean_step_s / one[forward].mean_step_s for one in rounds if forward in one
        ]
        seconds = _spread(one.mean_step_s for one in measured)
        found.append(
            PrefillResult(
                name=contender.name,
                num_tokens=work.num_tokens,
                seconds=seconds,
                tok_s=work.batch * work.num_tokens / seconds.median,
                over_forward=_spread_or_none(over),
                kv_bytes=max(one.kv_bytes for one in measured),
                device_bytes=_median(one.device_bytes for one in measured),
                path=measured[-1].path,
            )
        )
    return found


def _limit(found: Round, work: str) -> Measurement | None:
    """The limit of the machine in a round: at a work, or at any."""
    limits = {of_work: one for (name, of_work), one in found.items() if name == LIMIT}
    return limits.get(work) or next(iter(limits.values()), None)


def _rows_mean(measured: Measurement, size: ModelSize) -> float:
    """Rows that a sequence attends to."""
    if measured.rows_mean is not None:
        return measured.rows_mean
    return measured.read_bytes / size.row_bytes / measured.batch


def _least_ms(measured: Measurement, limit: Measurement | None, size: ModelSize) -> float | None:
    """Least milliseconds of a step over as many rows."""
    if limit is None or limit.machine is None:
        return None
    return least_step_s(limit.machine, size, measured.batch, measured.read_bytes) * 1e3


def _compacting_ratio(measured: Measurement) -> float | None:
    """Time of a step that compacts, relative to one that does not."""
    pairs = list(zip(measured.steps_s, measured.compacted or (), strict=False))
    with_any = [step_s for step_s, compacted in pairs if compacted]
    without = [step_s for step_s, compacted in pairs if not compacted]
    return median(with_any) / median(without) if with_any and without else None


def _one_minus(spread: Spread) -> Spread:
    return Spread(1 - spread.median, 1 - spread.high, 1 - spread.low)


def _spread_or_none(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return _spread(known) if known else None


def _spread(values: Iterable[float]) -> Spread:
    known = list(values)
    return Spread(median(known), min(known), max(known))


def _median(values: Iterable[float | None]) -> float | None:
    """Median of values that are all known or all unknown."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _percentile_ms(measured: Measurement, percent: int) -> float:
    return float(np.percentile(measured.steps_s, percent)) * 1e3


def _curve(measured: Sequence[Measurement]) -> tuple[tuple[float, float], ...]:
    """Median step times in equal parts of the text, over all rounds."""
    times = np.array([one.steps_s for one in measured])  # [rounds, steps]
    num_steps = times.shape[1]
    edges = np.linspace(0, num_steps, min(_NUM_POINTS, num_steps) + 1).round().astype(int)
    return tuple(
        # The first measured step gives the third token.
        ((first + last - 1) / 2 + 3, float(np.median(times[:, first:last])) * 1e3)
        for first, last in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    )
