"""The report in Chromium, checked against plain loops over the run folder."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened
from report_pages import Open
from run_folders import write_run

from kvpolicy.lab.report.build import build
from kvpolicy.lab.store.read import read_run

PLANS = [("full cache", None), ("H2O", 64), ("H2O", 96), ("R-KV", 64), ("R-KV", 96)]


def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """Samples that differ in everything a page counts."""
    place = PLANS.index((cell["series"], cell["budget"]))
    is_cut, is_failed, is_open = (place, item) in {(1, 3), (4, 3)}, (place, item) == (2, 5), False
    is_open = (place, item) == (3, 7)
    actual = f"Now {item} so.\n\nWait, {cell['series']} {place}.\n\n</think>\n\nit is {item}"
    changes: dict[str, Any] = {
        "correct": (item * 7 + place * 3 + attempt) % (2 + place) != 0,
        "num_tokens": 20 + 3 * item + 11 * place,
        "peak_bytes": 1000 * (1 + place) + 17 * item,
        "decode_s": 0.1 + 0.01 * item,
        "compactions": item // 3 if place else 0,
        "text": actual,
    }
    if item == 0:
        changes |= {"num_tokens": 1, "decode_s": 0.001}
    if is_cut:
        changes |= {"finish_reason": "length"}
    if is_failed:
        changes |= {"finish_reason": "error", "error": "the pool ran dry", "correct": False}
    if is_open:
        changes |= {"correct": None, "ungraded": "no box"}
    return changes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", plans=PLANS, n=12, outcome=outcome)


@pytest.fixture
def opened(open_report: Open, folder: Path) -> Opened:
    return open_report(folder)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def of_cells(folder: Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Every cell of the manifest with its samples."""
    run = json.loads((folder / "manifest.json").read_text())["run"]
    samples = lines(folder, "samples.jsonl")
    return [(cell, [s for s in samples if s["cell"] == cell["cell"]]) for cell in run["cells"]]


def wilson(right: int, n: int) -> tuple[float, float]:
    """The two roots of (p - x)^2 = z^2 x (1 - x) / n."""
    z2, p = 1.959963984540054**2, right / n
    a, b, c = 1 + z2 / n, -(2 * p + z2 / n), p * p
    root = math.sqrt(max(0.0, b * b - 4 * a * c))
    return (-b - root) / (2 * a), (-b + root) / (2 * a)


def fine(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for s in samples if s["finish_reason"] != "error"]


def several(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those between whose first token and last there is a time."""
    return [s for s in fine(samples) if s["num_tokens"] > 1]


def of_compacted(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [s for s in samples if s["compactions"]]


def average(values: list[float]) -> float:
    return sum(values) / len(values)


ORACLES: dict[str, Callable[[list[dict[str, Any]]], float]] = {
    "accuracy": lambda samples: average([float(bool(s["correct"])) for s in samples]),
    "length": lambda samples: average([s["num_tokens"] for s in fine(samples)]),
    "peak_bytes": lambda samples: average([s["peak_bytes"] for s in fine(samples)]),
    "throughput": lambda samples: 20 * len(samples) / 2.0,
    # Seconds are counted from the first token, which is a step less than there are tokens.
    "speed": lambda samples: (
        sum(s["num_tokens"] - 1 for s in several(samples))
        / sum(s["decode_s"] for s in several(samples))
    ),
}


def marks(opened: Opened, chart: str) -> dict[int, dict[str, str]]:
    """What a chart's marks hold, by number of their cell."""
    spots = opened.page.locator(f"#chart-{chart} .spot")
    spots.first.wait_for(state="attached")
    found = spots.evaluate_all("all => all.map(one => ({...one.dataset}))")
    return {int(one["cell"]): one for one in found}


@pytest.mark.few(2)
@pytest.mark.parametrize("chart", ORACLES)
def test_a_chart_has_a_mark_for_each_cell_at_its_value(
    opened: Opened, folder: Path, chart: str
) -> None:
    found = marks(opened, chart)
    cells = of_cells(folder)
    assert sorted(found) == list(range(len(cells)))
    for number, (cell, samples) in enumerate(cells):
        assert float(found[number]["y"]) == pytest.approx(ORACLES[chart](samples), rel=1e-9)
        if cell["budget"] is not None:
            assert float(found[number]["x"]) == cell["budget"]


def test_accuracy_has_wilson_intervals(opened: Opened, folder: Path) -> None:
    found = marks(opened, "accuracy")
    for number, (_, samples) in enumerate(of_cells(folder)):
        low, high = wilson(sum(bool(s["correct"]) for s in samples), len(samples))
        assert float(found[number]["low"]) == pytest.approx(low, abs=1e-9)
        assert float(found[number]["high"]) == pytest.approx(high, abs=1e-9)


def test_marks_are_placed_by_their_axes(opened: Opened, folder: Path) -> None:
    """Higher values are higher up, in proportion; larger budgets further right."""
    found = opened.page.locator("#chart-accuracy .spot .marker").evaluate_all(
        """all => all.map(one => {
          const box = one.getBoundingClientRect(), spot = one.closest(".spot").dataset;
          return [Number(spot.x), Number(spot.y), box.x + box.width / 2, box.y + box.height / 2];
        })"""
    )
    assert len(found) == 4
    top, bottom = max(found, key=lambda one: one[1]), min(found, key=lambda one: one[1])
    per_share = (bottom[3] - top[3]) / (top[1] - bottom[1])
    for x, y, left, up in found:
        assert up - top[3] == pytest.approx((top[1] - y) * per_share, abs=1.5)
        assert all(left < other[2] for other in found if other[0] > x)


def test_the_frontier_has_the_cells_that_none_beats(opened: Opened, folder: Path) -> None:
    points = [
        (ORACLES["peak_bytes"](samples), ORACLES["accuracy"](samples))
        for _, samples in of_cells(folder)
    ]
    best = [
        not any((m <= memory and w >= worth) and (m, w) != (memory, worth) for m, w in points)
        for memory, worth in points
    ]
    opened.unfold("[data-chart=frontier]")
    rows = opened.page.locator("[data-chart=frontier] tbody tr")
    actual = rows.evaluate_all("all => all.map(r => r.lastChild.textContent)")
    assert actual == ["yes" if one else "no" for one in best]
    assert len(marks(opened, "frontier")) == len(points)


def test_every_chart_has_a_table(opened: Opened, folder: Path) -> None:
    opened.unfold(".panel")
    for panel in opened.page.locator(".panel").all():
        assert panel.locator("tbody tr").count() == len(PLANS)


def test_the_table_counts_failed_truncated_and_ungraded_samples(
    opened: Opened, folder: Path
) -> None:
    rows = opened.page.locator("#table tbody tr").all()
    heads = [text.strip() for text in opened.texts("#table thead th")]
    table = [
        dict(zip(heads, row.locator("th, td").all_text_contents(), strict=True)) for row in rows
    ]
    assert [row["n"] for row in table] == ["12"] * 5
    assert [row["failed"] for row in table] == ["0", "0", "1", "0", "0"]
    assert [row["truncated"][0] for row in table] == ["0", "1", "0", "0", "1"]
    assert [row["ungraded"] for row in table] == ["0", "0", "0", "1", "0"]
    for row, (_, samples) in zip(table, of_cells(folder), strict=True):
        if expected := of_compacted(samples):
            share = f"{100 * ORACLES['accuracy'](expected):.0f}%"
            assert row["compacted (n)"].startswith(f"{share} ({len(expected)})")
        else:
            assert row["compacted (n)"] == "\N{EN DASH}"


def test_a_heading_sorts_the_table_up_and_down(opened: Opened, folder: Path) -> None:
    head = opened.page.locator("#table th", has_text="KV/sample, mean")
    first = "#table tbody tr th"
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert "full cache" in opened.texts(first)[0]
    head.locator("button").click()
    assert head.get_attribute("aria-sort") == "descending"
    assert "R-KV" in opened.texts(first)[0]
    assert "full cache" in opened.texts(first)[-1]


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [390, 1280])
def test_knobs_are_not_broken_within_words(open_report: Open, tmp_path: Path, width: int) -> None:
    folder = write_run(tmp_path / "knobs", plans=PLANS)
    manifest = json.loads((folder / "manifest.json").read_text())
    for cell in manifest["run"]["cells"]:
        cell["knobs"] = {"rkv.mix_lambda": 0.1, "skipkv.keyword_match": "text"}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    opened = open_report(folder, viewport={"width": width, "height": 800})
    cells = opened.page.locator("#table td.wide")
    assert cells.count() == len(PLANS)
    assert opened.texts("#table td.wide div")[:2] == [
        "rkv.mix_lambda=0.1",
        'skipkv.keyword_match="text"',
    ]
    heights = cells.locator("div").evaluate_all(
        "all => all.map(one => one.clientHeight / parseFloat(getComputedStyle(one).lineHeight))"
    )
    assert max(heights) < 1.5, "a knob takes one line"


@pytest.mark.few(1)
@pytest.mark.parametrize("width", [390, 1280])
def test_long_names_are_wrapped_within_their_column(
    open_report: Open, tmp_path: Path, width: int
) -> None:
    names = ["x" * 120, "a plan with a long name, tau=0.95, keyword=text, pair=max, alpha=2"]
    folder = write_run(tmp_path / "long", plans=[("full cache", None), *((n, 64) for n in names)])
    opened = open_report(folder, viewport={"width": width, "height": 800})
    boxes = opened.page.locator("#table tbody tr").evaluate_all(
        """all => all.map(row => [row.querySelector("th .link").getBoundingClientRect().right,
            row.querySelector("td").getBoundingClientRect().left])"""
    )
    assert len(boxes) == 3
    assert all(name_ends <= budget_begins for name_ends, budget_begins in boxes)
    widths = opened.page.locator("#table tbody th .link").evaluate_all(
        "all => all.map(one => one.clientWidth)"
    )
    assert min(widths) > 50, "not letter by letter"


def test_the_breakdown_has_the_share_of_each_value(opened: Opened, folder: Path) -> None:
    rows = opened.page.locator("#difficulty tbody tr").all()
    for row, (_, samples) in zip(rows, of_cells(folder), strict=True):
        shares = [
            average([float(bool(s["correct"])) for s in samples if s["facets"]["depth"] == depth])
            for depth in (3, 4)
        ]
        actual = row.locator("td strong").all_text_contents()
        assert actual == [f"{round(100 * share + 1e-9)}%" for share in shares]
    opened.page.select_option("#facet", "1")
    assert [text.strip() for text in opened.texts("#difficulty thead th")][1:] == ["chains", "sums"]


def test_hiding_a_series_takes_its_marks_away(opened: Opened) -> None:
    entry = opened.page.locator(".legend-entry", has_text="H2O")
    entry.click()
    assert entry.get_attribute("aria-pressed") == "false"
    opened.page.wait_for_selector("#chart-accuracy .spot", state="attached")
    assert sorted(marks(opened, "accuracy")) == [0, 3, 4]
    entry.click()
    assert sorted(marks(opened, "accuracy")) == [0, 1, 2, 3, 4]


def test_layers_and_manifest_are_shown(opened: Opened) -> None:
    plans = opened.page.locator("#plans")
    assert plans.locator("details").count() == len(PLANS)
    opened.unfold("#plans")
    assert "96" in plans.locator("tbody tr").nth(2).text_content()
    assert "h2o" in plans.locator(".stack").nth(2).text_content()
    manifest = opened.page.locator("#manifest").text_content()
    for word in ("kvpolicy ablate", "2026-01-02T03:04:05", "python 3.11.0", "float32", "reasoner"):
        assert word in manifest


def test_without_javascript_there_is_a_table(browser: Any, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "r.html"
    file.write_text(build([read_run(folder)]), encoding="utf-8")
    opened = Opened(browser, file, ready=False, java_script_enabled=False)
    rows = opened.page.locator("noscript table tbody tr")
    assert rows.count() == len(PLANS)
    for number, (cell, samples) in enumerate(of_cells(folder)):
        assert rows.nth(number).is_visible()
        name, *figures, n, compacted, num_compacted = (
            rows.nth(number).locator("th, td").all_text_contents()
        )
        assert cell["series"] in name
        assert figures[0].startswith(f"{ORACLES['accuracy'](samples):.4g} (")
        assert n == "12"
        expected = of_compacted(samples)
        assert num_compacted == str(len(expected))
        assert compacted == (f"{ORACLES['accuracy'](expected):.4g}" if expected else "")
    opened.close()
