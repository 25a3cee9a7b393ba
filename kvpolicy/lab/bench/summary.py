"""Results of a benchmark over all complete rounds."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median

import attrs
import numpy as np

from kvpolicy.lab.bench.baselines import GENERATE
from kvpolicy.lab.bench.bench import Turn, Workload
from kvpolicy.lab.bench.contender import Contender, Measurement

_NUM_POINTS = 64  # of a curve


@attrs.frozen
class Ratio:
    """A ratio of speeds within a round.

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
    """Result of one contender.

    Attributes:
        name: The contender.
        policy: Policy that gives it its colour in figures; empty for none.
        budget: Rows that stay; ``None`` if nothing is evicted.
        decode_tok_s: Decoded tokens per second of all sequences, median over rounds.
        prefill_tok_s: Prompt tokens per second without padding; ``None`` without a prefill.
        step_ms: Median milliseconds of a decode step, median over rounds.
        step_p95_ms: 95th percentile of the milliseconds of a decode step, median over rounds.
        ratio: Decode speed relative to ``generate``; ``None`` if that was not measured.
        baseline: Contender with the same policy in another library; ``None`` if there is none.
        baseline_ratio: Decode speed relative to that contender.
        policy_share: Share of the decode time spent on policies; ``None`` if not measured.
        kv_bytes: Peak bytes of the cache.
        limit_share: Speed relative to reading weights, keys and values at the memory's
            bandwidth; ``None`` if the bandwidth is not known.
        rounds: Tokens per second in each round.
        curve: Tokens generated so far, and median milliseconds of a step there.
    """

    name: str
    policy: str
    budget: float | None
    decode_tok_s: float
    prefill_tok_s: float | None
    step_ms: float
    step_p95_ms: float
    ratio: Ratio | None
    baseline: str | None
    baseline_ratio: Ratio | None
    policy_share: float | None
    kv_bytes: int
    limit_share: float | None
    rounds: tuple[float, ...]
    curve: tuple[tuple[float, float], ...]


def summarize(
    turns: Sequence[Turn],
    contenders: Sequence[Contender],
    workload: Workload,
    *,
    weight_bytes: int = 0,
    bandwidth_gb_s: float | None = None,
) -> list[BenchResult]:
    """Summarize all complete rounds.

    Args:
        turns: What was measured, in the order of `kvpolicy.lab.bench.bench.measure`.
        contenders: The contenders.
        workload: The work of each.
        weight_bytes: Bytes of weights that every decode step reads.
        bandwidth_gb_s: Bandwidth of the memory in GB/s, if known.

    Returns:
        One result for each contender, in order; none if no round is complete.
    """
    size = len(contenders)
    rounds = [dict(turns[end - size : end]) for end in range(size, len(turns) + 1, size)]
    if not rounds:
        return []
    prompt_tokens = sum(map(len, workload.prompts(vocab_size=1)))

    def limit_share(measured: Measurement) -> float | None:
        if bandwidth_gb_s is None:
            return None
        read_bytes = weight_bytes * len(measured.steps_s) + measured.read_bytes
        return read_bytes / (bandwidth_gb_s * 1e9) / sum(measured.steps_s)

    def result(contender: Contender) -> BenchResult:
        measured = [found[contender.name] for found in rounds]
        speeds = tuple(workload.batch / one.mean_step_s for one in measured)
        return BenchResult(
            name=contender.name,
            policy=contender.policy,
            budget=contender.budget,
            decode_tok_s=median(speeds),
            prefill_tok_s=_median(
                None if one.prefill_s is None else prompt_tokens / one.prefill_s for one in measured
            ),
            step_ms=median(_percentile_ms(one, 50) for one in measured),
            step_p95_ms=median(_percentile_ms(one, 95) for one in measured),
            ratio=_ratio(contender.name, GENERATE, rounds),
            baseline=contender.baseline,
            baseline_ratio=_ratio(contender.name, contender.baseline, rounds),
            policy_share=_median(one.policy_share for one in measured),
            kv_bytes=max(one.kv_bytes for one in measured),
            limit_share=_median(map(limit_share, measured)),
            rounds=speeds,
            curve=_curve(measured),
        )

    return [result(contender) for contender in contenders]


def _ratio(
    name: str, other: str | None, rounds: Sequence[Mapping[str, Measurement]]
) -> Ratio | None:
    """Speed of one contender relative to another; ``None`` if the other was not measured."""
    if other is None or other not in rounds[0]:
        return None
    ratios = [one[other].mean_step_s / one[name].mean_step_s for one in rounds]
    return Ratio(median(ratios), min(ratios), max(ratios))


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
