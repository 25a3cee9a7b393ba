"""Fixtures: one browser for each file, and pages that fail on console errors."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Opened, browser_of_tests
from report_pages import DESKTOP, Open

from kvpolicy.lab.report.build import build
from kvpolicy.lab.store.read import read_run


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder that run a browser.

    Two files run with every change: what texts of others can do, and whether charts are right.
    """
    for item in items:
        # Names first: few tests have the fixture, and there are thousands of paths.
        has_browser = "browser" in getattr(item, "fixturenames", ())
        if has_browser and Path(__file__).parent in item.path.parents:
            is_first = item.path.name in ("test_hostile.py", "test_page.py")
            item.add_marker(pytest.mark.slow if is_first else pytest.mark.nightly)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_of_tests() as browser:
        yield browser


@pytest.fixture
def open_report(browser: Any, tmp_path: Path) -> Iterator[Open]:
    """Opens a report of run folders; when the test ends, nothing may have been complained of."""
    opened: list[Opened] = []

    def open_one(*folders: Path, **options: Any) -> Opened:
        file = tmp_path / f"report-{len(opened)}.html"
        file.write_text(build([read_run(folder) for folder in folders]), encoding="utf-8")
        opened.append(Opened(browser, file, **({"viewport": DESKTOP} | options)))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()
