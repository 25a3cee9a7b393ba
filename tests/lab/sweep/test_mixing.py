"""The plans that mix policies: the shipped plans are the measured ones, with equal row totals."""

import pytest

from kvpolicy import Plan
from kvpolicy.lab.sweep.grid import build_cells
from kvpolicy.lab.sweep.sweep_file import load_preset

pytestmark = pytest.mark.needs_reasoner

PLANS = ["reasoner-layers", "reasoner-mix", "reasoner-merge"]
NUM_LAYERS = 4


def cells_of(preset: str) -> dict:
    chosen = load_preset(preset)
    cells = build_cells(
        chosen.series, num_layers=NUM_LAYERS, budgets=chosen.budgets, buffer=chosen.buffer
    )
    return {cell.series: cell for cell in cells}


@pytest.mark.parametrize("name", PLANS)
def test_the_preset_measures_the_plan_that_ships(name: str) -> None:
    assert cells_of("mixing")[name].digest == Plan.load(name).resolve(NUM_LAYERS).digest()


@pytest.mark.parametrize("preset", ["mixing", "mixing-tune"])
def test_compared_plans_have_the_same_rows_in_total(preset: str) -> None:
    for cell in cells_of(preset).values():
        budgets = [layer.budget for layer in cell.resolved.layers]
        assert sum(budgets) == 364, cell.series
        assert {layer.buffer for layer in cell.resolved.layers} == {16}


def test_the_layers_of_a_mixed_plan_differ() -> None:
    layers = Plan.load("reasoner-mix").resolve(NUM_LAYERS).layers
    names = [[spec.policy for spec in layer.stack] for layer in layers]
    assert names == [["streaming"], ["mix"], ["mix"], ["h2o"]]
    stacks = Plan.load("reasoner-mix").resolve(NUM_LAYERS).stacks()
    assert stacks[1] is stacks[2]
    assert "attn_sums" not in stacks[0].reads, "nothing is measured for it"
