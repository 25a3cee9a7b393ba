"""What goes to the two outputs: results to stdout, everything about them to stderr."""

import json
import sys
from shutil import get_terminal_size
from typing import Any

import typer

from kvpolicy.errors import OutputError


def say(message: str) -> None:
    """Tell the user something that is not a result.

    Args:
        message: One or more sentences.
    """
    typer.echo(f"kvpolicy: {message}", err=True)


def sentence(message: str) -> str:
    """A message as one sentence, whoever worded it.

    Args:
        message: Such as ``"Invalid value"``.
    """
    begins_with_a_word = message[:1].isupper() and message[1:2].islower()
    words = message[:1].lower() + message[1:] if begins_with_a_word else message
    return words if words.endswith((".", "?", "!")) else f"{words}."


def write(text: str) -> None:
    """Write a part of a result, as it is, at once.

    Args:
        text: What to write; no newline is added.

    Raises:
        OutputError: It cannot be written, because the disk is full for example.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except UnicodeEncodeError:
        # A terminal of few letters, or a letter that is none: the rest as Python writes it.
        encoding = sys.stdout.encoding or "utf-8"
        write(text.encode(encoding, "backslashreplace").decode(encoding))
    except BrokenPipeError:
        raise  # the reader has seen enough, and nothing is wrong
    except OSError as error:
        raise cannot_write(error) from error


def cannot_write(error: OSError) -> OutputError:
    """What is raised when results have nowhere to go.

    Args:
        error: What the system says.
    """
    reason = error.strerror or error
    return OutputError(f"standard output cannot be written: {reason}; free some space")


def terminal_width() -> int | None:
    """Characters in a line of the terminal that results go to; none if they go elsewhere."""
    return get_terminal_size().columns if sys.stdout.isatty() else None


def write_json(value: Any, *, indent: int | None = None) -> None:
    """Write a result for machines.

    Args:
        value: Plain data.
        indent: Spaces per level; everything on one line if not given.
    """
    write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")
