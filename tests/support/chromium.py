"""Chromium for tests of pages: without a window, and without a network."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
NEEDED = "KVPOLICY_NEEDS_CHROMIUM"  # set to 1 where a missing browser is a failure: in CI


@contextmanager
def browser_of_tests() -> Iterator[Any]:
    """A browser; who asks for one is skipped where there is none, unless it is needed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _lacking("playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _lacking("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def _lacking(reason: str) -> None:
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"{reason}, and {NEEDED}=1 says that it has to be there")
    pytest.skip(reason)


class Opened:
    """A page from a file, with all that it complained about or asked the network for."""

    def __init__(self, browser: Any, file: Path, *, ready: bool = True, **options: Any) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(15_000)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self._note_dialog(dialog))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        if ready:
            self.page.wait_for_selector("html[data-ready]")

    def _note_dialog(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def count(self, selector: str) -> int:
        """How many elements there are."""
        found: int = self.page.locator(selector).count()
        return found

    def texts(self, selector: str) -> list[str]:
        """What elements say."""
        found: list[str] = self.page.locator(selector).all_text_contents()
        return found

    def unfold(self, selector: str = "") -> None:
        """Open everything folded within, and wait until what fills it on opening has done so."""
        folded = self.page.locator(f"{selector} details:not([open]) > summary")
        for _ in range(folded.count()):
            folded.first.click()
        later = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
        self.page.evaluate(f"() => {later}")

    def close(self) -> None:
        """Close it. It fails if anything was complained about or asked for."""
        self._context.close()
        assert self.complaints == []
        assert [url for url in self.requests if not url.startswith("file:")] == []
        assert len(self.requests) == 1, "nothing but the file itself is loaded"
