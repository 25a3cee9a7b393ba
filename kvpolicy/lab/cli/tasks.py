"""``kvpolicy tasks``: what an ablation can ask a model, and the problems themselves.

With ``--json``, ``list`` prints a list of ``{"name", "target", "distribution", "summary",
"options": {NAME: DEFAULT}, "problem"}``, ``problem`` being null for a task that can be loaded;
``show`` prints a list of ``{"index", "prompt", "answer", "facets", "reference", "chat"}``.
"""

import textwrap
from enum import Enum
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.options import Json, examples
from kvpolicy.cli.output import print_json, print_text

if TYPE_CHECKING:
    from kvpolicy.lab.tasks.task import Example, TaskInfo

app = typer.Typer(
    help="Show the installed tasks and their examples.",
    rich_help_panel="Experiments",
    no_args_is_help=True,
    add_completion=False,
)

_WIDEST = 100
_MOST = 2000  # characters of a text that are shown; --json shows all of them


class _Split(Enum):
    """Where the problems come from."""

    test = "test"
    tune = "tune"
    train = "train"


@app.command(
    "list",
    short_help="Show the installed tasks and their options.",
    epilog=examples(
        "kvpolicy tasks list",
        "kvpolicy tasks list --json",
    ),
)
def listing(json: Json = False) -> None:
    """Show the installed tasks: what they ask, and their options with defaults."""
    from kvpolicy.lab.tasks.task import installed_tasks

    tasks = installed_tasks()
    if json:
        print_json([attrs.asdict(task) for task in tasks], indent=2)
        return
    indent = 2 + max((len(task.name) for task in tasks), default=0)
    width = min(get_terminal_size().columns, _WIDEST)
    for task in tasks:
        print_text("\n".join(_lines(task, indent, width)) + "\n")


@app.command(
    short_help="Show problems and their answers.",
    epilog=examples(
        "kvpolicy tasks show gsm8k --n 3",
        "kvpolicy tasks show needle:length=200",
    ),
)
def show(
    task: Annotated[
        str, typer.Argument(metavar="NAME|FILE|ID", help="A task, with options after a colon.")
    ],
    n: Annotated[int, typer.Option("--n", min=1, help="Problems to show.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the problems.")] = 0,
    split: Annotated[_Split, typer.Option(help="Where they come from.")] = _Split.test,
    json: Json = False,
) -> None:
    """Show problems: what is asked, the answer, and what reports may group by."""
    from kvpolicy.lab.tasks.task import load_task

    items = load_task(task).items(n, seed=seed, split=split.value)
    if json:
        print_json([_plain(item) for item in items], indent=2)
        return
    for item in items:
        print_text(_words(item) + "\n\n")


def _plain(item: "Example") -> dict[str, Any]:
    # Attempts belong to a comparison, not to a task.
    return attrs.asdict(item, filter=lambda field, _: field.name != "attempt")


def _words(item: "Example") -> str:
    facets = ", ".join(f"{name} {value}" for name, value in item.facets.items())
    head = f"── problem {item.index}{f': {facets}' if facets else ''} ──"
    parts = [head, _cut(item.prompt.rstrip("\n"))] if item.prompt else [head]
    if item.answer:
        parts.append(f"── answer: {_cut(item.answer)} ──")
    elif item.reference is not None:
        parts.append(_cut(item.reference))
    return "\n".join(parts)


def _cut(text: str) -> str:
    left = len(text) - _MOST
    return text if left <= 0 else f"{text[:_MOST]} ... ({left:,} characters more)"


def _lines(task: "TaskInfo", indent: int, width: int) -> list[str]:
    options = "  ".join(f"{name}={default}" for name, default in task.options.items())
    lines = _wrap(task.problem or task.summary or task.target, indent, width)
    lines += _wrap(options, indent + 2, width) if options else []
    lines[0] = task.name.ljust(indent) + lines[0].lstrip()
    return lines


def _wrap(text: str, indent: int, width: int) -> list[str]:
    blank = " " * indent
    return textwrap.wrap(
        text,
        width,
        initial_indent=blank,
        subsequent_indent=blank,
        break_on_hyphens=False,
        break_long_words=False,
    )
