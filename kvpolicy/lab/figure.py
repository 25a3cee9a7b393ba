"""Figures with matplotlib in one style, laid out so that nothing is cut off or covered."""

import io
import textwrap
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write
from kvpolicy.lab.looks import COLOURS, INK, Look
from kvpolicy.text import visible

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.legend import Legend
    from matplotlib.lines import Line2D
    from matplotlib.text import Text

FORMATS = (".svg", ".pdf", ".png")
WIDTHS = {"column": 3.3, "page": 6.9}  # inches, of most two-column paper styles
LIMITS_INCHES = (0.5, 50.0)
LIMITS_POINTS = (1.0, 72.0)

FAINT = "#8a8a8a"
_INK = COLOURS[INK].light
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "text.parse_math": False,  # a dollar is a dollar
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": _INK,
    "axes.titlecolor": _INK,
    "axes.titlesize": "large",
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "text.color": _INK,
    "legend.frameon": False,
    "legend.handlelength": 3.2,  # shows two dashes of the longest
    "pdf.fonttype": 42,  # conferences refuse Type 3 fonts
    "svg.hashsalt": "kvpolicy",  # the same points give the same file
}
_MARKER_SIZES = {"D": 5.0, "P": 7.0, "*": 9.0}  # points, so that all look equally large
_MAX_LEGEND_SHARE = 0.25  # of the height; a figure with a larger legend grows
_MAX_LEGEND_COLUMNS = 5
_LEAST_SHARE = 0.5  # of the height that was asked for, for the axes; else the figure grows
_MAX_GROWTHS = 4
_SHARES_OF_TITLES = (0.8, 0.65, 0.5)  # of their room, tried in order
_LEAST_AXES = 3.0  # width and height of axes, in letters
_SHORTEST_LINE = 4  # letters of a label that is wrapped


@attrs.frozen
class LegendContent:
    """What a legend says.

    Attributes:
        entries: Labels and their handles, in order.
        title: What all labels begin with, and do not repeat.
    """

    entries: "Sequence[tuple[str, Artist]]"
    title: str = ""


@attrs.frozen
class Size:
    """Size of a figure.

    Attributes:
        width: Inches.
        height: Inches; the figure is higher if its legend or other texts need much of it.
        font_size: Points.
        dpi: Pixels per inch of a PNG.
    """

    width: float = WIDTHS["column"]
    height: float = 2.3
    font_size: float = 8.0
    dpi: int = 300


def save_figure(
    paths: Sequence[Path], size: Size, draw: "Callable[[Figure], LegendContent]"
) -> None:
    """Draw a figure and write it to files, with one legend for all of its axes below them.

    Args:
        paths: The files; the suffix of each is one of `FORMATS`.
        size: Size of the figure.
        draw: Draws the axes and returns the content of the legend.

    Raises:
        OutputError: A file cannot be written, or has another suffix, or the figure is too small
            for its labels.
    """
    for path in paths:
        if path.suffix.lower() not in FORMATS:
            msg = f"{path} cannot be drawn in this format; end it in {', '.join(FORMATS)}."
            raise OutputError(msg)
    # Imported here: matplotlib takes a second, and most commands draw nothing.
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without dates, the same points give the same bytes.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    with mpl.rc_context(_STYLE | {"font.size": size.font_size}):
        figure = Figure(figsize=(size.width, size.height), layout="constrained")
        _lay_out(figure, draw(figure), size)
        for path in paths:
            suffix = path.suffix.lower()
            image = io.BytesIO()
            figure.savefig(image, format=suffix[1:], dpi=size.dpi, metadata=metadata.get(suffix))
            atomic_write(path, image.getvalue())


def line_look(look: Look) -> dict[str, Any]:
    """A look as arguments of matplotlib's lines."""
    return {
        "color": COLOURS[look.colour].light,
        "marker": look.marker,
        "linestyle": (0, look.dashes) if look.dashes else "solid",
        "markersize": _MARKER_SIZES.get(look.marker, 5.5),
        "markeredgecolor": "white",
        "markeredgewidth": 0.6,
    }


def legend_entry(look: Look, **changes: Any) -> "Line2D":
    """A line for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **(line_look(look) | {"linewidth": 1.6} | changes))


def drawable(text: str) -> str:
    r"""A text in letters that the figure's font has; others are escaped, such as ``\u6f22``."""
    return "".join(
        c if ord(c) in _letters() else c.encode("unicode_escape").decode() for c in visible(text)
    )


@cache
def _letters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont, get_font

    fonts = [FontProperties(family="sans-serif", weight=weight) for weight in ("normal", "bold")]
    letters = [set(get_font(findfont(font)).get_charmap()) for font in fonts]
    return frozenset(set.intersection(*letters))


def _lay_out(figure: "Figure", content: LegendContent, size: Size) -> None:
    """Fit all texts into the figure.

    Raises:
        OutputError: It is too small.
    """
    with warnings.catch_warnings():
        # Said by the error below, in words of the user.
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        legend = _add_legend(figure, content)
        if legend is not None:
            height = legend.get_window_extent().height / figure.dpi
            figure.set_figheight(size.height + max(0.0, height - _MAX_LEGEND_SHARE * size.height))
        titles = _titles(figure, size)
        for share in _SHARES_OF_TITLES:
            for title in titles:
                title.fit(share)
            _grow(figure, size)
            for axes in figure.axes:
                _thin_out_ticks(axes)
            for _ in range(2):  # the layout changes ticks, and ticks the layout
                figure.draw_without_rendering()
            if all(_has_room(figure, axes, size) for axes in figure.axes):
                break
        else:
            msg = (
                f"a figure of {size.width:g} x {size.height:g} inches has no room for its labels "
                f"at {size.font_size:g} points; give it more width, or a smaller font."
            )
            raise OutputError(msg)


def _grow(figure: "Figure", size: Size) -> None:
    """Make a figure higher until its axes have their share of the height that was asked for."""
    for _ in range(_MAX_GROWTHS):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            figure.draw_without_rendering()
        heights = [axes.get_window_extent().height / figure.dpi for axes in figure.axes]
        # Axes without any room are not laid out at all, which matplotlib warns of.
        missing = _LEAST_SHARE * size.height - (0 if caught else min(heights))
        if missing <= 0:
            return
        figure.set_figheight(figure.get_figheight() + missing)


def _has_room(figure: "Figure", axes: "Axes", size: Size) -> bool:
    """Whether axes are large enough to read, and all of their labels within the figure."""
    inner = axes.get_window_extent()
    outer = [axes.xaxis.get_tightbbox(), axes.yaxis.get_tightbbox()]
    least = _LEAST_AXES * size.font_size / 72 * figure.dpi
    slack = 1.0  # pixels, for rounding
    return min(inner.width, inner.height) >= least and all(
        min(box.x0, box.y0) >= -slack
        and box.x1 <= figure.bbox.width + slack
        and box.y1 <= figure.bbox.height + slack
        for box in outer
        if box is not None
    )


def _add_legend(figure: "Figure", content: LegendContent) -> "Legend | None":
    """Add a legend below the axes, in as many columns as fit; one column is wrapped to fit."""
    if not content.entries:
        return None
    labels = [drawable(label) for label, _ in content.entries]
    handles = [handle for _, handle in content.entries]
    title = drawable(content.title)
    room = 0.98 * figure.bbox.width

    def place(letters: int, num_columns: int) -> "Legend":
        filled = [_fill(label, letters) for label in labels]
        return _place_legend(figure, handles, filled, _fill(title, letters), num_columns)

    letters = max(map(len, [*labels, title]))
    for num_columns in range(min(len(labels), _MAX_LEGEND_COLUMNS), 0, -1):
        legend = place(letters, num_columns)
        if legend.get_window_extent().width <= room:
            return legend
        legend.remove()
    while letters > _SHORTEST_LINE:
        letters = _fewer(letters)
        legend = place(letters, 1)
        if legend.get_window_extent().width <= room:
            return legend
        legend.remove()
    return place(_SHORTEST_LINE, 1)


def _place_legend(
    figure: "Figure",
    handles: "Sequence[Artist]",
    labels: Sequence[str],
    title: str,
    num_columns: int,
) -> "Legend":
    numbers = [str(number) for number in range(len(labels))]
    legend = figure.legend(
        handles,
        numbers,
        loc="outside lower center",
        ncols=num_columns,
        title=title or None,
        alignment="left",
    )
    # Set afterwards: matplotlib leaves labels out that begin with an underscore.
    for text, label in zip(legend.get_texts(), labels, strict=True):
        text.set_text(label)
    return legend


@attrs.frozen
class _Title:
    """A title or the name of an axis, which may be wrapped."""

    text: "Text"
    whole: str
    room: float  # pixels
    is_upright: bool = False

    def fit(self, share: float) -> None:
        """Break the text into lines no longer than a share of its room."""
        letters = len(self.whole)
        self.text.set_text(self.whole)
        while letters > _SHORTEST_LINE and self._length() > share * self.room:
            letters = _fewer(letters)
            self.text.set_text(_fill(self.whole, letters))

    def _length(self) -> float:
        box = self.text.get_window_extent()
        return float(box.height if self.is_upright else box.width)


def _titles(figure: "Figure", size: Size) -> list[_Title]:
    """Titles of the figure and of its axes, and the names of these."""
    width = figure.bbox.width / max(len(figure.axes), 1)
    texts = [(text, 1.2 * figure.bbox.width, False) for text in figure.texts]
    for axes in figure.axes:
        heading = axes.set_title(axes.get_title(loc="left"))
        texts += [(heading, width, False), (axes.xaxis.label, width, False)]
        texts += [(axes.yaxis.label, size.height * figure.dpi, True)]
    return [_Title(text, drawable(text.get_text()), room, up) for text, room, up in texts]


def _fewer(letters: int) -> int:
    return max(min(letters - 1, int(0.95 * letters)), _SHORTEST_LINE)


def _fill(text: str, letters: int) -> str:
    return textwrap.fill(text, letters, break_on_hyphens=False)


def _thin_out_ticks(axes: "Axes") -> None:
    """Leave out labels of the horizontal axis that would touch the one before."""
    end = float("-inf")
    for label in axes.get_xticklabels():
        box = label.get_window_extent()
        if not label.get_text():
            continue
        if box.x0 < end:
            label.set_visible(False)
        else:
            end = box.x1 + 0.3 * box.height
