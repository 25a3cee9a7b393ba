"""What goes to the two outputs: results to stdout, everything about them to stderr."""

import json
import sys
from typing import Any

import typer


def say(message: str) -> None:
    """Tell the user something that is not a result.

    Args:
        message: One or more sentences.
    """
    typer.echo(f"kvpolicy: {message}", err=True)


def write(text: str) -> None:
    """Write a part of a result, as it is, at once.

    Args:
        text: What to write; no newline is added.
    """
    sys.stdout.write(text)
    sys.stdout.flush()


def write_json(value: Any, *, indent: int | None = None) -> None:
    """Write a result for machines.

    Args:
        value: Plain data.
        indent: Spaces per level; everything on one line if not given.
    """
    write(json.dumps(value, ensure_ascii=False, indent=indent) + "\n")
