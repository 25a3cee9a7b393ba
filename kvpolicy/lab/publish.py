"""A comparison for readers: the table and the plots in the results folder."""

import json
from pathlib import Path

from kvpolicy.lab.ablate import Comparison, describe_sampling
from kvpolicy.lab.facets import break_down, facets_to_csv
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
    samples, columns = store.samples.values(), comparison.task.measure.columns
    rows = tabulate(comparison.cells, samples, store.timings, columns)
    write_whole(store.folder / "table.json", json.dumps(to_json(rows), indent=2) + "\n")
    write_whole(store.folder / "table.csv", to_csv(rows))
    facets = break_down(comparison.cells, samples, columns)
    write_whole(store.folder / "facets.csv", facets_to_csv(facets))
    save_plots(rows, store.folder, columns[0], title=_title(comparison))
    return rows


def _title(comparison: Comparison) -> str:
    model, task = Path(comparison.model_name).name, comparison.task.name
    what = model if model == task else f"{model} on {task}"
    num, tries = len({item.index for item in comparison.items}), comparison.num_attempts
    asked = f"{num} problems" if tries == 1 else f"{num} problems, {tries} attempts at each"
    drawn = describe_sampling(comparison.sampling)
    return (
        f"{what}: {asked} for each point, seed {comparison.seed}, {drawn}, "
        f"at most {comparison.max_new_tokens:,} tokens; "
        "bars and band: 95 % intervals"
    )
