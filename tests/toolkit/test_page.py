"""The page of the toolkit describes every name that it exports, and no other."""

import re
from pathlib import Path

import kvpolicy.toolkit

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "toolkit.md"


def test_the_page_has_every_name_once() -> None:
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.M)
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(named) == sorted(kvpolicy.toolkit.__all__)
