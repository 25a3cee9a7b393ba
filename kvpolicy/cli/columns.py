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
        width: Characters a line may take: the last column is wrapped to fit. No limit if
            not given.

    Returns:
        The lines, with a newline after each but the last.
    """
    table = [list(headers), *[list(row) for row in rows]]
    widths = [max(len(row[i]) for row in table) for i in range(len(headers))]
    if width is not None:
        before = sum(widths[:-1]) + len(_GAP) * (len(widths) - 1)
        widths[-1] = min(widths[-1], max(width - before, _NARROWEST))
    rule = ["─" * w for w in widths]
    lines = [_line(table[0], widths, right), _GAP.join(rule)]
    for row in table[1:]:
        wrapped = textwrap.wrap(row[-1], widths[-1], break_on_hyphens=False) or [""]
        lines.append(_line([*row[:-1], wrapped[0]], widths, right))
        blank = [""] * (len(row) - 1)
        lines += [_line([*blank, rest], widths, right) for rest in wrapped[1:]]
    return "\n".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int], right: Sequence[int]) -> str:
    set_cells = [
        cell.rjust(width) if i in right else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return _GAP.join(set_cells).rstrip()
