"""Tables for papers, in LaTeX with the package booktabs."""

from collections.abc import Collection, Sequence

_ESCAPES = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\N{MINUS SIGN}": "$-$",
}


def format_latex(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Collection[int] = ()
) -> str:
    """Lay out a table as a ``tabular`` environment.

    Args:
        headers: Names of the columns.
        rows: Cells, as many in each row as there are headers.
        right: Columns to align right, by index.

    Returns:
        The lines, with a newline after each but the last.
    """
    columns = "".join("r" if i in right else "l" for i in range(len(headers)))
    lines = [_line(headers), r"\midrule", *map(_line, rows)]
    begin = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
    return "\n".join([*begin, *lines, r"\bottomrule", r"\end{tabular}"])


def _line(cells: Sequence[str]) -> str:
    return " & ".join(map(_escaped, cells)) + r" \\"


def _escaped(text: str) -> str:
    # One line, without control characters and the blanks that align columns of text.
    words = "".join(letter if letter.isprintable() else " " for letter in text).split()
    return " ".join("".join(_ESCAPES.get(letter, letter) for letter in word) for word in words)
