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

from kvpolicy.cli.calls import call_table, total_table
from kvpolicy.cli.figures import describe_run
from kvpolicy.cli.generation import SOME_FAILED, Generation, prepare
from kvpolicy.cli.interrupt import Interrupted
from kvpolicy.cli.options import (
    DEFAULT_MODEL,
    Budget,
    Buffer,
    Chat,
    Device,
    Dtype,
    Json,
    Length,
    MaxNewTokens,
    Model,
    Overrides,
    PlanFile,
    Plugins,
    Policies,
    PromptFile,
    PromptText,
    RunningBatch,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
)
from kvpolicy.cli.output import say, terminal_width, write, write_json

if TYPE_CHECKING:
    from kvpolicy.engine.hookcall import HookCall
    from kvpolicy.engine.tracing import Trace

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_LAST = 100  # calls in the table, unless more are asked for


@app.command()
def trace(
    prompt: PromptText = None,
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
    file: PromptFile = None,
    model: Model = DEFAULT_MODEL,
    plan: PlanFile = None,
    policy: Policies = None,
    budget: Budget = None,
    buffer: Buffer = None,
    length: Length = None,
    overrides: Overrides = None,
    plugin: Plugins = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = None,
    stop: Stop = None,
    chat: Chat = False,
    slots: RunningBatch = 8,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Show every hook call of a generation: who answered what, and how long it took.

    A call that fails is shown as well, and ends the generation.
    """
    task = prepare(
        prompt=prompt,
        file=file,
        model=model,
        plan=plan,
        policy=policy,
        budget=budget,
        buffer=buffer,
        length=length,
        overrides=overrides,
        plugin=plugin,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop=stop,
        chat=chat,
        slots=slots,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    from kvpolicy.engine.tracing import recording

    with _writer(output) as keep:

        def on_call(call: "HookCall") -> None:
            record = {"kind": "call", **call.to_dict()}
            keep(record)
            if json and not summary and last is None:
                write_json(record)

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
            say(f"prompt {result.id}: {result.error}.")
    say(describe_run(run.report))
    return run.report.num_errors > 0


def _show(trace: "Trace", *, json: bool, summary: bool, shown: int | None) -> None:
    trace.end()
    if json:
        if shown is not None and not summary:
            for call in trace.calls:
                write_json({"kind": "call", **call.to_dict()})
        for total in trace.totals():
            write_json({"kind": "total", **attrs.asdict(total)})
        return
    width = terminal_width()
    if not trace.num_calls:
        say("no hook was called.")
        return
    if not summary:
        hidden = trace.num_calls - len(trace.calls)
        if hidden:
            say(f"{hidden:,} calls before these are not shown; --last {trace.num_calls} shows all.")
        write(call_table(trace.calls, width=width) + "\n\n")
    write(total_table(trace.totals(), width=width) + "\n")
