"""Tables in LaTeX: columns and rows stay what they are, whatever characters are in them."""

from hypothesis import given
from hypothesis import strategies as st

from kvpolicy.cli.latex import format_latex


def test_a_table_as_it_is_printed() -> None:
    shown = format_latex(
        ["policy", "KV_cache"], [["R-KV & co", "5 %"], ["a\\b", "\u22121"]], right=[1]
    )
    assert shown == (
        "\\begin{tabular}{lr}\n\\toprule\n"
        "policy & KV\\_cache \\\\\n\\midrule\n"
        "R-KV \\& co & 5 \\% \\\\\n"
        "a\\textbackslash{}b & $-$1 \\\\\n"
        "\\bottomrule\n\\end{tabular}"
    )


@given(st.lists(st.lists(st.text(max_size=8), min_size=3, max_size=3), max_size=4))
def test_no_cell_breaks_the_table(rows: list[list[str]]) -> None:
    lines = format_latex(["a", "b", "c"], rows).split("\n")
    assert len(lines) == len(rows) + 6
    for line in lines[4:-2]:
        text = line.removesuffix(r" \\").replace(r"\&", "").replace(r"\%", "").replace(r"\#", "")
        assert text.count("&") == 2
        assert not {"%", "#"} & set(text)
