"""``kvpolicy report``: runs as one HTML file that opens anywhere.

With ``--json``, on stdout: ``{"file", "bytes", "runs": [FOLDER, ...], "groups": [...]}``, each
group as ``{"label", "cells", "samples"}``.
"""

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kvpolicy.cli.options import Json, examples
from kvpolicy.cli.output import info, print_json
from kvpolicy.errors import OutputError
from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.select import open_runs
from kvpolicy.lab.cli.results import Runs
from kvpolicy.lab.report.gather import gather
from kvpolicy.quantities import format_bytes, format_count

app = typer.Typer(
    help="Show runs as one page that opens anywhere.",
    rich_help_panel="Results",
    add_completion=False,
)

DEFAULT = "kvpolicy-report.html"


@app.command(
    epilog=examples(
        "kvpolicy report kvpolicy-ablate/baselines --open",
        "kvpolicy report runs --output report.html",
    )
)
def report(
    runs: Runs,
    output: Annotated[
        Path, typer.Option(metavar="FILE", help="The HTML file; an earlier report is replaced.")
    ] = Path(DEFAULT),
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
    rules: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Rules that classify thoughts, for colours. [default: those named like the task "
            "or the model, otherwise published]",
        ),
    ] = None,
    max_megabytes: Annotated[
        float,
        typer.Option(min=1, help="Size limit; the longest texts lose their middles."),
    ] = 20.0,
    json: Json = False,
) -> None:
    """Write runs as one HTML file: curves, tables, samples side by side, layers, manifest.

    The file opens offline and loads nothing. A run that is still running can be shown, too.
    """
    _check_output(output)
    # Imported here: these modules import torch.
    from kvpolicy.lab.report.build import build
    from kvpolicy.lab.report.content import labels_of

    found = open_runs(runs, warn=info)
    page = build(found, rules=rules, max_bytes=round(max_megabytes * 1e6))
    atomic_write(output, page)
    num_bytes = len(page.encode())
    views = gather(found)
    if json:
        groups = [
            {"label": label, "cells": len(view.cells), "samples": len(view.samples)}
            for label, view in zip(labels_of(views), views, strict=True)
        ]
        folders = [str(run.path) for run in found]
        print_json({"file": str(output), "bytes": num_bytes, "runs": folders, "groups": groups})
    else:
        single = [view for view in views if not view.is_pooled]
        num_samples = sum(len(view.samples) for view in single)
        num_cells = sum(len(view.cells) for view in single)
        info(
            f"{output} shows {format_count(num_samples, 'sample')} of "
            f"{format_count(num_cells, 'cell')} ({format_bytes(num_bytes)}); open it in a browser."
        )
    if show and not webbrowser.open(output.resolve().as_uri()):
        info(f"no browser could be started; open {output} in one.")


def _check_output(path: Path) -> None:
    """Refuse to replace anything but an earlier report."""
    if path.exists() and not path.is_file():  # opening a FIFO would wait
        msg = f"{path} cannot be written: it is no regular file; choose another with --output."
        raise OutputError(msg)
    try:
        with path.open("rb") as file:
            is_report = b'name="generator" content="kvpolicy' in file.read(4096)
    except FileNotFoundError:
        return
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror}; choose another file with --output."
        raise OutputError(msg) from error
    if not is_report:
        msg = f"{path} exists and is no report; choose another name with --output."
        raise OutputError(msg)
