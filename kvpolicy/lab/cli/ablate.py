"""``kvpolicy ablate``: policies at several budgets, on models and tasks, resumable at every sample.

With ``--json``, on stdout: ``{"folder", "run", "table"}``, where ``run`` is the manifest's
and ``table`` the list that is also in ``table.json``; with ``--dry-run``, the fields of
`kvpolicy.lab.sweep.estimate.Estimate`.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import attrs
import typer

from kvpolicy.cli.options import (
    Device,
    Dtype,
    Json,
    Overrides,
    Plugins,
    TrustRemoteCode,
    examples,
    positive_ints,
    register_plugins,
    split_list,
)
from kvpolicy.cli.output import info, print_json, print_text, terminal_width
from kvpolicy.lab.cli import options as sweepoptions
from kvpolicy.lab.cli.dryrun import tell
from kvpolicy.lab.cli.following import follow
from kvpolicy.lab.cli.options import changed, grid_of, numbers
from kvpolicy.lab.cli.place import (
    CpusPerWorker,
    GpusPerWorker,
    On,
    RayAddress,
    Where,
    open_executor,
)

if TYPE_CHECKING:
    from kvpolicy.lab.store.store import Store
    from kvpolicy.lab.sweep.comparison import Comparison
    from kvpolicy.lab.sweep.publish import Panel

app = typer.Typer(
    help="Compare policies at several budgets.",
    rich_help_panel="Experiments",
    add_completion=False,
)

SOME_FAILED = 1


@app.command(
    epilog=examples(
        "kvpolicy ablate",
        "kvpolicy ablate --policies h2o,snapkv --budgets 96,128 --n 20",
    )
)
def ablate(
    preset: sweepoptions.PresetName = None,
    policies: sweepoptions.Stacks = None,
    plan: sweepoptions.Plans = None,
    budgets: sweepoptions.Budgets = None,
    grid: sweepoptions.Grid = None,
    side_by_side: sweepoptions.Zip = False,
    buffer: Annotated[
        int | None,
        typer.Option(min=1, help="Rows that may join before a compaction. [default: the preset's]"),
    ] = None,
    model: sweepoptions.Models = None,
    task: sweepoptions.Tasks = None,
    n: sweepoptions.NumItems = None,
    seeds: sweepoptions.Seeds = None,
    split: sweepoptions.Split = None,
    attempts: sweepoptions.Attempts = None,
    temperature: Annotated[
        float | None, typer.Option(min=0, help="0 takes the likeliest token. [default: 0]")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest tokens up to this. [default: 1]")
    ] = None,
    execute_code: Annotated[
        bool, typer.Option("--execute-code", help="Let a grader run programs the model wrote.")
    ] = False,
    slots: Annotated[
        int | None,
        typer.Option(min=1, help="Samples decoded together. [default: the preset's]"),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens a sample may generate. [default: the preset's]"),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Cells run side by side. [default: small models: one per core]"),
    ] = None,
    on: On = Where.here,
    ray_address: RayAddress = None,
    cpus_per_worker: CpusPerWorker = None,
    gpus_per_worker: GpusPerWorker = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Results folder. [default: kvpolicy-ablate/NAME, one for the same settings]",
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(metavar="FACET", help="Show the table by difficulty, too.")
    ] = None,
    record: Annotated[
        int,
        typer.Option(
            min=0, help="Items of each cell, from the first, whose kept tokens are recorded."
        ),
    ] = 2,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Tell what there is to do and how long it may take.")
    ] = False,
    overrides: Overrides = None,
    plugin: Plugins = None,
    dtype: Dtype = "auto",
    device: Device = None,
    trust_remote_code: TrustRemoteCode = False,
    json: Json = False,
) -> None:
    """Compare policies at several budgets: accuracy, length, memory and speed.

    `kvpolicy tasks list` shows what can be asked, and measured otherwise than by accuracy.
    Without arguments: the full cache against published policies. Unset options come from the
    preset; docs/reference/sweeps.md has those of the default one.
    Interrupted, the same command goes on where it stopped.
    """
    budget_list, stacks = positive_ints("--budgets", budgets), split_list(policies)
    seed_list, knobs = numbers("--seeds", seeds), grid_of(grid or [])
    register_plugins(plugin)
    # Imported here: all this brings torch along.
    from kvpolicy.lab.models import ModelCache
    from kvpolicy.lab.store.store import Store
    from kvpolicy.lab.sweep import prepare as setup

    chosen = setup.choose(
        preset, policies=stacks, plans=plan or [], budgets=budget_list, buffer=buffer
    )
    chosen = changed(
        chosen,
        models=tuple(model or ()),
        tasks=tuple(task or ()),
        seeds=tuple(seed_list),
        knobs=chosen.knobs | knobs,
        combine="zip" if side_by_side else None,
        n=n,
        split=split.value if split else None,
        attempts=attempts,
        temperature=temperature,
        top_p=top_p,
        slots=slots,
        max_new_tokens=max_new_tokens,
    )
    with open_executor(
        on,
        ModelCache(dtype=dtype, device=device, trust_remote_code=trust_remote_code),
        address=ray_address,
        workers=workers,
        cpus=cpus_per_worker,
        gpus=gpus_per_worker,
    ) as place:
        comparison = setup.prepare(
            chosen, place, overrides=overrides or [], execute_code=execute_code
        )
        setup.check_facet(comparison, by)
        comparison = attrs.evolve(comparison, record=record)
        num_workers = place.num_workers(comparison)
        folder = output or setup.default_folder(comparison)
        if dry_run:
            tell(comparison, folder, place, workers=num_workers, json=json)
            return
        with Store(folder, comparison.to_dict()) as store:
            follow(comparison, store, place, workers=num_workers)
            failed = _publish(comparison, store, by, json=json)
    if failed:
        raise typer.Exit(SOME_FAILED)


def _publish(comparison: "Comparison", store: "Store", by: str | None, *, json: bool) -> bool:
    """Show what came out; whether samples failed."""
    from kvpolicy.lab.sweep.publish import publish, to_json

    panels = publish(comparison, store)
    if json:
        run = comparison.to_dict()
        print_json({"folder": str(store.folder), "run": run, "table": to_json(panels)})
    else:
        _show(panels, by)
        info(f"table, plots, samples and manifest are in {store.folder}.")
    return any(row.num_errors for panel in panels for row in panel.rows)


def _show(panels: "list[Panel]", by: str | None) -> None:
    from kvpolicy.lab.cli.tables import facet_table, table

    width = terminal_width()
    for number, panel in enumerate(panels):
        if len(panels) > 1:
            print_text(("\n" if number else "") + panel.title + "\n")
        print_text(table(panel.rows, panel.columns, width=width) + "\n")
        found = [one for one in panel.facets if one.facet == by]
        if found:
            print_text("\n" + facet_table(found, panel.columns, width=width) + "\n")
