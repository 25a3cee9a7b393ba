"""Accessibility of the report: keyboard, phone, dark theme, colour vision."""

import re
from importlib.resources import files
from itertools import combinations
from pathlib import Path

import pytest
from chromium import Opened
from report_pages import Open
from run_folders import write_run

from kvpolicy.lab.looks import COLOURS

PLANS = [("full cache", None), *((f"P{i}", budget) for i in range(8) for budget in (64, 96))]
TEXT, SHAPES = 4.5, 3.0  # WCAG 2, level AA: contrast of text, and of shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "one", plans=PLANS, seeds=(0, 1), recorded=1)


def palettes() -> dict[str, dict[str, str]]:
    """The colours of the style sheet, light and dark."""
    style = (files("kvpolicy.lab.report") / "assets" / "colours.css").read_text()
    blocks = re.findall(r"^(\s*):root([^{]*)\{(.*?)\}", style, re.M | re.S)
    found = [dict(re.findall(r"--(\w+): (#\w{6});", body)) for _, _, body in blocks]
    light, dark, chosen = found
    assert dark == chosen, "dark by choice is dark by system"
    return {"light": light, "dark": light | dark}


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_colours_contrast_with_their_background(theme: str) -> None:
    colours = palettes()[theme]
    for ink in ("ink", "soft", "link", "good", "bad"):
        for paper in ("paper", "sheet"):
            assert contrast(colours[ink], colours[paper]) >= TEXT, (ink, paper)
    for kind in ("k1", "k2", "k3", "k4", "k5", "mark"):
        assert contrast(colours["ink"], colours[kind]) >= TEXT, kind
    kinds = [colours[f"c{i}"] for i in range(6)]
    assert all(contrast(one, colours["paper"]) >= SHAPES for one in kinds)
    assert all(one != other for one, other in combinations(kinds, 2))
    for colour in COLOURS.values():
        assert contrast(getattr(colour, theme), colours["paper"]) >= SHAPES


def test_series_differ_in_more_than_colour(open_report: Open, folder: Path) -> None:
    opened = open_report(folder)
    opened.page.wait_for_selector("#chart-accuracy .spot", state="attached")
    looks = opened.page.locator("#chart-accuracy g.series").evaluate_all(
        """all => all.map(one => getComputedStyle(one.querySelector('.line')).stroke
            + one.querySelector('.marker').getAttribute('d')
            + one.querySelector('.line').getAttribute('stroke-dasharray'))"""
    )
    assert len(looks) == 8
    assert len(set(looks)) == 8


def test_a_phone_needs_no_horizontal_scrolling(open_report: Open, folder: Path) -> None:
    opened = open_report(folder, viewport={"width": 360, "height": 740}, has_touch=True)
    opened.page.select_option("#group", "1")
    opened.page.wait_for_selector(".option")
    opened.page.wait_for_selector(".kept-panel")
    opened.unfold()
    assert opened.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    width = opened.page.locator("#chart-accuracy svg").evaluate("one => one.clientWidth")
    assert 280 <= width <= 360
    small = opened.page.locator("button, select, .chip, summary").evaluate_all(
        """all => all.filter(one => one.clientHeight
            && one.getBoundingClientRect().height < 17).length"""
    )
    assert small == 0


def background(opened: Opened) -> str:
    colour: str = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return colour


def test_the_theme_follows_the_system_until_chosen(open_report: Open, folder: Path) -> None:
    opened = open_report(folder, color_scheme="dark")
    dark = background(opened)
    actual = []
    for _ in range(3):
        opened.page.click("#theme")
        actual.append((opened.texts("#theme")[0], background(opened)))
    light = actual[0][1]
    assert actual == [("Theme: light", light), ("Theme: dark", dark), ("Theme: system", dark)]
    assert light != dark
    opened.page.emulate_media(color_scheme="light")
    assert background(opened) == light


def test_reduced_motion_stops_animations(open_report: Open, folder: Path) -> None:
    script = "getComputedStyle(document.documentElement).scrollBehavior"
    assert open_report(folder, reduced_motion="reduce").page.evaluate(script) == "auto"
    assert open_report(folder, reduced_motion="no-preference").page.evaluate(script) == "smooth"


def test_the_skip_link_is_the_first_tab_stop(open_report: Open, folder: Path) -> None:
    opened = open_report(folder)
    opened.page.keyboard.press("Tab")
    assert opened.page.evaluate("document.activeElement.className") == "skip"
    shown = "document.activeElement.getBoundingClientRect().left >= 0"
    assert opened.page.evaluate(shown)
    opened.page.keyboard.press("Enter")
    assert opened.page.evaluate("document.activeElement.id") == "main"
    opened.page.keyboard.press("Tab")
    style = "getComputedStyle(document.activeElement).outlineStyle"
    assert opened.page.evaluate(style) == "solid", "who has the focus can be seen"


CHECKS = {
    "an id is there once": """(() => {
        const ids = [...document.querySelectorAll("[id]")].map(one => one.id);
        return ids.filter((id, i) => ids.indexOf(id) !== i) })()""",
    "every field has a label": """[...document.querySelectorAll("input, select")]
        .filter(one => !one.labels.length || !one.labels[0].textContent.trim())""",
    "every button has a name": """[...document.querySelectorAll("button, a, [role=button]")]
        .filter(one => !(one.getAttribute("aria-label") || one.textContent).trim())""",
    "every picture is named or hidden": """[...document.querySelectorAll("svg")]
        .filter(one => !one.closest("[aria-hidden=true]") && !one.getAttribute("aria-label"))""",
    "every region is named": """[...document.querySelectorAll("section, [role=region], nav")]
        .filter(one => !one.getAttribute("aria-label")
            && !one.getAttribute("aria-labelledby"))""",
    "a heading follows its parent": """(() => {
        const levels = [...document.querySelectorAll("h1,h2,h3,h4,h5")].map(one => +one.tagName[1]);
        return levels.filter((one, i) => i && one > levels[i - 1] + 1) })()""",
    "tables have captions and scopes": """
        [...document.querySelectorAll("main > :not(noscript) table")]
        .filter(one => !one.caption || one.querySelector("th:not([scope])"))""",
    "options are in a list": """[...document.querySelectorAll("[role=option]")]
        .filter(one => !one.closest("[role=listbox]"))""",
}


def test_the_page_keeps_the_basics_of_accessibility(open_report: Open, folder: Path) -> None:
    opened = open_report(folder)
    opened.page.select_option("#group", "1")
    opened.page.wait_for_selector(".trace-column")
    opened.page.wait_for_selector(".kept-panel")
    opened.unfold()
    assert opened.page.evaluate("document.documentElement.lang") == "en"
    assert opened.count("h1") == opened.count("main") == 1
    for claim, offenders in CHECKS.items():
        assert opened.page.evaluate(f"({offenders}).map(one => one.outerHTML ?? one)") == [], claim
