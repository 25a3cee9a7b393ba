"""Tables as plain text that fit the terminal; numbers are never cut."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest

import attrs
from rich.cells import cell_len

from kvpolicy.text import visible

_NARROWEST_TEXT = 20  # a wrapped column below this many characters is worse than a long line
_NARROWEST_NAME = 12  # a name folded to fewer characters cannot be read

# How a table is narrowed, each step besides those before it.
_AS_IS, _CLOSER, _WRAP_HEADERS, _FOLD_NAMES = range(4)


def format_table(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[int] = (),
    keys: int | None = None,
    width: int | None = None,
) -> str:
    """Lay out a table as plain text.

    A table that is too wide is narrowed in this order, as far as needed: columns move closer and
    a last column of text is wrapped; headings are wrapped; names are folded; the table is cut
    into blocks below each other, each of which begins with the columns that name the rows.

    Args:
        headers: Names of the columns.
        rows: Cells, as many in each row as there are headers. Control characters and line breaks
            are shown as escapes.
        right: Columns to align right, by index. They hold numbers, which are never folded.
        keys: Number of first columns that name a row; by default those before the first one in
            ``right``, and one if that is empty.
        width: Characters of a line; no limit by default. Lines are longer only where the first
            columns and a single other one do not fit.

    Returns:
        The lines, with a newline after each but the last; an empty line between blocks.
    """
    columns = [
        _Column(
            visible(header),
            [visible(row[i]) for row in rows],
            is_right=i in right,
            is_text=i == len(headers) - 1 and i not in right,
        )
        for i, header in enumerate(headers)
    ]
    num_keys = min(right, default=1) if keys is None else keys
    blocks = _blocks(columns[:num_keys], columns[num_keys:], width)
    return "\n\n".join("\n".join(block.lines()) for block in blocks)


@attrs.frozen
class _Column:
    header: str
    cells: Sequence[str]
    is_right: bool
    is_text: bool

    def widest(self, step: int) -> int:
        """Characters of the longest cell, or of the heading or its longest word."""
        words = self.header.split() if step >= _WRAP_HEADERS else [self.header]
        return max(map(cell_len, [*words, *self.cells]), default=0)

    def narrowest(self, step: int) -> int:
        """Characters to which the column may be narrowed."""
        widest = self.widest(step)
        if self.is_text and step >= _CLOSER:
            return min(widest, _NARROWEST_TEXT)
        if not self.is_right and step >= _FOLD_NAMES:
            return min(widest, _NARROWEST_NAME)
        return widest


@attrs.frozen
class _Block:
    """Columns beside each other, with their widths and the characters between them."""

    columns: Sequence[_Column]
    widths: Sequence[int]
    gap: int

    def lines(self) -> Iterator[str]:
        headings = [
            _balanced(column.header, width)
            for column, width in zip(self.columns, self.widths, strict=True)
        ]
        most = max(map(len, headings), default=0)
        yield from self._row([[""] * (most - len(lines)) + lines for lines in headings])
        yield self._line(["─" * width for width in self.widths])
        for cells in zip(*(column.cells for column in self.columns), strict=True):
            yield from self._row(map(_folded, cells, self.widths))

    def _row(self, cells: Iterable[list[str]]) -> Iterator[str]:
        return map(self._line, zip_longest(*cells, fillvalue=""))

    def _line(self, parts: Sequence[str]) -> str:
        padded = []
        for part, width, column in zip(parts, self.widths, self.columns, strict=True):
            pad = " " * (width - cell_len(part))
            padded.append(pad + part if column.is_right else part + pad)
        return (" " * self.gap).join(padded).rstrip()


def _blocks(
    keys: Sequence[_Column], others: Sequence[_Column], width: int | None
) -> Iterator[_Block]:
    for step in (_AS_IS, _CLOSER, _WRAP_HEADERS, _FOLD_NAMES):
        block = _narrowed([*keys, *others], step, width)
        if _fits(block, width):
            yield block
            return
    left = list(others)
    while left:
        tried = (_narrowed([*keys, *left[:n]], _FOLD_NAMES, width) for n in range(len(left), 0, -1))
        one_more = _narrowed([*keys, left[0]], _FOLD_NAMES, width)
        block = next((one for one in tried if _fits(one, width)), one_more)
        yield block
        left = left[len(block.columns) - len(keys) :]


def _fits(block: _Block, width: int | None) -> bool:
    return width is None or sum(block.widths) + block.gap * (len(block.widths) - 1) <= width


def _narrowed(columns: Sequence[_Column], step: int, width: int | None) -> _Block:
    """Columns beside each other, the widest ones narrowed as far as the step allows."""
    gap = 1 if step >= _CLOSER else 2
    widest = [column.widest(step) for column in columns]
    narrowest = [column.narrowest(step) for column in columns]
    block = _Block(columns, widest, gap)
    for most in range(max(widest, default=0) - 1, 0, -1):
        if _fits(block, width):
            break
        widths = map(min, widest, map(max, narrowest, [most] * len(columns)))
        block = _Block(columns, list(widths), gap)
    return block


def _folded(text: str, width: int) -> list[str]:
    """A text in lines of a width, cut at spaces where possible."""
    if cell_len(text) <= width:
        return [text]
    from rich.console import Console
    from rich.text import Text

    lines = Text(text).wrap(Console(width=width), width, overflow="fold")
    return [line.plain.rstrip() for line in lines]


def _balanced(heading: str, width: int) -> list[str]:
    """The same in lines that are about equally long, such as ``accuracy, / 95 % CI``."""
    lines = _folded(heading, width)
    shortest = max(map(cell_len, heading.split()), default=0)
    for narrower in range(shortest, width):
        tried = _folded(heading, narrower)
        if len(tried) == len(lines):
            return tried
    return lines
