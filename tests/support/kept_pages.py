"""Pages that contain only the kept-token view, and a plain-loop reference for it."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from kvpolicy.lab.report.page import bundle

_ASSETS = files("kvpolicy.lab.report") / "assets"
_MAIN = """import { keptView } from "./kept.js";
import { chosen, readKept, survival, timesOf, unpack } from "./keptdata.js";
window.kept = { chosen, keptView, readKept, survival, timesOf, unpack };
"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kept</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{style}</style></head>
<body><main><div id="view"></div></main><script>{program}</script></body></html>
"""


def empty_page() -> str:
    """The scripts and styles without any record."""
    style = "\n".join((_ASSETS / f"{name}.css").read_text() for name in ("page", "kept"))
    read = lambda name: _MAIN if name == "dev" else (_ASSETS / f"{name}.js").read_text()  # noqa: E731
    return _PAGE.format(style=style, program=bundle("dev", read))


class Shown:
    """An open page that shows records."""

    def __init__(self, browser: Any, folder: Path, **options: Any) -> None:
        self.complaints: list[str] = []
        self._context = browser.new_context(**options)
        self.page = self._context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        file = folder / "kept.html"
        file.write_text(empty_page(), encoding="utf-8")
        self.page.goto(file.as_uri())

    def show(self, records: list[dict[str, Any]], **options: Any) -> None:
        options.setdefault("labels", [f"policy {i}" for i in range(len(records))])
        call = "([r, o]) => { window.view = kept.keptView(document.querySelector('#view'), r, o) }"
        self.page.evaluate(call, [records, options])

    def choose(self, **choice: Any) -> dict[str, Any]:
        state: dict[str, Any] = self.page.evaluate("c => (view.show(c), view.state())", choice)
        return state

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.page.evaluate("view.state()")
        return state

    def tokens(self, panel: int) -> list[tuple[str, str, str]]:
        """Text, level and number of heads of every token of a panel."""
        script = """n => [...document.querySelectorAll('.kept-panel')[n]
            .querySelectorAll('.kept-text .kept-token')]
            .map(one => [one.textContent, one.dataset.level, one.dataset.heads])"""
        return [tuple(one) for one in self.page.evaluate(script, panel)]

    def close(self) -> None:
        assert self.complaints == []
        self._context.close()


def held_by(record: dict[str, Any], layer: int | None, head: int | None, time: int) -> list[int]:
    """For each token, the number of heads that hold it after ``time`` tokens."""
    counts = [0] * len(record["tokens"])
    for one in record["layers"]:
        if layer is not None and one["layer"] != layer:
            continue
        done = len([at for at in one["at"] if at <= time])
        for number, left_at in enumerate(one["left_at"]):
            for p, left in enumerate(left_at):
                is_there = p < time and p < len(left_at) - 1 and (left == -1 or left >= done)
                is_seen = one["window"] is None or p > time - one["window"]
                counts[p] += is_there and is_seen and head in (None, number)
    return counts


def times_of(records: list[dict[str, Any]], layer: int | None) -> list[int]:
    """The time steps: compactions of the chosen layers, and the ends of the records."""
    found = {max(len(record["tokens"]) - 1, 0) for record in records}
    for record in records:
        for one in record["layers"]:
            if layer is None or one["layer"] == layer:
                found.update(one["at"])
    return sorted(found)
