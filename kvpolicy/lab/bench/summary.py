"""Results of a benchmark over all complete rounds."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Self

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

    @classmethod
    def between(
        cls, name: str, other: str | None, rounds: Sequence[Mapping[str, Measurement]]
    ) -> Self | None:
        """Speed of one contender relative to another; ``None`` if the other was not measured."""
        if other is None or other not in rounds[0]:
            return None
        ratios = [one[other].mean_step_s / one[name].mean_step_s for one in rounds]
        return cls(median(ratios), min(ratios), max(ratios))


@attrs.frozen
class BenchResult:
    """Result of one contender.

    Attributes:
        name: The contender.
        budget: Rows that stay; ``None`` if nothing is evicted.
        decode_tok_s: Decoded tokens per second of all sequences, median over rounds.
        prefill_tok_s: Prompt tokens per second without padding; ``None`` without a prefill.
        step_ms: Median milliseconds of a decode step, median over rounds.
        step_p95_ms: 95th percentile of the milliseconds of a decode step, median over rounds.
        ratio: Decode speed relative to ``generate``; ``None`` if that was not measured.
        rival: Contender with the same policy in another library; ``None`` if there is none.
        rival_ratio: Decode speed relative to the rival.
        policy_share: Share of the decode time spent on policies; ``None`` if not measured.
        kv_bytes: Peak bytes of the cache.
        limit_share: Speed relative to reading weights, keys and values at the memory's
            bandwidth; ``None`` if the bandwidth is not known.
        rounds: Tokens per second in each round.
        curve: Tokens generated so far, and median milliseconds of a step there.
    """

    name: str
    budget: float | None
    decode_tok_s: float
    prefill_tok_s: float | None
    step_ms: float
    step_p95_ms: float
    ratio: Ratio | None
    rival: str | None
    rival_ratio: Ratio | None
    policy_share: float | None
    kv_bytes: int
    limit_share: float | None
    rounds: tuple[float, ...]
    curve: tuple[tuple[float, float], ...]


@attrs.frozen
class MemoryBandwidth:
    """The limit of a decode step that is bound by memory.

    Attributes:
        weight_bytes: Bytes of weights that every step reads.
        bytes_per_s: Bandwidth of the memory.
    """

    weight_bytes: int
    bytes_per_s: float

    def share(self, measured: Measurement) -> float:
        """Minimum time of the steps by bandwidth, divided by their measured time."""
        read = self.weight_bytes * len(measured.steps_s) + measured.read_bytes
        return read / self.bytes_per_s / sum(measured.steps_s)


def summarize(
    turns: Sequence[Turn],
    contenders: Sequence[Contender],
    workload: Workload,
    bandwidth: MemoryBandwidth | None = None,
) -> list[BenchResult]:
    """Summarize all complete rounds.

    Args:
        turns: What was measured.
        contenders: The contenders.
        workload: The work of each.
        bandwidth: Limit to compare with; optional.

    Returns:
        One result for each contender, in order; none if no round is complete.
    """
    rounds: dict[int, dict[str, Measurement]] = {}
    for turn in turns:
        rounds.setdefault(turn.round, {})[turn.name] = turn.measurement
    complete = [found for found in rounds.values() if len(found) == len(contenders)]
    if not complete:
        return []
    return [_result(one, complete, workload, bandwidth) for one in contenders]


def _result(
    contender: Contender,
    rounds: Sequence[Mapping[str, Measurement]],
    workload: Workload,
    bandwidth: MemoryBandwidth | None,
) -> BenchResult:
    measured = [found[contender.name] for found in rounds]
    speeds = tuple(workload.batch / one.mean_step_s for one in measured)
    prompt_tokens = sum(map(len, workload.prompts(vocab_size=1)))
    prefills = [prompt_tokens / one.prefill_s for one in measured if one.prefill_s is not None]
    shares = [one.policy_share for one in measured if one.policy_share is not None]
    return BenchResult(
        name=contender.name,
        budget=contender.budget,
        decode_tok_s=median(speeds),
        prefill_tok_s=median(prefills) if prefills else None,
        step_ms=median(_percentile_ms(one, 50) for one in measured),
        step_p95_ms=median(_percentile_ms(one, 95) for one in measured),
        ratio=Ratio.between(contender.name, GENERATE, rounds),
        rival=contender.rival,
        rival_ratio=Ratio.between(contender.name, contender.rival, rounds),
        policy_share=median(shares) if shares else None,
        kv_bytes=max(one.kv_bytes for one in measured),
        limit_share=(
            None if bandwidth is None else median(bandwidth.share(one) for one in measured)
        ),
        rounds=speeds,
        curve=_curve(measured),
    )


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
