"""Headless Chromium without network access, for tests of HTML pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
NEEDED = "KVPOLICY_NEEDS_CHROMIUM"  # 1: a missing browser is a failure, as in CI


@contextmanager
def browser_of_tests() -> Iterator[Any]:
    """A browser; the test is skipped if there is none, or fails if `NEEDED` is set."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _skip_or_fail("playwright is not installed")
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        _skip_or_fail("there is no Chromium on this machine")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


def _skip_or_fail(reason: str) -> None:
    if os.environ.get(NEEDED) == "1":
        pytest.fail(f"{reason}, and {NEEDED}=1 requires it")
    pytest.skip(reason)


class Opened:
    """A page opened from a file or a server, with its console messages and network requests."""

    def __init__(
        self, browser: Any, place: Path | str, *, ready: bool = True, **options: Any
    ) -> None:
        self._is_file = isinstance(place, Path)
        self._address = place.as_uri() if isinstance(place, Path) else place
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self._note_dialog(dialog))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(self._address)
        if ready:
            self.page.wait_for_selector("html[data-ready]")

    def _note_dialog(self, dialog: Any) -> None:
        self.complaints.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    def count(self, selector: str) -> int:
        """Number of matching elements."""
        found: int = self.page.locator(selector).count()
        return found

    def texts(self, selector: str) -> list[str]:
        """Texts of the matching elements."""
        found: list[str] = self.page.locator(selector).all_text_contents()
        return found

    def unfold(self, selector: str = "") -> None:
        """Open all closed ``details`` elements and wait until their contents are rendered."""
        folded = self.page.locator(f"{selector} details:not([open]) > summary")
        for _ in range(folded.count()):
            folded.first.click()
        later = "new Promise(done => requestAnimationFrame(() => setTimeout(done)))"
        self.page.evaluate(f"() => {later}")

    def close(self) -> None:
        """Close the page. Fails if there were console messages or network requests."""
        self._context.close()
        assert self.complaints == []
        allowed = "file:" if self._is_file else self._address
        foreign = [url for url in self.requests if not url.startswith((allowed, "data:"))]
        assert foreign == []
        assert not self._is_file or len(self.requests) == 1, "the page loaded more than its file"
