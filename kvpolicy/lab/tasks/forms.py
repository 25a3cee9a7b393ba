"""The forms in which question sets come, each known by its columns."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvpolicy.errors import TaskError
from kvpolicy.lab.tasks.task import Item

# What DeepSeek-R1's authors ask for mathematics, after the question and in the user's words.
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


@attrs.frozen
class Form:
    """One way to write questions down.

    Attributes:
        name: What messages call it.
        columns: Columns that tell it from others.
        read: Makes an item of a row; its index is filled in later.
    """

    name: str
    columns: frozenset[str]
    read: Callable[[Mapping[str, Any]], Item]


def read_gsm8k(row: Mapping[str, Any]) -> Item:
    """A word problem: ``question``, and ``answer`` with the number after the last ``####``."""
    solution, marks, number = str(row["answer"]).rpartition("####")
    if not marks:
        msg = f"an answer has no '####' before its number: {row['answer']!r:.60}"
        raise TaskError(msg)
    # 1,000 is a thousand here, and never the pair (1, 000).
    answer = number.strip().replace(",", "")
    # The calculator's notes between angle brackets are no text that anybody says.
    reference = re.sub(r"<<.*?>>", "", solution).strip()
    steps = len([line for line in solution.splitlines() if line.strip()])
    return _question(row["question"], answer, {"steps": steps}, reference)


def read_math(row: Mapping[str, Any]) -> Item:
    """A problem of MATH: ``problem``, ``answer``, and mostly ``level`` and ``subject``."""
    facets = {key: row[key] for key in ("level", "subject") if row.get(key) is not None}
    return _question(row["problem"], str(row["answer"]), facets, row.get("solution"))


def read_aime(row: Mapping[str, Any]) -> Item:
    """A problem of AIME: ``Problem`` and ``Answer``, with an ``ID`` such as ``2024-I-4``."""
    found = re.fullmatch(r"\d+-(I+)-(\d+)", str(row.get("ID", "")))
    facets: dict[str, int | str] = {}
    if found:
        facets = {"paper": found[1], "number": int(found[2])}
    return _question(row["Problem"], str(row["Answer"]), facets, row.get("Solution"))


def read_plain(row: Mapping[str, Any]) -> Item:
    """A question of one's own: ``prompt``, ``answer``; other numbers and words are facets."""
    others = {key: value for key, value in row.items() if key not in _PLAIN}
    facets = {k: v for k, v in others.items() if type(v) in (int, str) and len(str(v)) <= 40}
    return Item(
        index=0,
        prompt=str(row["prompt"]),
        answer=str(row.get("answer", "")),
        facets=facets,
        reference=row.get("reference"),
        chat=True,
    )


def read_text(row: Mapping[str, Any]) -> Item:
    """A text that asks nothing: ``text``."""
    return Item(index=0, prompt="", answer="", reference=str(row["text"]))


GSM8K = Form("GSM8K", frozenset({"question", "answer"}), read_gsm8k)
MATH = Form("MATH", frozenset({"problem", "answer"}), read_math)
AIME = Form("AIME", frozenset({"Problem", "Answer"}), read_aime)
PLAIN = Form("plain questions", frozenset({"prompt"}), read_plain)
TEXT = Form("texts", frozenset({"text"}), read_text)

FORMS = (GSM8K, MATH, AIME, PLAIN, TEXT)

_PLAIN = frozenset({"prompt", "answer", "reference"})


def form_of(row: Mapping[str, Any], source: str) -> Form:
    """Tell by its columns in which form a data set comes.

    Args:
        row: Any row of it.
        source: Where it is from, for the message.

    Raises:
        TaskError: It is none we know.
    """
    for form in FORMS:
        if form.columns <= row.keys():
            return form
    known = "; ".join(f"{', '.join(sorted(form.columns))} ({form.name})" for form in FORMS)
    msg = f"'{source}' has the columns {', '.join(row)}; known are: {known}"
    raise TaskError(msg)


def read(form: Form, row: Mapping[str, Any], source: str) -> Item:
    """Make an item of a row.

    Args:
        form: The form.
        row: The row.
        source: Where it is from, for the message.

    Raises:
        TaskError: The row has not the columns of the form, or says nothing it can read.
    """
    missing = form.columns - row.keys()
    if missing:
        msg = f"'{source}' has no column {', '.join(sorted(missing))}, which {form.name} has"
        raise TaskError(msg)
    try:
        return form.read(row)
    except TaskError as error:
        msg = f"'{source}': {error}"
        raise TaskError(msg) from error


def _question(
    question: object, answer: str, facets: Mapping[str, int | str], reference: object
) -> Item:
    return Item(
        index=0,
        prompt=f"{question}\n\n{INSTRUCTION}",
        answer=answer,
        facets=dict(facets),
        reference=None if reference is None else str(reference),
        chat=True,
    )
