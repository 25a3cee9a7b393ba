"""Publishing a sweep: the tables and plots in its results folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.files import atomic_write
from kvpolicy.lab.analysis.pooling import PooledCell, blocks_of, pool
from kvpolicy.lab.analysis.table import Row, break_down, csv_text, tabulate, to_records
from kvpolicy.lab.plots import save_sweep_plots
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.grid import EvalSetting, Sweep, describe_sampling
from kvpolicy.lab.tasks.task import Column


@attrs.frozen
class Panel:
    """One table and one plot: a model on a task, all seeds pooled.

    Attributes:
        model: The model, as typed.
        task: The task, with its options.
        seeds: The seeds.
        columns: The columns of the task's metric.
        rows: One row for each plan.
        facets: The same by difficulty, or by another facet of the examples, and by parts of samples
            if asked for.
        settings: The other settings, as text.
    """

    model: str
    task: str
    seeds: Sequence[int]
    columns: Sequence[Column]
    rows: Sequence[Row]
    facets: Sequence[Row]
    settings: str

    @property
    def title(self) -> str:
        """Model and task, as a heading."""
        model = Path(self.model).name
        return model if model == self.task else f"{model} on {self.task}"


def publish(sweep: Sweep, store: Store, by: str | None = None) -> list[Panel]:
    """Write table.json, table.csv, facets.csv, plot.png and plot.svg.

    Args:
        sweep: The sweep.
        store: Its results.
        by: What to break tables down by besides the facets of the examples, such as layers.

    Returns:
        A panel for each model and task. With several, the plots are named plot-1, plot-2 and so
        on, in this order.
    """
    panels = [_panel(sweep, cells, by) for cells in blocks_of(pool([read_run(store.folder)]))]
    atomic_write(store.folder / "table.json", json.dumps(to_json(panels), indent=2) + "\n")
    atomic_write(store.folder / "table.csv", csv_text(_csv_records(panels)))
    atomic_write(store.folder / "facets.csv", csv_text(_facet_records(panels)))
    for number, panel in enumerate(panels, 1):
        name = "plot" if len(panels) == 1 else f"plot-{number}"
        title = f"{panel.title}: {panel.settings}"
        save_sweep_plots(panel.rows, store.folder, panel.columns, title=title, name=name)
    return panels


def to_json(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Return all rows as plain data, each with its model, task and seeds."""
    return [
        {"model": panel.model, "task": panel.task, "seeds": list(panel.seeds), **record}
        for panel in panels
        for record in to_records(panel.rows)
    ]


def _csv_records(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    return [
        {**_names(panel), **record}
        for panel in panels
        for record in to_records(panel.rows, flat=True)
    ]


def _facet_records(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    return [
        {**_names(panel), "facet": row.facet, "value": row.facet_value, **record}
        for panel in panels
        for row, record in zip(panel.facets, to_records(panel.facets, flat=True), strict=True)
    ]


def _names(panel: Panel) -> dict[str, Any]:
    """Return the first columns of a CSV line."""
    return {"model": panel.model, "task": panel.task, "seeds": " ".join(map(str, panel.seeds))}


def _panel(sweep: Sweep, cells: Sequence[PooledCell], by: str | None) -> Panel:
    setting = sweep.setting_of(sweep.cell(cells[0].id))
    seeds = sorted({seed for cell in cells for seed in cell.seeds})
    columns = setting.task.metric.columns
    facets = {name for cell in cells for sample in cell.samples for name in sample.facets}
    facets |= set() if by is None else {by}
    return Panel(
        model=setting.model.name,
        task=setting.task.name,
        seeds=seeds,
        columns=columns,
        rows=tabulate(cells, columns),
        facets=break_down(cells, columns, facets=facets),
        settings=_describe(setting, seeds),
    )


def _describe(setting: EvalSetting, seeds: Sequence[int]) -> str:
    num, tries = setting.num_examples, setting.num_attempts
    asked = f"{num} problems" if tries == 1 else f"{num} problems, {tries} attempts at each"
    sampling = describe_sampling(setting.sampling)
    numbers = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    return (
        f"{asked} for each point{' and seed' if len(seeds) > 1 else ''}, {numbers}, {sampling}, "
        f"at most {setting.max_new_tokens:,} tokens; bars and band: 95 % intervals"
    )
