"""A short look at a few cells of a comparison, from which it is told how long all may take.

Of each model and task three cells are tried: the one that keeps everything, and those with the
smallest and the largest budget. Each fills its slots as the run would, and is stopped after a few
seconds. A sample that was not finished then may end soon or at the most tokens allowed: so there
are two figures, and they are one where all were finished.
"""

import time
from collections.abc import Container
from statistics import fmean

import attrs

from kvpolicy.lab.models import ModelCache
from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.grid import Cell
from kvpolicy.lab.sweep.group import Group
from kvpolicy.lab.sweep.jobs import Job
from kvpolicy.lab.sweep.serve import Server

_WHOLE_PROBE_S = 60.0  # for all probes together
_PROBE_S = (2.0, 10.0)  # for one of them, at least and at most


@attrs.frozen
class Seconds:
    """A time with what is not known of it.

    Attributes:
        low: If what was not finished ends at once.
        high: If it goes on to the most tokens allowed.
    """

    low: float
    high: float

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.low * factor, self.high * factor)


@attrs.frozen
class Probe:
    """What a short run of one cell said.

    Attributes:
        model: The model, as typed.
        task: The task.
        series: What tables call the plan.
        budget: Its budget; ``None`` if nothing ever leaves.
        num_samples: Samples begun.
        num_finished: How many of them were finished.
        problem: What went wrong with the first sample that failed, if one did.
        new_tokens: Tokens generated.
        elapsed_s: Seconds it took.
        sample_s: Seconds for one sample of such a cell.
    """

    model: str
    task: str
    series: str
    budget: float | None
    num_samples: int
    num_finished: int
    problem: str | None
    new_tokens: int
    elapsed_s: float
    sample_s: Seconds


def representatives(comparison: Comparison, done: Container[str]) -> list[Cell]:
    """The cells that stand for the others.

    Args:
        comparison: What is to be run.
        done: Keys of the samples that are done; where nothing is left, nothing is tried.

    Returns:
        Of each model and task at most three, those of one model side by side.
    """
    found: dict[str, Cell] = {}
    for place in dict.fromkeys(map(place_of, comparison.groups)):
        groups = [group.id for group in comparison.groups if place_of(group) == place]
        cells = [cell for cell in comparison.cells if cell.group in groups]
        if any(comparison.left(cell, done) for cell in cells):
            whole = [cell for cell in cells if cell.budget is None]
            bounded = sorted((c for c in cells if c.budget is not None), key=budget_of)
            chosen = [*whole[:1], *bounded[:1], *bounded[-1:]]
            found |= {cell.id: cell for cell in chosen}
    return list(found.values())


def limit_s_of(num_probes: int) -> float:
    """Seconds for each of so many probes.

    Args:
        num_probes: How many there are.
    """
    least, most = _PROBE_S
    return min(most, max(least, _WHOLE_PROBE_S / max(num_probes, 1)))


def probe(comparison: Comparison, cell: Cell, shelf: ModelCache, limit_s: float) -> Probe:
    """Fill the slots of a cell once, and see how far they come.

    Args:
        comparison: What is to be run.
        cell: One of its cells.
        shelf: Where models come from.
        limit_s: Seconds after which no further token is begun.
    """
    group = comparison.group_of(cell)
    server = Server(*shelf.open(group.model.name), comparison)
    num = min(group.slots, len(group.items))
    trial = server.begin(Job(cell.id, tuple(range(num))))
    run, lengths, finished = trial.run, [0] * num, set()
    problem, begun, elapsed = None, time.perf_counter(), 0.0
    while not run.done and (not elapsed or elapsed < limit_s):
        events = run.step()
        for number, _ in events.tokens:
            lengths[number] += 1
        for result in events.results:
            trial.outcome(result)
            finished.add(result.id)
            problem = problem or result.error
        elapsed = time.perf_counter() - begun
    report = run.report
    most = [
        length if number in finished else run.requests[number].max_new_tokens
        for number, length in enumerate(lengths)
    ]
    token_s = (elapsed - report.prefill_s) / max(report.new_tokens, 1)
    sample_s = [report.prefill_s / num + token_s * fmean(tokens) for tokens in (lengths, most)]
    return Probe(
        model=group.model.name,
        task=group.task.name,
        series=cell.series,
        budget=cell.budget,
        num_samples=num,
        num_finished=len(finished),
        problem=problem,
        new_tokens=report.new_tokens,
        elapsed_s=elapsed,
        sample_s=Seconds(*sample_s),
    )


def place_of(group: Group) -> tuple[str, str]:
    """Model and task: what cells must have in common to stand for each other."""
    return group.model.name, group.task.name


def budget_of(one: Cell | Probe) -> float:
    """The budget of what has one."""
    assert one.budget is not None, "asked of bounded ones only"
    return one.budget
