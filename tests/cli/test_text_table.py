"""Tables as text: every width shows every cell, and numbers in one piece."""

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from kvpolicy.cli.text_table import format_table


def test_numbers_are_aligned_right_and_text_left() -> None:
    table = format_table(["name", "n"], [["a", "1"], ["long", "1000"]], right=[1])
    assert table.splitlines() == ["name     n", "────  ────", "a        1", "long  1000"]


def test_columns_move_closer_before_a_line_is_too_long() -> None:
    rows = [["a" * 10, "b" * 10]]
    assert format_table(["x", "y"], rows, width=22).splitlines()[2] == f"{'a' * 10}  {'b' * 10}"
    assert format_table(["x", "y"], rows, width=21).splitlines()[2] == f"{'a' * 10} {'b' * 10}"
    assert format_table(["x", "y"], rows, width=5).splitlines()[2] == f"{'a' * 10} {'b' * 10}"


@given(
    st.lists(st.tuples(st.text("ab[]", max_size=9), st.text("cd ", max_size=80)), max_size=5),
    st.integers(40, 90),
)
def test_the_last_column_is_wrapped_to_fit(rows: list[tuple[str, str]], width: int) -> None:
    table = format_table(["name", "words"], rows, width=width)
    words = [word for _, text in rows for word in text.split()]
    if all(len(word) <= 20 for word in words):
        assert max(map(len, table.splitlines())) <= width
        assert [w for w in table.split() if set(w) <= set("cd")] == words
    assert all(name in table for name, _ in rows)


def test_headings_are_wrapped_before_names_are_folded() -> None:
    headers = ["policy", "accuracy, 95 % CI", "largest sample"]
    row = ["StreamingLLM, sinks 4", "100% 96-100%", "1.5 MiB"]
    lines = format_table(headers, [row], right=[1, 2], width=43).splitlines()
    assert lines == [
        "                         accuracy, largest",
        "policy                     95 % CI  sample",
        "───────────────────── ──────────── ───────",
        "StreamingLLM, sinks 4 100% 96-100% 1.5 MiB",
    ]
    narrow = format_table(headers, [row], right=[1, 2], width=35).splitlines()
    assert narrow[-2:] == ["StreamingLLM,  100% 96-100% 1.5 MiB", "sinks 4"]


def test_columns_that_do_not_fit_follow_in_a_block_with_the_names() -> None:
    headers = ["policy", "budget", "accuracy", "length", "tok/s"]
    rows = [["full cache", "all", "100%", "307", "1,279"], ["H2O", "96", "17%", "385", "644"]]
    table = format_table(headers, rows, right=range(1, 5), keys=2, width=27)
    assert table.splitlines() == [
        "policy     budget accuracy",
        "────────── ────── ────────",
        "full cache    all     100%",
        "H2O            96      17%",
        "",
        "policy     budget length",
        "────────── ────── ──────",
        "full cache    all    307",
        "H2O            96    385",
        "",
        "policy     budget tok/s",
        "────────── ────── ─────",
        "full cache    all 1,279",
        "H2O            96   644",
    ]


WORDS = st.lists(st.text("ab_漢=", min_size=1, max_size=30), min_size=1, max_size=4).map(" ".join)
FIGURES = st.text("0123456789,.%", min_size=1, max_size=9)


@given(
    names=st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=4),
    headers=st.lists(WORDS, min_size=3, max_size=8),
    width=st.one_of(st.none(), st.integers(40, 200)),
    data=st.data(),
)
def test_a_table_of_any_width_has_every_figure_and_every_letter_of_names(
    names: list[tuple[str, str]], headers: list[str], width: int | None, data: st.DataObject
) -> None:
    num = len(headers) - 2
    figures = [data.draw(st.lists(FIGURES, min_size=num, max_size=num)) for _ in names]
    rows = [[*pair, *line] for pair, line in zip(names, figures, strict=True)]
    table = format_table(headers, rows, right=range(2, len(headers)), width=width)
    assert all(one in table.split() for line in figures for one in line)
    blocks = table.split("\n\n")
    for one in dict.fromkeys(name for pair in names for name in pair):
        for letter in set(one) - {" "}:
            times = sum(pair[0].count(letter) + pair[1].count(letter) for pair in names)
            assert table.count(letter) >= times * len(blocks)
    if width is None:
        assert len(blocks) == 1
        assert all(one in table for pair in names for one in pair)
    # Two names of 12 characters, one figure with the longest word of its heading, two gaps.
    longest = [
        max(map(cell_len, [*h.split(), *c]))
        for h, c in zip(headers[2:], zip(*figures, strict=True), strict=True)
    ]
    if width is not None and 12 + 12 + max(longest) + 2 <= width:
        heading = max(cell_len(word) for header in headers[:2] for word in header.split())
        if heading <= 12:
            assert max(map(cell_len, table.splitlines())) <= width


def test_a_table_of_nothing_has_its_headings() -> None:
    assert format_table(["a", "b"], [], right=[1], width=10).splitlines() == ["a  b", "─  ─"]
    assert format_table(["n"], [["1"]], right=[0], width=1).splitlines() == ["n", "─", "1"]
