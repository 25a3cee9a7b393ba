"""``kvpolicy tasks``: list installed tasks, show their problems, and name the sandbox of programs.

With ``--json``, ``list`` prints a list of ``{"name", "target", "distribution", "summary",
"options": {NAME: DEFAULT}, "problem"}``, where ``problem`` is null if the task can be loaded;
``show`` prints a list of ``{"index", "prompt", "answer", "facets", "reference", "chat", "message",
"system"}``, where ``message`` is null;
``sandbox`` prints ``{"sandbox", "readable", "hidden", "has_folder", "memory_bytes", "folder_bytes",
"files", "file_bytes", "threads"}``.
"""

from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.completion import names_of
from kvpolicy.cli.options import Json, examples
from kvpolicy.cli.output import print_entries, print_json, print_text
from kvpolicy.lab.cli.options import SplitName
from kvpolicy.text import visible

if TYPE_CHECKING:
    from kvpolicy.lab.tasks.task import Example, TaskInfo

app = typer.Typer(
    help="List installed tasks and show their problems.",
    rich_help_panel="Experiments",
    no_args_is_help=True,
    add_completion=False,
)

_MAX_CHARS = 2000  # of a text; --json prints texts in full


@app.command(
    "list",
    short_help="List the installed tasks and their options.",
    epilog=examples(
        "kvpolicy tasks list",
        "kvpolicy tasks list --json",
    ),
)
def listing(json: Json = False) -> None:
    """List the installed tasks with a summary, their options and defaults."""
    from kvpolicy.lab.tasks.task import installed_tasks

    tasks = installed_tasks()
    if json:
        print_json([attrs.asdict(task) for task in tasks], indent=2)
        return
    print_entries([_entry(task) for task in tasks])


@app.command(
    short_help="Show problems and their answers.",
    epilog=examples(
        "kvpolicy tasks show gsm8k --n 3",
        "kvpolicy tasks show needle:keys=2 --model FOLDER",
        "kvpolicy tasks show perplexity:prompt_tokens=64 --model FOLDER",
    ),
)
def show(
    task: Annotated[
        str,
        typer.Argument(
            metavar="NAME|FILE|ID",
            autocompletion=names_of("kvpolicy.tasks", ".jsonl"),
            help="Task, with options after a colon.",
        ),
    ],
    n: Annotated[int, typer.Option("--n", min=1, help="Number of problems.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for the choice of problems.")] = 0,
    split: Annotated[SplitName, typer.Option(help="Split of the task.")] = SplitName.test,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER|FILE",
            autocompletion=names_of("kvpolicy.models", "/", ".gguf"),
            help="Model whose tokenizer counts tokens, for tasks with lengths in tokens.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show problems: prompt, answer, and the properties that reports can group by."""
    from kvpolicy.lab.tasks.task import fitted, load_task

    loaded = load_task(task)
    if model is not None:
        from kvpolicy.model.loading import load_model

        loaded = fitted(loaded, load_model(model)[1])
    items = loaded.examples(n, seed=seed, split=split.value)
    if json:
        print_json([_to_dict(item) for item in items], indent=2)
        return
    for item in items:
        print_text(_format(item) + "\n\n")


@app.command(
    short_help="Show the sandbox in which programs of a model run here.",
    epilog=examples("kvpolicy tasks sandbox", "kvpolicy tasks sandbox --json"),
)
def sandbox(json: Json = False) -> None:
    """Show the sandbox in which --execute-code runs programs here, or what to install for one."""
    from kvpolicy.lab.sandbox import run

    wall = run.find_wall()
    if json:
        found = {
            "sandbox": wall.name,
            "readable": wall.readable,
            "hidden": wall.hidden,
            "has_folder": wall.has_folder,
            "memory_bytes": run.MEMORY_BYTES,
            "folder_bytes": run.MAX_FOLDER_BYTES if wall.has_folder else 0,
            "files": run.MAX_FILES if wall.has_folder else 0,
            "file_bytes": run.MAX_FILE_BYTES,
            "threads": run.MAX_THREADS,
        }
        print_json(found, indent=2)
        return
    print_text(f"Programs that a model writes run in {wall.name}. They can read:\n")
    for path in wall.readable:
        print_text(f"  {path}\n")
    for path in wall.hidden:
        print_text(f"  but not {path}\n")
    written = (
        f"{run.MAX_FOLDER_BYTES >> 20} MiB, which are deleted" if wall.has_folder else "nothing"
    )
    print_text(f"and write {written}.\n")


def _to_dict(item: "Example") -> dict[str, Any]:
    # Attempts are part of a comparison, not of a task.
    return attrs.asdict(item, filter=lambda field, _: field.name != "attempt")


def _format(item: "Example") -> str:
    facets = ", ".join(f"{name} {value}" for name, value in item.facets.items())
    head = visible(f"── problem {item.index}{f': {facets}' if facets else ''} ──")
    texts = [item.system or "", item.prompt]
    parts = [head, *(_truncate(text.rstrip("\n")) for text in texts if text)]
    if item.answer:
        parts.append(f"── answer: {visible(_truncate(item.answer))} ──")
    elif item.reference is not None:
        parts.append(_truncate(item.reference))
    return "\n".join(parts)


def _truncate(text: str) -> str:
    num_omitted = len(text) - _MAX_CHARS
    if num_omitted <= 0:
        return text
    return f"{text[:_MAX_CHARS]} ... ({num_omitted:,} more characters)"


def _entry(task: "TaskInfo") -> tuple[str, str, str]:
    options = "  ".join(f"{name}={default}" for name, default in task.options.items())
    return task.name, task.problem or task.summary or task.target, options
