"""The page on the architecture names every file that a token passes."""

import re
import sys
from pathlib import Path
from types import FrameType

from tiny import shared_model

import kvpolicy
from kvpolicy import Engine, Plan, Request

PACKAGE = Path(kvpolicy.__file__).parent
PAGE = PACKAGE.parent / "docs/explanation/architecture.md"


def files_of_the_page() -> set[str]:
    """The files in the table of what a token passes."""
    text = PAGE.read_text(encoding="utf-8").partition("### What a token passes")[2]
    rows = re.findall(r"^\| (`[^`]*`|above) \| (.*) \|$", text.partition("\n### ")[0], re.M)
    folders = [(folder.strip("`").replace("above", ""), files) for folder, files in rows]
    return {folder + name for folder, files in folders for name in re.findall(r"`([^`]+)`", files)}


def test_the_page_names_every_file_that_a_token_passes() -> None:
    plan = Plan.uniform("h2o", budget=12, buffer=4)
    run = Engine(shared_model(), plan=plan, slots=2).open_run(max_len=60)
    passed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        # A package that is imported in a step says what it is, and does nothing.
        if event == "call" and file.is_relative_to(PACKAGE) and file.name != "__init__.py":
            passed.add(file.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        run.submit(Request([1, 2, 3, 4] * 6, 12, stop_ids=()))
        while run.num_open:
            run.step()
    finally:
        sys.setprofile(None)
    assert passed - files_of_the_page() == set()
    assert {"engine/engine.py", "engine/evictor.py", "cache/layouts/even.py"} <= passed
    assert all((PACKAGE / file).exists() for file in files_of_the_page())
