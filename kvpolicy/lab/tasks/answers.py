"""Extraction of answers from generated texts: the last box, the last block of code."""

import re


def extract_answer(text: str) -> str | None:
    r"""Return the content of the last balanced ``\\boxed{...}`` of a text.

    Args:
        text: A generated text.

    Returns:
        The content without surrounding white space; ``None`` if no box is closed.
    """
    answer = None
    for box in re.finditer(r"\\boxed\{", text):
        end = _closing_brace(text, box.end())
        if end is not None:
            answer = text[box.end() : end].strip()
    return answer


def without_thought(text: str) -> str:
    """Return what stands behind the last ``</think>`` of a text; all of it if there is none.

    Args:
        text: A generated text.
    """
    return text.rpartition("</think>")[2]


def extract_code(text: str) -> str | None:
    """Return the last fenced block of a text; ``None`` if no block is closed.

    Args:
        text: A generated text.
    """
    blocks = re.findall(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```[ \t]*$", text, re.M | re.S)
    return blocks[-1] if blocks else None


def _closing_brace(text: str, start: int) -> int | None:
    depth = 1
    for index in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return None
