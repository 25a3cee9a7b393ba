"""Kept tokens in a report, of recorded samples only."""

import json
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened
from kept_pages import held_by
from report_pages import Open
from run_folders import write_run

PLANS = [("H2O", 64), ("full cache", None), ("R-KV \u061c", 64)]
PANELS = ".kept-panel"

# Blocks are opened only when `release()` says so.
HOLD = """() => {
  const Real = window.Response, waiting = [];
  window.Response = function (stream) {
    const text = new Promise((done) => waiting.push(done)).then(() => new Real(stream).text());
    return { text: () => text };
  };
  window.release = () => { window.Response = Real; waiting.forEach((done) => done()); };
}"""
# Intervals that go on.
COUNT = """() => {
  window.going = new Set();
  const [set, clear] = [window.setInterval, window.clearInterval];
  window.setInterval = (...all) => { const id = set(...all); going.add(id); return id };
  window.clearInterval = (id) => { going.delete(id); clear(id) };
}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Four items of each cell, the first two of which are recorded."""
    return write_run(tmp_path / "run", plans=PLANS, n=4, recorded=2)


@pytest.fixture
def opened(open_report: Open, folder: Path) -> Opened:
    return open_report(folder)


def recorded(folder: Path, item: int) -> list[dict[str, Any]]:
    """The records of an item, in the order of cells."""
    lines = (folder / "kept.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["item"] == item]


def go_to(opened: Opened, item: int, key: str) -> None:
    opened.page.focus("#samples-list")
    opened.page.keyboard.press(key)
    opened.page.wait_for_function(
        "n => document.querySelector('.detail h3').textContent.startsWith('Item ' + n)",
        arg=str(item),
    )


def tokens(opened: Opened, panel: int) -> list[str]:
    found: list[str] = (
        opened.page.locator(PANELS).nth(panel).locator(".kept-text .kept-token").all_text_contents()
    )
    return found


def test_recorded_samples_show_their_tokens_side_by_side(opened: Opened, folder: Path) -> None:
    opened.page.select_option("#cell-b", "2")
    opened.page.wait_for_function(
        "() => document.querySelectorAll('.kept-panel h5')[1]?.textContent.startsWith('R-KV')"
    )
    assert opened.texts(f"{PANELS} h5") == ["H2O 64", "R-KV ⟨U+061C⟩ 64"]
    first, _, last = recorded(folder, 0)
    for panel, record in enumerate((first, last)):
        assert tokens(opened, panel) == record["tokens"]
        shown = opened.page.locator(PANELS).nth(panel).locator(".kept-text .kept-token")
        heads = shown.evaluate_all("all => all.map(one => Number(one.dataset.heads))")
        # The last compaction is what is shown first.
        assert heads == held_by(record, None, None, record["layers"][0]["at"][-1])


def test_unrecorded_samples_show_no_tokens(opened: Opened) -> None:
    assert opened.count(PANELS) == 2
    go_to(opened, 3, "End")
    opened.page.wait_for_function("() => !document.querySelector('.kept').childElementCount")
    go_to(opened, 0, "Home")
    opened.page.wait_for_selector(PANELS)
    opened.page.select_option("#cell-b", "none")
    opened.page.wait_for_function("() => document.querySelectorAll('.kept-panel').length === 1")


def test_a_record_that_opens_late_does_not_change_the_page(opened: Opened, folder: Path) -> None:
    opened.page.evaluate(HOLD)
    go_to(opened, 1, "ArrowDown")
    assert opened.count(PANELS) == 0
    go_to(opened, 0, "ArrowUp")
    opened.page.wait_for_selector(PANELS)
    opened.page.evaluate("release()")
    later = "new Promise((done) => setTimeout(done, 300))"
    opened.page.evaluate(f"() => {later}")
    assert tokens(opened, 0) == recorded(folder, 0)[0]["tokens"]
    before = opened.texts(".kept-where")
    opened.page.locator(".kept-before").click()
    assert opened.texts(".kept-where") != before, "the view that is shown works"
    go_to(opened, 1, "ArrowDown")
    opened.page.wait_for_selector(PANELS)
    assert tokens(opened, 0) == recorded(folder, 1)[0]["tokens"]


@pytest.mark.parametrize("how", ["unrecorded", "no sample"])
def test_playback_stops_when_hidden(opened: Opened, how: str) -> None:
    opened.page.evaluate(COUNT)
    opened.page.locator(".kept-controls input[type=range]").press("Home")  # it plays for seconds
    opened.page.get_by_text("Play", exact=True).click()
    assert opened.page.evaluate("going.size") == 1
    if how == "unrecorded":
        go_to(opened, 3, "End")
    else:
        opened.page.fill("#search", "nowhere to be found")
        opened.page.wait_for_selector(".detail > .empty")
    assert opened.page.evaluate("going.size") == 0
