"""Tables of plain text, for terminals and for logs, without a library to import."""

import textwrap
from collections.abc import Sequence

_GAP = "  "
_NARROWEST = 20  # a wrapped column below this many characters is worse than a long line


def columns(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """Lay out a table.

    Args:
        headers: Names of the columns.
        rows: Cells, as many in each row as there are headers.
        right: Columns whose cells are numbers and are set flush right.
        width: Characters a line may take: columns move closer, and words of the last one
            are wrapped, as far as that helps. No limit if not given.

    Returns:
        The lines, with a newline after each but the last.
    """
    table = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(headers))]
    gap = _GAP
    if width is not None:
        gap = _GAP if sum(widths) + len(_GAP) * (len(widths) - 1) <= width else " "
        before = sum(widths[:-1]) + len(gap) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(width - before, _NARROWEST))
    lines = [_line(table[0], widths, right, gap), gap.join("─" * w for w in widths)]
    for row in table[1:]:
        wrapped = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]
        lines.append(_line([*row[:-1], wrapped[0]], widths, right, gap))
        blank = [""] * (len(row) - 1)
        lines += [_line([*blank, rest], widths, right, gap) for rest in wrapped[1:]]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int], gap: str) -> str:
    set_cells = [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return gap.join(set_cells).rstrip()
