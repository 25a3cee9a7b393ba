"""How the contenders of a benchmark did, over all rounds that are complete."""

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from statistics import median

import attrs
import numpy as np

from kvpolicy.lab.bench.baselines import GENERATE
from kvpolicy.lab.bench.bench import Turn, Workload
from kvpolicy.lab.bench.contender import Contender, Effort

_POINTS = 64  # of a curve


@attrs.frozen
class Ratio:
    """A speed by somebody else's in the same round.

    Attributes:
        median: Over the rounds.
        low: The least.
        high: The greatest.
    """

    median: float
    low: float
    high: float


@attrs.frozen
class BenchResult:
    """How one contender did.

    Attributes:
        name: The contender.
        budget: Rows that stay; ``None`` if everything does.
        decode_tok_s: Tokens per second of all sequences while decoding, median over rounds.
        prefill_tok_s: Prompt tokens per second, pads not counted; ``None`` without prompts.
        step_ms: Median time of a decode step.
        step_p95_ms: What 95 of 100 steps do not exceed; median over rounds, as the one above.
        ratio: Speed of decoding by ``generate``'s; ``None`` if that took no part.
        rival: Who has the same policy in another library; ``None``: nobody here.
        rival_ratio: Speed of decoding by the rival's.
        policy_share: Part of the decode time spent on policies; ``None`` if not known.
        kv_bytes: Bytes of the cache at its largest.
        limit_share: Speed by that at which memory could deliver weights, keys and values;
            ``None`` if its bandwidth is not known.
        rounds: Tokens per second in each round.
        curve: Tokens generated so far, and median time of a step there in milliseconds.
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
class Memory:
    """What the limit of a memory-bound decode step is taken from.

    Attributes:
        weight_bytes: Bytes of weights that every step reads.
        bytes_per_s: What the memory delivers.
    """

    weight_bytes: int
    bytes_per_s: float

    def share(self, effort: Effort) -> float:
        """How near to the limit steps came: the least time that they could take by theirs."""
        read = self.weight_bytes * len(effort.steps_s) + effort.read_bytes
        return read / self.bytes_per_s / sum(effort.steps_s)


def standings(
    turns: Sequence[Turn],
    contenders: Sequence[Contender],
    workload: Workload,
    memory: Memory | None = None,
) -> list[BenchResult]:
    """Sum up all complete rounds.

    Args:
        turns: What was measured.
        contenders: Who takes part.
        workload: What each did.
        memory: What the limit is taken from, if it is wanted.

    Returns:
        One standing for each contender, in order; none if no round is complete.
    """
    rounds: dict[int, dict[str, Effort]] = {}
    for turn in turns:
        rounds.setdefault(turn.round, {})[turn.name] = turn.effort
    complete = [found for found in rounds.values() if len(found) == len(contenders)]
    return [_standing(one, complete, workload, memory) for one in (contenders if complete else [])]


def _standing(
    contender: Contender,
    rounds: Sequence[Mapping[str, Effort]],
    workload: Workload,
    memory: Memory | None,
) -> BenchResult:
    mine = [found[contender.name] for found in rounds]
    speeds = tuple(workload.batch / _mean_s(effort) for effort in mine)
    prompt_tokens = sum(map(len, workload.prompts(vocab_size=1)))
    prefills = [prompt_tokens / one.prefill_s for one in mine if one.prefill_s is not None]
    shares = [one.policy_share for one in mine if one.policy_share is not None]
    rival = contender.rival
    return BenchResult(
        name=contender.name,
        budget=contender.budget,
        decode_tok_s=median(speeds),
        prefill_tok_s=median(prefills) if prefills else None,
        step_ms=median(_percentile_ms(one, 50) for one in mine),
        step_p95_ms=median(_percentile_ms(one, 95) for one in mine),
        ratio=_ratio(contender.name, GENERATE, rounds),
        rival=rival,
        rival_ratio=_ratio(contender.name, rival, rounds),
        policy_share=median(shares) if shares else None,
        kv_bytes=max(one.kv_bytes for one in mine),
        limit_share=None if memory is None else median(memory.share(one) for one in mine),
        rounds=speeds,
        curve=_curve(mine),
    )


def _mean_s(effort: Effort) -> float:
    return sum(effort.steps_s) / len(effort.steps_s)


def _percentile_ms(effort: Effort, percent: int) -> float:
    return float(np.percentile(effort.steps_s, percent)) * 1e3


def _ratio(name: str, other: str | None, rounds: Sequence[Mapping[str, Effort]]) -> Ratio | None:
    if other is None or other not in rounds[0]:
        return None
    ratios = [_mean_s(found[other]) / _mean_s(found[name]) for found in rounds]
    return Ratio(median(ratios), min(ratios), max(ratios))


def _curve(efforts: Sequence[Effort]) -> tuple[tuple[float, float], ...]:
    """Times of steps in equal parts of the text, over all rounds."""
    num_steps = len(efforts[0].steps_s)
    edges = np.linspace(0, num_steps, min(_POINTS, num_steps) + 1).round().astype(int).tolist()
    points = []
    for first, last in pairwise(edges):
        times = chain.from_iterable(effort.steps_s[first:last] for effort in efforts)
        # The first step that counts brings the third token.
        points.append(((first + last - 1) / 2 + 3, median(times) * 1e3))
    return tuple(points)
