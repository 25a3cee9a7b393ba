"""How long a comparison may take, from a short probe of a few of its cells.

Of each model and task three cells are tried: the one that keeps everything, and those with the
smallest and the largest budget. Each fills its slots as the run would, and is stopped after a few
seconds. What that says of a token's time is taken to hold for all samples, and cells in between
are taken to lie in between. A sample that was not finished then may end soon or at the most
tokens allowed: so there are two figures, and they are one where all were finished.
"""

import time
from collections.abc import Container, Sequence
from pathlib import Path
from statistics import fmean

import attrs

from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.grid import Cell
from kvpolicy.lab.group import Group
from kvpolicy.lab.pool import Job
from kvpolicy.lab.serving import Server
from kvpolicy.lab.shelf import Shelf

HOW = (
    "one batch of the smallest and the largest budget and of the full cache, of each model and "
    "task, stopped after {limit_s:.0f} s; cells in between lie in between; loading not included"
)

_WHOLE_PROBE_S = 60.0  # for all probes together
_PROBE_S = (2.0, 10.0)  # for one of them, at least and at most
_ENDS = ("low", "high")


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


@attrs.frozen
class Share:
    """What the cells of one group have left to do.

    Attributes:
        model: The model, as typed.
        task: The task.
        seed: Chose the items.
        cells: Cells.
        samples: Samples in all.
        left: Samples still to be done.
        elapsed_s: Seconds they take one process.
    """

    model: str
    task: str
    seed: int
    cells: int
    samples: int
    left: int
    elapsed_s: Seconds


@attrs.frozen
class Estimate:
    """How long a comparison may take.

    Attributes:
        run: What the user calls it.
        folder: Where its results go.
        cells: Cells.
        samples: Samples in all.
        left: Samples still to be done.
        workers: Processes that do it side by side.
        minutes: How long it takes, with that many.
        groups: What each group has left to do.
        probes: What was tried.
        how: How this was estimated, in words.
    """

    run: str
    folder: str
    cells: int
    samples: int
    left: int
    workers: int
    minutes: Seconds
    groups: Sequence[Share]
    probes: Sequence[Probe]
    how: str


def representatives(comparison: Comparison, done: Container[str]) -> list[Cell]:
    """The cells that stand for the others.

    Args:
        comparison: What is to be run.
        done: Keys of the samples that are done; where nothing is left, nothing is tried.

    Returns:
        Of each model and task at most three, those of one model side by side.
    """
    found: dict[str, Cell] = {}
    for place in dict.fromkeys(map(_place, comparison.groups)):
        groups = [group.id for group in comparison.groups if _place(group) == place]
        cells = [cell for cell in comparison.cells if cell.group in groups]
        if any(comparison.left(cell, done) for cell in cells):
            whole = [cell for cell in cells if cell.budget is None]
            bounded = sorted((c for c in cells if c.budget is not None), key=_budget)
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


def probe(comparison: Comparison, cell: Cell, shelf: Shelf, limit_s: float) -> Probe:
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


def estimate(
    comparison: Comparison,
    probes: Sequence[Probe],
    done: Container[str],
    *,
    folder: Path,
    workers: int,
) -> Estimate:
    """Extrapolate.

    Args:
        comparison: What is to be run.
        probes: What was tried, at least the `representatives`.
        done: Keys of the samples that are done.
        folder: Where the results go.
        workers: Processes that do it side by side.
    """
    left = {cell.id: len(comparison.left(cell, done)) for cell in comparison.cells}
    times = {
        cell.id: _sample_s(comparison.group_of(cell), cell, probes) * left[cell.id]
        for cell in comparison.cells
        if left[cell.id]
    }
    nothing = Seconds(0.0, 0.0)
    shares = []
    for group in comparison.groups:
        cells = comparison.cells_of(group)
        shares.append(
            Share(
                model=group.model.name,
                task=group.task.name,
                seed=group.seed,
                cells=len(cells),
                samples=len(cells) * len(group.items),
                left=sum(left[cell.id] for cell in cells),
                elapsed_s=sum((times.get(cell.id, nothing) for cell in cells), nothing),
            )
        )
    total = sum((share.elapsed_s for share in shares), nothing) * (1 / workers)
    # No cell is divided among workers: the longest one takes its time.
    longest = [max((getattr(t, end) for t in times.values()), default=0.0) for end in _ENDS]
    return Estimate(
        run=comparison.name,
        folder=str(folder),
        cells=len(comparison.cells),
        samples=comparison.num_samples,
        left=sum(left.values()),
        workers=workers,
        minutes=Seconds(max(total.low, longest[0]), max(total.high, longest[1])) * (1 / 60),
        groups=shares,
        probes=probes,
        how=HOW.format(limit_s=limit_s_of(len(probes))),
    )


def _sample_s(group: Group, cell: Cell, probes: Sequence[Probe]) -> Seconds:
    """Seconds for one sample of a cell, from what was tried of its model and task."""
    mine = [one for one in probes if (one.model, one.task) == _place(group)]
    bounded = sorted((one for one in mine if one.budget is not None), key=_budget)
    if cell.budget is None or not bounded:
        return next((one.sample_s for one in mine if one.budget is None), mine[-1].sample_s)
    least, most = bounded[0], bounded[-1]
    width = _budget(most) - _budget(least)
    part = (cell.budget - _budget(least)) / width if width else 0.0
    return least.sample_s * (1 - part) + most.sample_s * part


def _place(group: Group) -> tuple[str, str]:
    return group.model.name, group.task.name


def _budget(one: Cell | Probe) -> float:
    assert one.budget is not None, "asked of bounded ones only"
    return one.budget
