"""The report of a task without grades, also where a value is infinite."""

import math
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened
from report_pages import Open
from run_folders import write_run

PLANS = [("full cache", None), ("H2O", 64)]
KL = {"name": "kl", "title": "KL", "heading": "KL divergence, nats", "is_share": False}


def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """The second plan rules out what the full cache says next, of item 1; its item 3 failed."""
    is_compacted = cell["budget"] is not None
    divergence = math.inf if (is_compacted, item) == (True, 1) else 0.25 * item * is_compacted
    if (is_compacted, item) == (True, 3):
        return {"correct": None, "finish_reason": "error", "error": "the pool ran dry"}
    return {"correct": None, "values": {"kl": divergence, "matches": math.nan}}


@pytest.fixture
def opened(open_report: Open, tmp_path: Path) -> Opened:
    return open_report(
        write_run(
            tmp_path / "run", plans=PLANS, n=6, outcome=outcome, columns=[KL], measure="agreement"
        )
    )


def test_samples_of_measured_tasks_are_shown(opened: Opened) -> None:
    assert opened.texts(".trace-column .text") == ["thinking about 0\n\\boxed{0}"] * 2
    opened.page.locator("[aria-label='Next sample']").click()
    opened.page.wait_for_function(
        "() => document.querySelector('.detail h3').textContent.startsWith('Item 1')"
    )
    one, other = opened.texts(".trace-column .facts-line")
    assert "kl 0" in one
    assert "kl \N{EN DASH}" in other
    opened.page.fill("#search", "about 4")
    opened.page.wait_for_function(
        "() => document.querySelector('.count').textContent.startsWith('1 sample')"
    )


def test_ungraded_tasks_show_no_verdicts(opened: Opened) -> None:
    chips = opened.page.locator(".chip input").evaluate_all("all => all.map(one => one.value)")
    assert chips == ["all", "truncated", "failed"]
    tiles = dict(
        zip(opened.texts(".tile dt"), opened.texts(".tile dd.note"), strict=True),
    )
    assert tiles["failed"] == "not counted in the metric"
    assert "ungraded" not in tiles
    shown = " ".join(opened.texts("#summary-body, #failures-body, #samples-body"))
    assert "counted as wrong" not in shown
    assert "verdict" not in shown
    opened.page.locator("#failures tbody button").first.click()
    opened.page.wait_for_selector(".problem")
    assert opened.texts(".problem") == ["the pool ran dry"]


@pytest.mark.parametrize(
    "column",
    [
        {"name": "loops"},  # the run did not say, and the task is known
        {"name": "wrong", "more_is_better": False},
    ],
)
def test_the_frontier_of_what_should_be_small_joins_the_lowest(
    open_report: Open, tmp_path: Path, column: dict[str, Any]
) -> None:
    name = column["name"]

    def shares(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        budget = cell["budget"] or 96
        value = float(item < {32: 1, 64: 3, 96: 2}[budget])
        return {"correct": None, "values": {name: value}, "peak_bytes": 1000 * budget}

    plans = [("full cache", None), ("H2O", 64), ("H2O", 32)]
    columns = [{"title": name, "heading": "Outputs", "is_share": True} | column]
    folder = write_run(tmp_path / "run", plans=plans, n=4, outcome=shares, columns=columns)
    opened = open_report(folder)
    assert "lowest" in opened.texts("[data-chart=frontier] .note")[0]
    opened.unfold("[data-chart=frontier]")
    rows = opened.page.locator("[data-chart=frontier] tbody tr")
    assert rows.evaluate_all("all => all.map(r => r.lastChild.textContent)") == ["no", "no", "yes"]
