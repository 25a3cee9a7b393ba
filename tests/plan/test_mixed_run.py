"""Runs whose layers have different stacks, budgets and buffers."""

from pathlib import Path
from typing import Any

import attrs
from recorder import Recorder
from tiny import shared_model

from kvpolicy import Engine, Plan
from kvpolicy.plan.spec import PolicySpec

NUM_LAYERS = 5
GROUPS: list[dict[str, Any]] = [
    {"where": [3], "stack": [{"policy": "rkv", "window_size": 4}], "budget": "10%", "buffer": 3},
    {"where": "0:1", "stack": ["full"]},
    {"where": [1], "stack": ["h2o", {"policy": "protect", "n_recent": 3}], "budget": 17},
    {"where": [-1], "stack": [{"policy": "snapkv", "window_size": 5}], "buffer": 7},
    {"where": [2], "stack": ["streaming"], "budget": "6.5%", "buffer": 1},
]
#: Budget and buffer of each layer.
EXPECTED = {1: (17, 11), 2: (13, 1), 3: (20, 3), 4: (31, 7)}


def plan_of(path: Path, recorders: dict[int, Recorder]) -> Plan:
    """The plan of a file with one base, and a recorder around the policies of each layer."""
    base = {"budget": 31, "buffer": 11, "length": 200}
    plan = Plan.from_dict(base | {"layers": GROUPS})
    layers = []
    for group in plan.layers:
        layer_idx = 0 if group.where == "0:1" else group.where[0] % NUM_LAYERS
        if layer_idx != 0:
            recorders[layer_idx] = Recorder()
            seen = PolicySpec.of(recorders[layer_idx])
            group = attrs.evolve(group, stack=(*(group.stack or ()), seen))
        layers.append(group)
    return attrs.evolve(plan, layers=tuple(layers))


def test_every_layer_compacts_by_its_own_budget_and_buffer(tmp_path: Path) -> None:
    recorders: dict[int, Recorder] = {}
    plan = plan_of(tmp_path, recorders)
    engine = Engine(shared_model(num_layers=NUM_LAYERS), None, plan, slots=2)
    prompts = [[7, 3, 9, 1] * 3, [5, 8] * 20, [11]]
    results = engine.generate(prompts, max_new_tokens=40).results()
    assert [len(result.tokens) for result in results] == [40] * 3
    longest = max(result.prompt_len for result in results) + 40
    assert [layer.capacity(longest) for layer in engine.plan.layers] == [
        longest,
        *(budget + buffer for budget, buffer in EXPECTED.values()),
    ]
    for layer_idx, (budget, buffer) in EXPECTED.items():
        compactions = [one for record in recorders[layer_idx].records for one in record.compactions]
        assert len(recorders[layer_idx].records) == 3, "every sequence was compacted here"
        assert {one.layer_idx for one in compactions} == {layer_idx}
        assert {one.budget for one in compactions} == {budget}
        # Long prompts enter in chunks that fill the slab, decoding fills it row by row.
        assert {one.positions.shape[1] for one in compactions} == {budget + buffer}
        assert {one.kept.shape[1] for one in compactions if one.kept is not None} == {budget}
