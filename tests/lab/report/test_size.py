"""A large report stays small and opens quickly."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened
from run_folders import write_run

from kvpolicy.lab.report.build import build
from kvpolicy.lab.store.read import read_run

MOST_BYTES = 20_000_000
MOST_SECONDS = 2.0
TEXT = (
    "Now Wait Alternatively so the next step we need to find value of x where total is given by "
    "sum product because then check verify again number apples each left right = + - 12 7 35 81"
)
WORDS = TEXT.split()
PLANS = [("full cache", None), *((f"policy{i}", 64 * b) for i in range(1, 5) for b in range(1, 5))]
PLANS += [(f"policy{i}", 512) for i in range(1, 4)]


def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
    """A trace of some 500 words: one beginning for all cells, then each goes its own way."""
    shared, own = random.Random(item), random.Random(f"{item} {cell['plan']}")
    thoughts = [
        " ".join((shared if i < 8 else own).choices(WORDS, k=14)) + ".\n\n" for i in range(36)
    ]
    text = "".join(thoughts) + f"</think>\n\n\\boxed{{{item}}}"
    return {"text": text, "correct": own.random() < 0.7, "num_tokens": own.randint(500, 900)}


def processor_seconds(opened: Opened) -> float:
    """What the page has taken of a processor so far."""
    session = opened.page.context.new_cdp_session(opened.page)
    session.send("Performance.enable")
    metrics = {m["name"]: m["value"] for m in session.send("Performance.getMetrics")["metrics"]}
    return float(metrics["ProcessTime"])


@pytest.mark.nightly
def test_20_cells_of_500_samples_take_less_than_20_megabytes_and_2_seconds(
    browser: Any, tmp_path: Path, record_testsuite_property: Callable[[str, object], None]
) -> None:
    assert len(PLANS) == 20
    folder = write_run(
        tmp_path / "run", plans=PLANS, n=500, outcome=outcome, recorded=2, num_layers=28
    )
    page = build([read_run(folder)])
    assert "The middle of texts" not in page
    assert "did not fit" not in page
    assert len(page.encode()) < MOST_BYTES
    file = tmp_path / "report.html"
    file.write_text(page, encoding="utf-8")
    clock, processor = [], []
    for _ in range(3):
        opened = Opened(browser, file, viewport={"width": 1280, "height": 900})
        opened.page.wait_for_selector("#chart-frontier .spot", state="attached")
        # The page's own clock starts when the browser is told to go there.
        ready = "performance.getEntriesByName('ready')[0].startTime"
        clock.append(opened.page.evaluate(ready) / 1000)
        processor.append(processor_seconds(opened))
        assert opened.count("#table tbody tr") == 20
        assert opened.texts(".count")[0] == "500 samples of 500"
        assert opened.count(".kept-panel") == 2, "it is ready when the records are shown, too"
        opened.close()
    actual = f"{len(page):,} bytes; ready after {clock} s, {processor} s of a processor"
    record_testsuite_property(
        "report of 20 x 500", actual
    )  # in --junit-xml, also where all is well
    # Where others are at work on the same processors, the clock counts their time as well.
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    assert min(clock) < MOST_SECONDS or (is_busy and min(processor) < MOST_SECONDS), actual


@pytest.mark.nightly
def test_long_traces_are_shortened_to_fit(tmp_path: Path) -> None:
    """Some 16,000 tokens each: what does not fit loses its middle, and the page says so."""

    def long(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        own = random.Random(f"{item} {cell['plan']}")
        return {"text": "\n\n".join(" ".join(own.choices(WORDS, k=40)) for _ in range(300))}

    folder = write_run(tmp_path / "run", plans=PLANS[:5], n=120, outcome=long)
    page = build([read_run(folder)], max_bytes=5_000_000)
    assert len(page.encode()) <= 5_000_000
    assert "The middle of texts" in page


@pytest.mark.nightly
def test_a_page_uses_its_size_limit(tmp_path: Path) -> None:
    """With program, style, figures and notes; records give way, then texts."""
    folder = write_run(tmp_path / "run", plans=PLANS[:5], n=40, outcome=outcome, recorded=10)
    run = read_run(folder)
    whole = len(build([run]).encode())
    for max_bytes, lacks_records, is_cut in [
        (whole + 10_000, False, False),
        (whole - 10_000, True, False),
        (whole // 2, True, True),
    ]:
        page = build([run], max_bytes=max_bytes)
        assert len(page.encode()) <= max_bytes
        assert "larger than its limit" not in page
        assert ("did not fit" in page) == lacks_records
        assert ("The middle of texts" in page) == is_cut


def test_a_page_above_its_size_limit_has_a_note(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", plans=PLANS[:5], n=40, outcome=outcome)
    page = build([read_run(folder)], max_bytes=100_000)
    assert len(page.encode()) > 100_000
    assert "larger than its limit" in page
