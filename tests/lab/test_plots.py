"""Plots: drawn without a display, from whatever rows there are, the same every time."""

from itertools import pairwise
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab_samples import CELLS, MeasuredCell, measured, sample

from kvpolicy.lab.analysis.table import Row, tabulate
from kvpolicy.lab.plots.drawing import apart
from kvpolicy.lab.plots.plots import save_plots

FULL, SMALL = tabulate(measured([sample(cell, 0, num_tokens=9) for cell in CELLS]))


def at(budget: float, series: str = "small", **changes: object) -> Row[MeasuredCell]:
    return attrs.evolve(SMALL, budget=budget, series=series, **changes)


@pytest.mark.parametrize(
    "rows",
    [
        [FULL],
        [at(16)],
        [FULL, at(16), at(32)],
        [FULL, at(16), at(4096)],
        [FULL, at(16, length=None)],
        [at(16, series=f"policy {i}") for i in range(9)],
        [],
    ],
    ids=["reference only", "one point", "line", "far apart", "no length", "many", "nothing"],
)
def test_any_rows_can_be_drawn(tmp_path: Path, rows: list[Row[MeasuredCell]]) -> None:
    png, svg = save_plots(rows, tmp_path, title="a title")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_the_same_rows_give_the_same_picture(tmp_path: Path) -> None:
    pictures = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths = save_plots([FULL, at(16), at(32)], tmp_path / name, title="t")
        pictures.append([path.read_bytes() for path in paths])
    assert pictures[0] == pictures[1]


@given(st.lists(st.floats(0, 100), max_size=8).map(sorted), st.floats(0.1, 20))
def test_names_are_moved_apart_and_stay_in_order(heights: list[float], gap: float) -> None:
    places = apart(heights, gap)
    assert len(places) == len(heights)
    for below, above in pairwise(places):
        assert above - below >= gap - 1e-9


@given(st.lists(st.integers(0, 100), unique=True, max_size=8).map(sorted))
def test_names_with_room_stay_where_they_are(heights: list[int]) -> None:
    assert apart(heights, 1.0) == pytest.approx(heights)
