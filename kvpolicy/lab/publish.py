"""A comparison for readers: the table and the plots in the results folder."""

import json
from pathlib import Path

from kvpolicy.lab.ablate import Comparison
from kvpolicy.lab.plots import save_plots
from kvpolicy.lab.store import Store
from kvpolicy.lab.table import Row, tabulate, to_csv, to_json
from kvpolicy.wholefile import write_whole


def publish(comparison: Comparison, store: Store) -> list[Row]:
    """Write table.json, table.csv, plot.png and plot.svg.

    Args:
        comparison: What was compared.
        store: What is done.

    Returns:
        The rows of the table.
    """
    rows = tabulate(comparison.cells, store.samples.values(), store.timings)
    write_whole(store.folder / "table.json", json.dumps(to_json(rows), indent=2) + "\n")
    write_whole(store.folder / "table.csv", to_csv(rows))
    save_plots(rows, store.folder, title=_title(comparison))
    return rows


def _title(comparison: Comparison) -> str:
    model, task = Path(comparison.model_name).name, comparison.task.name
    what = model if model == task else f"{model} on {task}"
    return (
        f"{what}: {len(comparison.items)} problems for each point, "
        f"seed {comparison.seed}, greedy, at most {comparison.max_new_tokens:,} tokens; "
        "bars and band: 95 % intervals"
    )
