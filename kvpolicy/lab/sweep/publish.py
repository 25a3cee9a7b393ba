"""A sweep for readers: the tables and the plots in the results folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.pooling import PooledCell, blocks_of, pool
from kvpolicy.lab.analysis.table import Row, break_down, csv_text, tabulate, to_records
from kvpolicy.lab.plots.plots import save_plots
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.grid import EvalSetting, Sweep, describe_sampling
from kvpolicy.lab.tasks.task import Column


@attrs.frozen
class Panel:
    """What belongs in one table and one picture: a model on a task, all seeds together.

    Attributes:
        model: The model, as typed.
        task: The task, with its options.
        seeds: Each chose items.
        columns: What was measured.
        rows: The sweep.
        facets: The same by difficulty, or whatever else the items differ in.
        settings: What else there is to be said of it, in words.
    """

    model: str
    task: str
    seeds: Sequence[int]
    columns: Sequence[Column]
    rows: Sequence[Row[PooledCell]]
    facets: Sequence[Row[PooledCell]]
    settings: str

    @property
    def title(self) -> str:
        """What was asked of whom, in words."""
        model = Path(self.model).name
        return model if model == self.task else f"{model} on {self.task}"


def publish(sweep: Sweep, store: Store) -> list[Panel]:
    """Write table.json, table.csv, facets.csv, plot.png and plot.svg.

    Args:
        sweep: What was compared.
        store: What is done.

    Returns:
        What was measured, a panel for each model and task. With several, the pictures are called
        plot-1, plot-2 and so on, in that order.
    """
    panels = _panels(sweep, store.folder)
    atomic_write(store.folder / "table.json", json.dumps(to_json(panels), indent=2) + "\n")
    atomic_write(store.folder / "table.csv", csv_text(_csv_records(panels)))
    atomic_write(store.folder / "facets.csv", csv_text(_facet_records(panels)))
    for number, panel in enumerate(panels, 1):
        name = "plot" if len(panels) == 1 else f"plot-{number}"
        title = f"{panel.title}: {panel.settings}"
        save_plots(panel.rows, store.folder, panel.columns[0], title=title, name=name)
    return panels


def to_json(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """All rows as plain data, each with its model, task and seeds."""
    return [
        {"model": panel.model, "task": panel.task, "seeds": list(panel.seeds), **record}
        for panel in panels
        for record in to_records(panel.rows)
    ]


def _csv_records(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    return [
        {**_of(panel), **record} for panel in panels for record in to_records(panel.rows, flat=True)
    ]


def _facet_records(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    return [
        {**_of(panel), "facet": row.facet, "value": row.facet_value, **record}
        for panel in panels
        for row, record in zip(panel.facets, to_records(panel.facets, flat=True), strict=True)
    ]


def _of(panel: Panel) -> dict[str, Any]:
    """What a line of CSV is of; seeds stand side by side."""
    return {"model": panel.model, "task": panel.task, "seeds": " ".join(map(str, panel.seeds))}


def _panels(sweep: Sweep, folder: Path) -> list[Panel]:
    return [_panel(sweep, cells) for cells in blocks_of(pool([read_run(folder)]))]


def _panel(sweep: Sweep, cells: Sequence[PooledCell]) -> Panel:
    setting = sweep.setting_of(sweep.cell(cells[0].id))
    seeds = sorted({seed for cell in cells for seed in cell.seeds})
    columns = setting.task.measure.columns
    return Panel(
        model=setting.model.name,
        task=setting.task.name,
        seeds=seeds,
        columns=columns,
        rows=tabulate(cells, columns),
        facets=break_down(cells, columns),
        settings=_settings(setting, seeds),
    )


def _settings(setting: EvalSetting, seeds: Sequence[int]) -> str:
    num, tries = setting.num_items, setting.num_attempts
    asked = f"{num} problems" if tries == 1 else f"{num} problems, {tries} attempts at each"
    drawn = describe_sampling(setting.sampling)
    numbers = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return (
        f"{asked} for each point{' and seed' if len(seeds) > 1 else ''}, {numbers}, {drawn}, "
        f"at most {setting.max_new_tokens:,} tokens; bars and band: 95 % intervals"
    )
