"""The options that make a sweep: what is compared, on what, and how lists are combined."""

import tomllib
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvpolicy.cli.options import split_list
from kvpolicy.errors import KVPolicyError

if TYPE_CHECKING:
    from kvpolicy.lab.sweep.sweep_file import Preset


class SplitName(Enum):
    """Where the problems come from."""

    test = "test"
    tune = "tune"
    train = "train"


PresetName = Annotated[
    str | None,
    typer.Option("--preset", metavar="NAME|FILE", help="A sweep. [default: baselines]"),
]
Stacks = Annotated[
    str | None,
    typer.Option(metavar="NAME,...", help="Policies to compare instead; in A+B, B wraps A."),
]
Plans = Annotated[
    list[Path] | None,
    typer.Option("--plan", metavar="FILE|NAME", help="A plan to compare; may be repeated."),
]
Budgets = Annotated[
    str | None,
    typer.Option(
        metavar="N,...", help="Rows that stay per layer and KV head. [default: the preset's]"
    ),
]
Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=V1,V2,...",
        help="Values to try of POLICY.KNOB, or of buffer; may be repeated.",
    ),
]
Zip = Annotated[
    bool,
    typer.Option("--zip", help="Go through all lists side by side instead of combining them."),
]
Models = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        metavar="NAME|FOLDER",
        help="Name of an installed model, hub id or local folder; may be repeated. "
        "[default: the preset's]",
    ),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(
        "--task",
        metavar="NAME|FILE|ID",
        help="What is asked: a task, a file or a hub id, with options as NAME:KEY=VALUE,...; "
        "may be repeated. [default: the preset's]",
    ),
]
Seeds = Annotated[
    str | None,
    typer.Option("--seeds", "--seed", metavar="N,...", help="Each chooses problems. [default: 0]"),
]
NumItems = Annotated[
    int | None,
    typer.Option("--n", min=1, help="Problems for each cell. [default: the preset's]"),
]
Split = Annotated[
    SplitName | None,
    typer.Option(help="Problems to report on, or to tune settings on. [default: test]"),
]
Attempts = Annotated[
    int | None, typer.Option(min=1, help="Times each problem is asked, for pass@1.")
]


def numbers(option: str, text: str | None) -> list[int]:
    """The numbers between the commas of an option, from 0.

    Args:
        option: Name of the option, for the message.
        text: Such as ``"0,1"``.

    Raises:
        KVPolicyError: One of them is not a whole number.
    """
    found = split_list(text)
    wrong = [word for word in found if not (word.isascii() and word.isdigit())]
    if wrong or (text is not None and not found):
        came = repr(wrong[0]) if wrong else "no number"
        msg = f"{option} was given {came}; whole numbers are wanted: {option} 0,1."
        raise KVPolicyError(msg)
    return [int(word) for word in found]


def grid_of(texts: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """The values to try of each knob.

    Args:
        texts: Such as ``"rkv.mix_lambda=0.1,0.2"``; the values are those of a list in TOML, and
            what is no TOML is texts between commas.

    Raises:
        KVPolicyError: One of them is malformed, or a knob is given twice.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for text in texts:
        path, equals, listed = text.partition("=")
        key = path.strip()
        values = _values(listed)
        if not (key and equals and values):
            msg = f"--grid {text!r} is not KEY=V1,V2; write for example POLICY.KNOB=0.1,0.2."
            raise KVPolicyError(msg)
        if key in found:
            msg = f"--grid was given '{key}' twice; list all its values in one: {key}=V1,V2."
            raise KVPolicyError(msg)
        found[key] = tuple(values)
    return found


def changed(preset: "Preset", **given: Any) -> "Preset":
    """A sweep with what the command line says instead.

    Args:
        preset: The sweep.
        **given: Fields of `Preset`; what is ``None`` or an empty tuple was not given.
    """
    import attrs

    return attrs.evolve(preset, **{k: v for k, v in given.items() if v is not None and v != ()})


def _values(text: str) -> list[Any]:
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except (ValueError, RecursionError):
        return split_list(text)
