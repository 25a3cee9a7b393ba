"""``kvpolicy trace``: every hook call of a generation, with shapes and microseconds.

With ``--json``, one object per line: ``{"kind": "call", ...}`` with the fields of `HookCall`
for each call as it is made, then ``{"kind": "total", ...}`` with those of `Total` for each hook
and policy. ``--output`` writes the calls to a file in the same form.
"""

import json as json_module
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from kvpolicy.cli.failures import Interrupted
from kvpolicy.cli.option_groups import with_groups
from kvpolicy.cli.options import (
    SOME_FAILED,
    Generation,
    GenerationOptions,
    Json,
    examples,
    prepare,
)
from kvpolicy.cli.output import info, print_json, print_text, terminal_width
from kvpolicy.cli.run import format_report
from kvpolicy.cli.text_table import format_table
from kvpolicy.errors import OutputError

if TYPE_CHECKING:
    from kvpolicy.engine.tracing import EvictedRows, HookCall, Total, Trace

app = typer.Typer(
    help="Show every hook call of a generation.",
    rich_help_panel="Generate text",
    add_completion=False,
)

_LAST = 100  # calls in the table by default
_CALLS = ("#", "request", "token", "hook", "layer", "answered by", "answer", "µs", "asked with")
_TOTALS = ("hook", "policy", "calls", "ms", "p50 µs", "p95 µs", "of the time")
_MAX_TEXT = 28  # characters of the text of one range of rows
_MAX_LINE = 72  # characters of a line about removed rows
_NONE = "-"


@app.command(
    epilog=examples(
        "kvpolicy trace --policy h2o --budget 64 --hook score --last 5",
        "kvpolicy trace --plan plan.toml --summary",
    )
)
@with_groups
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
        bool, typer.Option("--kept", help="Show which rows each compaction removes.")
    ] = False,
    last: Annotated[
        int | None,
        typer.Option(min=1, help="Show the last N calls only. [default: 100; with --json, all]"),
    ] = None,
    summary: Annotated[bool, typer.Option("--summary", help="Show the totals only.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write all calls to a new file, as JSON lines."),
    ] = None,
    json: Json = False,
) -> None:
    """Show every hook call of a generation: the policies, their answers and their time.

    A call that fails is shown as well, and ends the generation.
    """
    task = prepare(generation)
    from kvpolicy.engine.tracing import recording

    with _open_output(output) as write_record:

        def on_call(call: "HookCall") -> None:
            record = {"kind": "call", **call.to_dict()}
            write_record(record)
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
                # Also after an error: the calls before it explain it.
                _show(trace, json=json, summary=summary, shown=last)
    if failed:
        raise typer.Exit(SOME_FAILED)


@contextmanager
def _open_output(path: Path | None) -> "Iterator[Callable[[dict[str, Any]], None]]":
    """A function that writes one record to a new file; does nothing without a file."""
    if path is None:
        yield lambda _: None
        return
    try:
        file = path.open("xb", buffering=0)  # unbuffered: a kill loses one record at most
    except FileExistsError as error:
        msg = f"{path} exists and is not replaced; choose another name, or delete it first."
        raise OutputError(msg) from error
    except OSError as error:
        msg = f"{path} cannot be opened: {error.strerror}."
        raise OutputError(msg) from error

    def write(record: dict[str, Any]) -> None:
        try:
            # `backslashreplace` writes lone surrogates as JSON escapes.
            line = json_module.dumps(record, ensure_ascii=False) + "\n"
            file.write(line.encode(errors="backslashreplace"))
        except OSError as error:
            msg = f"{path} cannot be written: {error.strerror}; earlier lines are intact."
            raise OutputError(msg) from error

    with file:
        yield write


def _run(task: Generation) -> bool:
    """Generate for all prompts; returns whether some failed."""
    run = task.start()
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


def call_table(calls: "Sequence[HookCall]", *, width: int | None = None) -> str:
    """Format calls as a table, each followed by the rows that it removes.

    Args:
        calls: The calls.
        width: Maximum characters of a line; no limit if not given.
    """
    rows = []
    for call in calls:
        rows.append(_call_row(call))
        for evicted in call.left:
            rows += _evicted(evicted)
    return format_table(_CALLS, rows, right=(0, 1, 2, 4, 7), width=width)


def total_table(totals: "Sequence[Total]", *, width: int | None = None) -> str:
    """Format totals as a table, as wide on a slow machine; arguments as for `call_table`."""
    rows = [
        [
            one.hook,
            one.policy,
            f"{one.calls:,}",
            f"{one.total_ms:9,.1f}",
            f"{one.p50_us:9,.0f}",
            f"{one.p95_us:9,.0f}",
            f"{one.share:.1%}",
        ]
        for one in totals
    ]
    return format_table(_TOTALS, rows, right=range(2, len(_TOTALS)), width=width)


def _call_row(call: "HookCall") -> list[str]:
    arguments = ", ".join(f"{name} {value}" for name, value in call.arguments.items())
    return [
        str(call.number),
        _format_ids(call.requests),
        _format_ids(sorted(set(call.tokens))),
        call.hook,
        _NONE if call.layer is None else str(call.layer),
        call.answered_by or _NONE,
        _answer(call),
        f"{call.us:,.0f}",
        arguments if call.error is None else call.error,
    ]


def _answer(call: "HookCall") -> str:
    if call.error is not None:
        return "FAILED"
    if isinstance(call.answer, list):
        return ", ".join(map(str, call.answer)) or _NONE
    if isinstance(call.answer, dict):
        return ", ".join(f"{name}: {one}" for name, one in call.answer.items()) or _NONE
    return _NONE if call.answer is None else str(call.answer)


def _format_ids(numbers: Sequence[int]) -> str:
    """Numbers, or the first and the last if there are more than three."""
    if len(numbers) > 3:
        return f"{numbers[0]}..{numbers[-1]}"
    return ",".join(map(str, numbers)) or _NONE


def _evicted(rows: "EvictedRows") -> list[list[str]]:
    heads = ",".join(map(str, rows.heads))
    texts = rows.texts or ("",) * len(rows.ranges)
    lines = [f"{rows.num_rows} rows leave head {heads}:"]
    for (first, last), text in zip(rows.ranges, texts, strict=True):
        shown = f" {_short(text)}" if text else ""
        piece = f" {first if first == last else f'{first}-{last}'}{shown}"
        if len(lines[-1]) + len(piece) > _MAX_LINE:  # texts are not broken: their spaces matter
            lines.append(" ")
        lines[-1] += piece
    blank = [""] * (len(_CALLS) - 3)
    return [["", str(rows.request) if i == 0 else "", *blank, line] for i, line in enumerate(lines)]


def _short(text: str) -> str:
    """A text in quotes; the middle of a long text is left out."""
    half = _MAX_TEXT // 2
    return repr(text if len(text) <= _MAX_TEXT else f"{text[: half - 1]}…{text[-half:]}")
