"""``kvpolicy trace``: every hook call of a generation, with shapes and microseconds.

With ``--json``, one object per line: ``{"kind": "call", ...}`` with the fields of `HookCall`
for each call as it is made, then ``{"kind": "total", ...}`` with those of `Total` for each hook
and policy. ``--output`` writes the calls into a file in the same form.
"""

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.app import Interrupted
from kvpolicy.cli.calls import call_table, total_table
from kvpolicy.cli.options import (
    SOME_FAILED,
    Generation,
    GenerationOptions,
    Json,
    examples,
    prepare,
    with_generation_options,
)
from kvpolicy.cli.output import info, print_json, print_text, terminal_width
from kvpolicy.cli.run import format_report

if TYPE_CHECKING:
    from kvpolicy.engine.hookcall import HookCall
    from kvpolicy.engine.tracing import Trace

app = typer.Typer(
    help="Show every hook call of a generation.",
    rich_help_panel="Generate text",
    add_completion=False,
)

_LAST = 100  # calls in the table, unless more are asked for


@app.command(
    epilog=examples(
        "kvpolicy trace --policy h2o --budget 64 --hook score --last 5",
        "kvpolicy trace --plan plan.toml --summary",
    )
)
@with_generation_options
def trace(
    generation: GenerationOptions,
    hook: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Record this hook only; may be repeated."),
    ] = None,
    layer: Annotated[
        list[int] | None, typer.Option(min=0, help="Record this layer only; may be repeated.")
    ] = None,
    kept: Annotated[
        bool, typer.Option("--kept", help="Show which rows leave at each compaction.")
    ] = False,
    last: Annotated[
        int | None,
        typer.Option(min=1, help="Show the last so many calls. [default: 100; with --json, all]"),
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Show the totals and no single call.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A new file for all calls, as JSON lines."),
    ] = None,
    json: Json = False,
) -> None:
    """Show every hook call of a generation: who answered what, and how long it took.

    A call that fails is shown as well, and ends the generation.
    """
    task = prepare(generation)
    from kvpolicy.engine.tracing import recording

    with _writer(output) as keep:

        def on_call(call: "HookCall") -> None:
            record = {"kind": "call", **call.to_dict()}
            keep(record)
            if json and not summary and last is None:
                print_json(record)

        recorded = recording(
            task.engine,
            hooks=hook,
            layers=layer,
            kept=kept,
            last=last or (1 if json else _LAST),
            on_call=on_call,
        )
        with recorded as trace:
            try:
                failed = _run(task)
            except KeyboardInterrupt:
                msg = f"interrupted after {trace.num_calls:,} calls."
                raise Interrupted(msg) from None
            finally:
                # Whatever ended the run: what was recorded is what the user wants to see.
                _show(trace, json=json, summary=summary, shown=last)
    if failed:
        raise typer.Exit(SOME_FAILED)


@contextmanager
def _writer(path: Path | None) -> "Iterator[Callable[[dict[str, Any]], None]]":
    """Writes records into a new file, each as it comes; nowhere if there is no file."""
    if path is None:
        yield lambda _: None
        return
    from kvpolicy.lab.store.jsonl import JsonLines

    with closing(JsonLines(path, new=True)) as lines:
        yield lines.append


def _run(task: Generation) -> bool:
    """Serve all prompts; whether some failed."""
    run = task.engine.generate(task.prompts, **task.options)
    for result in run:
        if result.error is not None:
            info(f"prompt {result.id}: {result.error}.")
    info(format_report(run.report))
    return run.report.num_errors > 0


def _show(trace: "Trace", *, json: bool, summary: bool, shown: int | None) -> None:
    trace.end()
    if json:
        if shown is not None and not summary:
            for call in trace.calls:
                print_json({"kind": "call", **call.to_dict()})
        for total in trace.totals():
            print_json({"kind": "total", **attrs.asdict(total)})
        return
    width = terminal_width()
    if not trace.num_calls:
        info("no hook was called.")
        return
    if not summary:
        hidden = trace.num_calls - len(trace.calls)
        if hidden:
            info(
                f"{hidden:,} calls before these are not shown; --last {trace.num_calls} shows all."
            )
        print_text(call_table(trace.calls, width=width) + "\n\n")
    print_text(total_table(trace.totals(), width=width) + "\n")
