"""Options that several commands share, so that they read and work alike everywhere."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpolicy.entry_points import default_name
from kvpolicy.errors import KVPolicyError, OutputError
from kvpolicy.plan.spec import SHARE

# The default of --model; ``None`` if no installed package sets one.
DEFAULT_MODEL: Any = default_name("model")


def _model_or_default(model: str | None) -> str:
    if model is None:
        msg = (
            "no model was named, and no installed package sets a default: give --model with a "
            "hub id or a local folder."
        )
        raise KVPolicyError(msg)
    return model


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Plugins = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A Python file whose policies become available by name; may be repeated.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change an entry of the plan: buffer=16, POLICY.KNOB=0.5; may be repeated.",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        metavar="NAME|FOLDER",
        callback=_model_or_default,
        help="Name of an installed model, hub id or local folder.",
    ),
]
Dtype = Annotated[str, typer.Option(metavar="NAME", help="auto, float32, bfloat16 or float16.")]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="Such as cpu or cuda:0. [default: cuda, or cpu]")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
]
PromptText = Annotated[
    str | None, typer.Argument(help="A prompt; '-' reads one from standard input.")
]
PromptFile = Annotated[
    str | None,
    typer.Option("--file", metavar="FILE|-", help="Prompts, one per line, or JSON lines."),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="FILE|NAME", help="A plan, as TOML.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        metavar="NAME",
        help="A policy; repeat it, or write A+B, for B to wrap A.",
    ),
]
Budget = Annotated[
    str | None, typer.Option(metavar="N|N%", help="Rows that stay per layer and KV head.")
]
Buffer = Annotated[int | None, typer.Option(help="Rows that may join before a compaction.")]
Length = Annotated[
    int | None, typer.Option(min=1, help="Tokens that a budget of N% is a share of.")
]
Temperature = Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Draw from the likeliest tokens up to this.")]
TopK = Annotated[int, typer.Option(min=0, help="Draw from so many; 0 means all.")]
Seed = Annotated[int, typer.Option(min=0, help="Of the drawing.")]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(min=1, help="The most tokens to generate. [default: the model's, or 1024]"),
]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Ends a text; may be repeated.")
]
Chat = Annotated[bool, typer.Option("--chat", help="Wrap prompts in the model's chat template.")]
RunningBatch = Annotated[int, typer.Option(min=1, help="Prompts decoded together.")]


def register_plugins(plugins: list[Path] | None) -> None:
    """Make the policies of the files given with ``--plugin`` available.

    Args:
        plugins: The files.

    Raises:
        PolicyLoadError: A file cannot be read or run, or holds no policy.
    """
    if plugins:
        from kvpolicy.hooks.discovery import register_file

        for path in plugins:
            register_file(path)


def check_new_file(output: Path, suffix: str = "", *, option: str = "--output") -> None:
    """Before hours of work, not after: whether a new file can be written.

    Args:
        output: The file that the option names.
        suffix: How its name is to end.
        option: The option, for the message.

    Raises:
        OutputError: It is there already, has no folder to go to, or another ending.
    """
    problem = None
    if not output.name.endswith(suffix):
        problem = f"does not end in {suffix}"
    elif os.path.lexists(output):
        problem = "exists"
    elif not output.parent.is_dir():
        problem = f"has no folder {output.parent} to go to"
    elif not os.access(output.parent, os.W_OK):
        problem = f"cannot be written: folder {output.parent} is read-only"
    if problem is not None:
        msg = f"output file {output} {problem}; choose another one with {option}."
        raise OutputError(msg)


def rows_or_share(option: str, text: str | None) -> str | None:
    """A budget as a plan has it: a number of rows, or a share such as ``"25%"``.

    Args:
        option: Name of the option, for the message.
        text: What was given, if anything.

    Raises:
        KVPolicyError: It is neither.
    """
    if text is None or re.fullmatch(r"-?[0-9]+", text) or re.fullmatch(SHARE, text):
        return text
    msg = f"{option} was given {text!r}; a number of rows is wanted, or a share: 128, 25%."
    raise KVPolicyError(msg)


def words(text: str | None) -> list[str]:
    """What stands between the commas of an option.

    Args:
        text: Such as ``"a, b"``.
    """
    return [word.strip() for word in (text or "").split(",") if word.strip()]


def counts(option: str, text: str | None) -> list[int]:
    """The numbers between the commas of an option.

    Args:
        option: Name of the option, for the message.
        text: Such as ``"96,128"``.

    Raises:
        KVPolicyError: One of them is not a whole number of at least 1.
    """
    found = words(text)
    for word in found:
        if not word.isascii() or not word.isdigit() or int(word) < 1:
            msg = f"{option} was given {word!r}; whole numbers of at least 1 are wanted: 96,128."
            raise KVPolicyError(msg)
    if text is not None and not found:
        msg = f"{option} was given no number; write for example {option} 96,128."
        raise KVPolicyError(msg)
    return [int(word) for word in found]
