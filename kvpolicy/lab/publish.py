"""A comparison for readers: the table and the plots in the results folder."""

import json
from pathlib import Path

from kvpolicy.lab.comparison import Comparison
from kvpolicy.lab.facets import break_down, facets_to_csv
from kvpolicy.lab.group import Group, describe_sampling
from kvpolicy.lab.plots import save_plots
from kvpolicy.lab.store import Store
from kvpolicy.lab.table import Row, tabulate, to_csv, to_json
from kvpolicy.wholefile import write_whole


def publish(comparison: Comparison, store: Store) -> list[Row]:
    """Write table.json, table.csv, facets.csv, plot.png and plot.svg.

    Args:
        comparison: What was compared.
        store: What is done.

    Returns:
        The rows of the table.
    """
    (group,) = comparison.groups
    samples, columns = store.samples.values(), group.task.measure.columns
    rows = tabulate(comparison.cells, samples, store.timings, columns)
    write_whole(store.folder / "table.json", json.dumps(to_json(rows), indent=2) + "\n")
    write_whole(store.folder / "table.csv", to_csv(rows))
    facets = break_down(comparison.cells, samples, columns)
    write_whole(store.folder / "facets.csv", facets_to_csv(facets))
    save_plots(rows, store.folder, columns[0], title=_title(group))
    return rows


def _title(group: Group) -> str:
    model, task = Path(group.model.name).name, group.task.name
    what = model if model == task else f"{model} on {task}"
    num, tries = group.num_items, group.num_attempts
    asked = f"{num} problems" if tries == 1 else f"{num} problems, {tries} attempts at each"
    drawn = describe_sampling(group.sampling)
    return (
        f"{what}: {asked} for each point, seed {group.seed}, {drawn}, "
        f"at most {group.max_new_tokens:,} tokens; "
        "bars and band: 95 % intervals"
    )
