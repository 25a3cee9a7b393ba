"""Plots: drawn without a display, for any rows, reproducibly."""

from pathlib import Path
from typing import Any

import attrs
import pytest
from lab_samples import CELLS, measured, sample
from matplotlib.figure import Figure

from kvpolicy.errors import OutputError
from kvpolicy.lab.analysis.table import Row, tabulate
from kvpolicy.lab.plots import Point, Size, looks_of, save_curve, save_sweep_plots
from kvpolicy.lab.statistics import Interval

FULL, SMALL = tabulate(measured([sample(cell, 0, num_tokens=9) for cell in CELLS]))


def at(budget: float, series: str = "small", **changes: Any) -> Row:
    record = attrs.evolve(SMALL.cell.record, budget=budget, series=series)
    return attrs.evolve(SMALL, cell=attrs.evolve(SMALL.cell, record=record), **changes)


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
def test_any_rows_can_be_drawn(tmp_path: Path, rows: list[Row]) -> None:
    png, svg = save_sweep_plots(rows, tmp_path, title="a title")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    pictures = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths = save_sweep_plots([FULL, at(16), at(32)], tmp_path / name, title="t")
        pictures.append([path.read_bytes() for path in paths])
    assert pictures[0] == pictures[1]


LONG = [f"a policy with a long name and knob={i}, budget per layer" for i in range(8)]


@pytest.mark.parametrize("width", [3.3, 6.9])
def test_a_legend_of_eight_long_names_overlaps_nothing(
    width: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    points = [Point(name, budget, Interval(0.5, 0.4, 0.6)) for name in LONG for budget in (16, 32)]
    points.append(Point("full cache", None, Interval(0.9, 0.8, 1)))
    save_curve(tmp_path / "a.png", points, "Accuracy", is_share=True, size=Size(width))
    (figure,) = figures
    (axes,), (legend,) = figure.axes, figure.legends
    figure.draw_without_rendering()
    box, drawn = legend.get_window_extent(), axes.get_tightbbox()
    assert box.y1 <= drawn.y0 + 1, "the legend is below the axes and their labels"
    assert box.x0 >= -1
    assert box.x1 <= figure.bbox.width + 1
    assert box.y0 >= -1
    assert axes.get_window_extent().height >= 0.3 * 2.3 * figure.dpi, "the axes stay readable"
    assert len(legend.get_texts()) == 9


def test_series_have_different_colours_and_markers() -> None:
    looks = looks_of([Point(str(i), 16, None) for i in range(20)])
    assert len({(look["color"], look["marker"]) for look in looks.values()}) == 20


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"\.svg, \.pdf, \.png"):
        save_curve(tmp_path / "a.gif", [], "Accuracy", is_share=True, size=Size())
