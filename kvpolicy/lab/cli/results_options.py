"""Options shared by the commands of ``kvpolicy results``: runs, and the cells to show."""

from typing import Annotated

import typer

Runs = Annotated[
    list[str], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold some.")
]
SeriesNames = Annotated[
    list[str] | None,
    typer.Option("--series", metavar="NAME", help="Only this series; may be repeated."),
]
Budgets = Annotated[
    list[str] | None, typer.Option(metavar="N|all", help="Only this budget; may be repeated.")
]
Models = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this model; may be repeated.")
]
Tasks = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Only this task; may be repeated.")
]
Seeds = Annotated[list[int] | None, typer.Option(help="Only this seed; may be repeated.")]
