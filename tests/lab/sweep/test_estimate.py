"""What a comparison may take: figures held against sums by hand, and a probe that is stopped."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from lab_comparisons import BASE, prepared
from tiny import shared_model, tiny_tokenizer

from kvpolicy.lab.sweep.comparison import Comparison
from kvpolicy.lab.sweep.estimate import Estimate, estimate
from kvpolicy.lab.sweep.jobs import Job
from kvpolicy.lab.sweep.probe import Probe, Seconds, probe, representatives
from kvpolicy.lab.sweep.runner import jobs
from kvpolicy.lab.sweep.sweep_file import series_of_stack

SEEDS, BUDGETS = (0, 1), (48, 64, 96)


def sweep(**changes: Any) -> Comparison:
    return prepared(**({"models": ("a", "b"), "seeds": SEEDS, "budgets": BUDGETS} | changes))


def probed(comparison: Comparison, seconds: dict[float | None, tuple[float, float]]) -> list[Probe]:
    """Probes as they would be if samples took so long, the second model twice as long."""
    found = []
    for cell in representatives(comparison, set()):
        group = comparison.group_of(cell)
        factor = 2.0 if group.model.name == "b" else 1.0
        low, high = seconds[cell.budget]
        found.append(
            Probe(
                model=group.model.name,
                task=group.task.name,
                series=cell.series,
                budget=cell.budget,
                num_samples=2,
                num_finished=2,
                problem=None,
                new_tokens=10,
                elapsed_s=1.0,
                sample_s=Seconds(low * factor, high * factor),
            )
        )
    return found


def estimated(
    comparison: Comparison,
    done: set[str],
    workers: int = 1,
    pieces: list[Job] | None = None,
) -> Estimate:
    probes = probed(comparison, {None: (8.0, 10.0), 48: (1.0, 2.0), 96: (4.0, 8.0)})
    pieces = pieces or jobs(comparison, done)
    return estimate(comparison, probes, pieces, folder=Path("out"), workers=workers)


def test_each_model_is_tried_with_the_full_cache_and_the_smallest_and_the_largest_budget() -> None:
    comparison = sweep()
    found = representatives(comparison, set())
    places = [(comparison.group_of(cell).model.name, cell.budget) for cell in found]
    assert places == [(model, budget) for model in "ab" for budget in (None, 48, 96)]


def test_minutes_are_a_sum_over_all_samples() -> None:
    found = estimated(sweep(), set())
    # Of each policy with a budget: 48, a third of the way from 48 to 96, and 96.
    low = 8.0 + 2 * (1.0 + 2.0 + 4.0)
    high = 10.0 + 2 * (2.0 + 4.0 + 8.0)
    n = BASE.n * len(SEEDS) * (1 + 2)
    assert found.minutes.low == pytest.approx(n * low / 60)
    assert found.minutes.high == pytest.approx(n * high / 60)
    assert (found.cells, found.samples, found.left) == (28, 56, 56)
    assert [share.left for share in found.groups] == [14] * 4
    assert [share.elapsed_s.low for share in found.groups] == pytest.approx(
        [BASE.n * low, BASE.n * low, BASE.n * low * 2, BASE.n * low * 2]
    )


def test_workers_share_the_work_but_not_a_cell() -> None:
    comparison = sweep()
    alone, two, many = (estimated(comparison, set(), workers) for workers in (1, 2, 1000))
    assert two.minutes.low == pytest.approx(alone.minutes.low / 2)
    assert many.minutes.low == pytest.approx(BASE.n * 2 * 8.0 / 60)


def test_workers_share_a_cell_that_is_cut() -> None:
    comparison = prepared(series=(series_of_stack("full"),), n=10)
    (job,) = jobs(comparison, set())
    halves = [Job(job.cell, job.items[:5]), Job(job.cell, job.items[5:])]
    whole, cut = (estimated(comparison, set(), 4, pieces) for pieces in ([job], halves))
    assert whole.minutes.low == pytest.approx(10 * 8.0 / 60)
    assert cut.minutes.low == pytest.approx(5 * 8.0 / 60), "two of the four have nothing to do"
    assert (cut.left, cut.groups[0].left) == (10, 10)
    assert cut.groups[0].elapsed_s == whole.groups[0].elapsed_s


def test_what_is_done_is_not_counted_and_not_tried() -> None:
    comparison = sweep()
    of_a = {
        comparison.key(cell, item)
        for cell in comparison.cells
        if comparison.group_of(cell).model.name == "a"
        for item in comparison.group_of(cell).items
    }
    found = estimated(comparison, of_a)
    assert found.left == found.samples / 2
    assert [share.left for share in found.groups] == [0, 0, 14, 14]
    tried = representatives(comparison, of_a)
    assert {comparison.group_of(cell).model.name for cell in tried} == {"b"}


@attrs.define
class OneModel:
    """A shelf with one small model, whatever it is asked for."""

    def open(self, _name: str) -> tuple[Any, Any]:
        return shared_model(), tiny_tokenizer()


@pytest.mark.parametrize("limit_s", [0.0, 600.0], ids=["stopped", "finished"])
def test_a_probe_knows_what_it_could_not_see(limit_s: float) -> None:
    comparison = prepared(series=(series_of_stack("full"),), max_new_tokens=30, n=3)
    found = probe(comparison, comparison.cells[0], OneModel(), limit_s)  # type: ignore[arg-type]
    assert (found.num_samples, found.problem) == (2, None)
    if limit_s:
        assert found.num_finished == 2
        assert found.sample_s.low == found.sample_s.high > 0
        assert found.new_tokens >= 2
    else:
        assert found.num_finished == 0
        assert found.new_tokens >= 2, "one step at least"
        assert 0 < found.sample_s.low < found.sample_s.high


def test_a_probe_that_fails_says_why() -> None:
    comparison = prepared(tasks=("needle:length=3000",), series=(series_of_stack("full"),))
    found = probe(comparison, comparison.cells[0], OneModel(), 60.0)  # type: ignore[arg-type]
    assert found.problem is not None
    assert "positions" in found.problem
