"""A comparison for readers: the tables and the plots in the results folder."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.facets import FacetRow, break_down, facets_to_csv
from kvpolicy.lab.group import Group, describe_sampling
from kvpolicy.lab.measures import Column
from kvpolicy.lab.plots import save_plots
from kvpolicy.lab.store import Store
from kvpolicy.lab.table import Row, flat, tabulate, write_csv
from kvpolicy.lab.table import to_json as rows_to_json
from kvpolicy.wholefile import write_whole


@attrs.frozen
class Panel:
    """What belongs in one table and one picture: what was measured of one group.

    Attributes:
        model: The model, as typed.
        task: The task, with its options.
        seed: Chose the items.
        columns: What was measured.
        rows: The comparison.
        facets: The same by difficulty, or whatever else the items differ in.
        settings: What else there is to be said of it, in words.
    """

    model: str
    task: str
    seed: int
    columns: Sequence[Column]
    rows: Sequence[Row]
    facets: Sequence[FacetRow]
    settings: str

    @property
    def title(self) -> str:
        """What was asked of whom, in words."""
        model = Path(self.model).name
        return model if model == self.task else f"{model} on {self.task}"


def publish(comparison: Comparison, store: Store) -> list[Panel]:
    """Write table.json, table.csv, facets.csv, plot.png and plot.svg.

    Args:
        comparison: What was compared.
        store: What is done.

    Returns:
        What was measured, in the order of the groups. With several, the pictures are called
        plot-1, plot-2 and so on, in that order.
    """
    panels = [_panel(comparison, store, group) for group in comparison.groups]
    records = to_json(panels)
    write_whole(store.folder / "table.json", json.dumps(records, indent=2) + "\n")
    write_whole(store.folder / "table.csv", write_csv([flat(record) for record in records]))
    facets = [one for panel in panels for one in panel.facets]
    write_whole(store.folder / "facets.csv", facets_to_csv(facets))
    for number, panel in enumerate(panels, 1):
        name = "plot" if len(panels) == 1 else f"plot-{number}"
        title = f"{panel.title}: {panel.settings}"
        save_plots(panel.rows, store.folder, panel.columns[0], title=title, name=name)
    return panels


def to_json(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """All rows as plain data, each with its model, task and seed."""
    return [
        {"model": panel.model, "task": panel.task, "seed": panel.seed, **record}
        for panel in panels
        for record in rows_to_json(panel.rows)
    ]


def _panel(comparison: Comparison, store: Store, group: Group) -> Panel:
    cells, columns = comparison.cells_of(group), group.task.measure.columns
    samples = [sample for sample in store.samples.values() if sample.group == group.id]
    return Panel(
        model=group.model.name,
        task=group.task.name,
        seed=group.seed,
        columns=columns,
        rows=tabulate(cells, samples, store.timings, columns),
        facets=break_down(cells, samples, columns),
        settings=_settings(group),
    )


def _settings(group: Group) -> str:
    num, tries = group.num_items, group.num_attempts
    asked = f"{num} problems" if tries == 1 else f"{num} problems, {tries} attempts at each"
    drawn = describe_sampling(group.sampling)
    return (
        f"{asked} for each point, seed {group.seed}, {drawn}, "
        f"at most {group.max_new_tokens:,} tokens; bars and band: 95 % intervals"
    )
