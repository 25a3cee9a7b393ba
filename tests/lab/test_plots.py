"""Plots: drawn without a display, for any rows, reproducibly."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
from lab_samples import CELLS, measured, sample
from matplotlib.figure import Figure

from kvpolicy.errors import OutputError
from kvpolicy.lab.analysis.table import Row, tabulate
from kvpolicy.lab.figure import Size
from kvpolicy.lab.plots import Point, save_curve, save_frontier, save_sweep_plots
from kvpolicy.lab.statistics import Interval
from kvpolicy.lab.tasks.likelihood import Perplexity

FULL, SMALL = tabulate(measured([sample(cell, 0, num_tokens=9) for cell in CELLS]))


PERPLEXITY = Perplexity().columns


def at(budget: float, series: str = "small", **changes: Any) -> Row:
    record = attrs.evolve(SMALL.cell.record, budget=budget, series=series)
    return attrs.evolve(SMALL, cell=attrs.evolve(SMALL.cell, record=record), **changes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([FULL, at(16), at(4096, length=None)], id="far apart, one without a length"),
        pytest.param([], id="nothing"),
        pytest.param([FULL], id="reference only", marks=pytest.mark.slow),
        pytest.param([at(16)], id="one point", marks=pytest.mark.slow),
        pytest.param(
            [at(16, series=f"policy {i}") for i in range(9)], id="many", marks=pytest.mark.slow
        ),
    ],
)
def test_any_rows_can_be_drawn(tmp_path: Path, rows: list[Row]) -> None:
    png, svg = save_sweep_plots(rows, tmp_path, title="a title")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert svg.read_text(encoding="utf-8").rstrip().endswith("</svg>")


def test_lengths_that_the_task_decides_are_not_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    half = Interval(0.5, 0.4, 0.6)
    values = {"measured": {column.name: half for column in PERPLEXITY}}
    rows = [at(16, **values), at(32, **values)]
    save_sweep_plots(rows, tmp_path, PERPLEXITY, title="t")
    longer = attrs.evolve(rows[1], length=Interval(99.0, 98.0, 100.0))
    save_sweep_plots([rows[0], longer], tmp_path, PERPLEXITY, title="t")
    same, different = (
        [axes.get_title(loc="left") for axes in figure.axes] for figure in drawn[::2]
    )
    assert same == [column.heading for column in PERPLEXITY]
    assert different == [PERPLEXITY[0].heading, "Mean length, tokens"]


@pytest.mark.nightly
def test_the_same_rows_give_the_same_files(tmp_path: Path) -> None:
    pictures = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths = save_sweep_plots([FULL, at(16), at(32)], tmp_path / name, title="t")
        pictures.append([path.read_bytes() for path in paths])
    assert pictures[0] == pictures[1]


LONG = [
    f"SkipKV on the reasoner, tau={tau}, alpha={alpha}, keyword=text, pair=max"
    for tau in (0.9, 0.95, 0.99)
    for alpha in (0, 0.5, 1, 2)
]
NAN, INF = float("nan"), float("inf")


def points_of(names: Sequence[str], policy: str = "skipkv") -> list[Point]:
    """A line for each name, and the full cache."""
    half = Interval(0.5, 0.4, 0.6)
    points = [Point(name, b, half, 1e3 * b, policy) for name in names for b in (16, 32)]
    return [*points, Point("full cache", None, Interval(0.9, 0.8, 1), 1e5, "full")]


def check_layout(figure: Figure) -> None:
    """Nothing covers anything, and nothing is cut off."""
    outer = figure.bbox
    top = outer.y1
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            box = axis.get_tightbbox()
            assert box is not None
            assert box.x0 >= -1
            assert box.x1 <= outer.x1 + 1
            assert box.y1 <= outer.y1 + 1
            top = min(top, box.y0)
        ticks = [t.get_window_extent() for t in axes.get_xticklabels() if t.get_visible()]
        shown = [t for t in ticks if t.width > 1]
        assert all(a.x1 <= b.x0 for a, b in pairwise(sorted(shown, key=lambda t: float(t.x0))))
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert box.y1 <= top + 1, "the legend is below the axes and their labels"
        assert box.x0 >= -1
        assert box.x1 <= outer.x1 + 1
        assert box.y0 >= -1


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, in place of their files; each is checked."""
    figures: list[Figure] = []

    def keep(figure: Figure, *_: Any, **__: Any) -> None:
        figure.draw_without_rendering()
        check_layout(figure)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("width", "quantity"),
    [
        (2.2, "frontier"),
        (6.9, "Accuracy"),
        pytest.param(6.9, "frontier", marks=pytest.mark.slow),
        pytest.param(2.2, "Throughput of all slots, tokens/s", marks=pytest.mark.slow),
    ],
)
def test_twelve_long_series_fit_at_every_width(
    width: float, quantity: str, tmp_path: Path, drawn: list[Figure]
) -> None:
    size, path, points = Size(width, min(0.7 * width, 2.6)), tmp_path / "a.png", points_of(LONG)
    if quantity == "frontier":
        labels = ("Peak KV bytes of a sample, mean", "Accuracy")
        save_frontier(path, points, labels, is_share=True, more_is_better=True, size=size)
    else:
        save_curve(path, points, ("budget", quantity), is_share=quantity == "Accuracy", size=size)
    (figure,) = drawn
    (axes,), (legend,) = figure.axes, figure.legends
    assert axes.get_window_extent().height >= 0.45 * size.height * figure.dpi, "readable"
    assert len(legend.get_texts()) == 13
    shown = [text.get_text().replace("\n", " ") for text in legend.get_texts()]
    assert shown[0] == "\N{HORIZONTAL ELLIPSIS}tau=0.9, alpha=0, \N{HORIZONTAL ELLIPSIS}"
    title = legend.get_title().get_text().replace("\n", " ")
    assert title == "SkipKV on the reasoner, \N{HORIZONTAL ELLIPSIS}"


@pytest.mark.nightly
def test_the_picture_of_a_sweep_holds_twelve_long_series(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    rows = [FULL, *(at(budget, series=name) for name in LONG for budget in (16, 32))]
    save_sweep_plots(rows, tmp_path, title="reasoner on a task: " + "many settings, " * 20)
    (title,) = drawn[0].texts
    assert title.get_window_extent().x1 <= drawn[0].bbox.x1
    assert title.get_text().count("settings") == 20


STRANGE = [
    *("$x$", "$", r"\frac{1}{2}$ $\unknown{", "a_b", "_hidden", "100% & <b>#{}~^", "Ω → ≤ é"),
    *(
        "方策",
        "\U0001f600 \U0001fae8",
        "tab\tline\nred\x1b[31m\x00",
        "\u202eback",
        "\ud800",
        "x" * 300,
        "",
    ),
]


@pytest.mark.nightly
def test_any_label_is_drawn_as_it_is(tmp_path: Path, drawn: list[Figure]) -> None:
    save_curve(
        tmp_path / "a.png", points_of(STRANGE), ("budget", "$ _ 方"), is_share=True, size=Size()
    )
    (figure,) = drawn
    shown = [text.get_text().replace("\n", "") for text in figure.legends[0].get_texts()]
    assert shown[:4] == ["$x$", "$", r"\frac{1}{2}$ $\unknown{", "a_b"]
    assert shown[4:6] == ["_hidden", "100% & <b>#{}~^"]
    assert r"\u65b9" in shown[7]
    assert r"\t" in shown[9]
    assert shown[11] == r"\ud800"
    assert shown[12] == "x" * 300


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "values",
    [
        [None, None],
        [Interval(NAN, NAN, NAN)] * 2,
        [Interval(INF, 0, INF), Interval(-INF, -INF, 0)],
        [Interval(0.5, NAN, NAN), Interval(0.4, 0.3, INF)],
        [Interval(1e200, 0, 1e299), Interval(1e-300, 0, 1e-299)],
        [Interval(1e308, 1e308, 1.7e308), Interval(1, 0, 2)],
        [Interval(-5, -6, -4), Interval(-1, -2, 3)],
        [Interval(0, 0, 0), Interval(0, 0, 0)],
    ],
    ids=["none", "NaN", "infinite", "no interval", "far", "huge", "negative", "zero"],
)
def test_any_values_can_be_drawn(
    values: list[Interval | None], tmp_path: Path, drawn: list[Figure]
) -> None:
    memory = [one.value if one else None for one in values]
    points = [Point("a", 16 + i, v, m) for i, (v, m) in enumerate(zip(values, memory, strict=True))]
    size = Size()
    save_curve(tmp_path / "a.png", points, ("budget", "Loss"), is_share=False, size=size)
    labels, path = ("KV", "Loss"), tmp_path / "b.png"
    save_frontier(path, points, labels, is_share=True, more_is_better=True, size=size)
    low, high = drawn[0].axes[0].get_ylim()
    finite = [one.value for one in values if one and abs(one.value) < 1e300]
    assert all(low <= value <= high for value in finite)


@pytest.mark.parametrize(
    ("more_is_better", "best"),
    [(True, [[1.0, 0.5], [4.0, 0.75]]), (False, [[1.0, 0.5], [2.0, 0.25]])],
)
@pytest.mark.parametrize("is_share", [True, False])
def test_the_frontier_goes_through_the_better_points(
    more_is_better: bool,
    best: list[list[float]],
    is_share: bool,
    tmp_path: Path,
    drawn: list[Figure],
) -> None:
    """A share may be one of outputs that end in a loop, of which fewer are better."""
    values = {1: 0.5, 2: 0.25, 4: 0.75}
    points = [Point("a", m, Interval(v, v, v), float(m)) for m, v in values.items()]
    directions = {"is_share": is_share, "more_is_better": more_is_better}
    save_frontier(tmp_path / "a.png", points, ("KV", "Loops"), **directions, size=Size())
    (axes,) = drawn[0].axes
    (stairs,) = [line for line in axes.lines if line.get_linestyle() == ":"]
    assert stairs.get_xydata().tolist() == best


def test_every_point_is_drawn_at_its_value(tmp_path: Path, drawn: list[Figure]) -> None:
    values = {"a": {16: 0.5, 64: 0.75, 32: 0.25}, "b": {32: 0.125}}
    points = [
        Point(series, budget, Interval(value, value - 0.1, value + 0.1), 1e3 * budget)
        for series, line in values.items()
        for budget, value in line.items()
    ]
    save_curve(tmp_path / "a.png", points, ("budget", "Accuracy"), is_share=False, size=Size())
    (axes,) = drawn[0].axes
    lines = [cast("Any", container).lines[0].get_xydata().tolist() for container in axes.containers]
    wanted = [[[float(x), y] for x, y in sorted(line.items())] for line in values.values()]
    assert sorted(lines) == sorted(wanted)


@pytest.mark.nightly
def test_neighbouring_budgets_leave_out_labels_that_would_touch(
    tmp_path: Path, drawn: list[Figure]
) -> None:
    half = Interval(0.5, 0.4, 0.6)
    budgets = [*range(96, 140), 139.5]
    points = [Point("a", b, half) for b in budgets]
    save_curve(tmp_path / "a.png", points, ("budget", "Accuracy"), is_share=True, size=Size())
    assert len(drawn) == 1


@pytest.mark.nightly
def test_a_figure_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"0\.6 x 0\.6"):
        save_curve(
            tmp_path / "a.png",
            points_of(["a"]),
            ("budget", "A"),
            is_share=True,
            size=Size(0.6, 0.6),
        )
    assert not (tmp_path / "a.png").exists()


def test_a_policy_has_its_colour_in_every_figure(tmp_path: Path, drawn: list[Figure]) -> None:
    def colours(names: Sequence[str]) -> dict[str, Any]:
        points = [one for name in names for one in points_of([name], name.lower())][::-1]
        save_curve(tmp_path / "a.png", points, ("budget", "Accuracy"), is_share=True, size=Size())
        legend = drawn[-1].legends[0]
        lines = [cast("Any", line).get_color() for line in legend.get_lines()]
        return dict(zip((text.get_text() for text in legend.get_texts()), lines, strict=True))

    whole = colours(["SnapKV", "H2O", "Foreign", "TOVA"])
    assert len(set(whole.values())) == 5
    for name in ("H2O", "Foreign"):
        assert colours([name]) == {name: whole[name], "full cache": whole["full cache"]}


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"\.svg"):
        save_curve(tmp_path / "a.gif", [], ("budget", "Accuracy"), is_share=True, size=Size())
