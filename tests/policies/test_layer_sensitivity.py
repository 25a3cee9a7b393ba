"""Budgets by sensitivity of layers; its measurement equals two masked forwards in plain loops."""

from pathlib import Path

import pytest
import reference_layer_sensitivity as reference
import tiny
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.layer_sensitivity.measure import measure_texts, sensitivities
from kvpolicy_plugins.layer_sensitivity.policy import LayerSensitivity, divide

from kvpolicy import Engine, Plan, load_model
from kvpolicy.errors import KVPolicyError
from kvpolicy.toolkit import LayerTable, LayerTableError, load_layer_table, save_layer_table

weights = st.lists(st.floats(0.001, 1), min_size=1, max_size=8)


def table(path: Path, *values: float) -> str:
    save_layer_table(path / "t.json", LayerTable("sensitivity", "m", values, {"block": 4}))
    return str(path / "t.json")


def asked(policy: LayerSensitivity, budget: int, num_layers: int, floor: int = 1) -> list[int]:
    layers = range(num_layers)
    return policy.allocate(layers, budget, budget * num_layers, [floor] * num_layers, num_layers)


def test_a_part_that_is_raised_may_push_others_below_their_floors() -> None:
    # By weights alone 12, 6, 2: the last is raised, which leaves 8 and 4, so the second is, too.
    assert divide(20, [6, 3, 1], [0, 6, 8]) == [6, 6, 8]


@given(weights, st.integers(1, 400), st.data())
def test_parts_are_proportional_but_for_floors_and_add_up(
    drawn: list[float], mean: int, data: st.DataObject
) -> None:
    floors = [data.draw(st.integers(0, mean)) for _ in drawn]
    total = mean * len(drawn)
    parts = divide(total, drawn, floors)
    assert sum(parts) == total
    expected = reference.shares(total, drawn, floors)
    for part, share, floor in zip(parts, expected, floors, strict=True):
        assert part >= floor
        assert abs(part - share) < 1 + 1e-6 * total


def test_a_part_that_is_raised_can_push_another_below_its_floor() -> None:
    # shares 2, 8, 20; with 7 for the first, 4/14 of the other 23 are too few for the second
    assert divide(30, [1, 4, 10], [7, 7, 0]) == [7, 7, 16]


@given(weights, st.integers(4, 300), st.sampled_from(["paper", "code"]), st.floats(0, 4))
def test_budgets_add_up_to_layers_times_mean_and_none_is_below_its_least(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[float],
    mean: int,
    variant: str,
    alpha: float,
) -> None:
    file = table(tmp_path_factory.mktemp("t"), *drawn)
    policy = LayerSensitivity(table=file, variant=variant, alpha=alpha)
    found = asked(policy, mean, len(drawn), floor=3)
    assert sum(found) == mean * len(drawn)
    assert min(found) >= max(3, mean // 4)


def test_the_papers_formula_on_numbers(tmp_path: Path) -> None:
    file = table(tmp_path, 0.1, 0.2, 0.3)
    # squares 1 : 4 : 9 of 3 * 140 rows
    assert asked(LayerSensitivity(table=file, least=0), 140, 3) == [30, 120, 270]
    assert asked(LayerSensitivity(table=file, alpha=1, least=0), 140, 3) == [70, 140, 210]
    # a quarter of the mean at least; 4 : 9 of the other 385
    assert asked(LayerSensitivity(table=file), 140, 3) == [35, 118, 267]


def test_the_codes_weights_on_numbers(tmp_path: Path) -> None:
    file = table(tmp_path, 0.1, 0.2, 0.3)
    # sigma scaled to 0..1 is 1, 1/2, 0: weights 0, 2 ** -1.1, 1
    assert LayerSensitivity(table=file, variant="code").weights([0.1, 0.2, 0.3]) == pytest.approx(
        [0, 2**-1.1, 1]
    )
    assert asked(LayerSensitivity(table=file, variant="code", alpha=1), 120, 3) == [30, 110, 220]


@pytest.mark.parametrize("knobs", [{"alpha": 0}, {"alpha": 0, "variant": "code", "least": 0.5}])
def test_alpha_0_gives_all_layers_the_same(tmp_path: Path, knobs: dict) -> None:
    assert asked(LayerSensitivity(table=table(tmp_path, 0.0, 0.5, 0.2), **knobs), 50, 3) == [50] * 3


def test_protected_rows_come_before_the_least_share(tmp_path: Path) -> None:
    policy = LayerSensitivity(table=table(tmp_path, 0.1, 0.1, 0.9), least=1)
    assert policy.allocate([0, 1, 2], 10, 30, [16, 1, 1], 3) == [16, 7, 7]


def test_without_a_table_and_with_equal_numbers_all_layers_get_the_same(tmp_path: Path) -> None:
    file = table(tmp_path, 0.0, 0.0)
    for knobs in ({}, {"table": file}, {"table": file, "variant": "code"}):
        assert asked(LayerSensitivity(**knobs), 31, 2) == [31, 31]


@pytest.mark.parametrize("block", [1, 3, 5, 40])
def test_sensitivity_equals_two_masked_forwards_in_loops(block: int) -> None:
    model = tiny.tiny_model(num_layers=3)
    texts = [[5, 9, 14, 3, 22, 41, 7, 7, 30, 2, 11], [8, 1, 19, 33, 4]]
    found = sensitivities(list(measure_texts(model, texts, block=block)))
    assert found == pytest.approx(reference.sensitivity(model, texts, block), abs=1e-6)
    assert found[0] < 1e-6  # its keys depend on no other token
    assert (max(found) > 1e-4) == (block < 11)


def test_a_layer_behind_one_that_mixes_no_tokens_is_not_sensitive() -> None:
    model = tiny.tiny_model(num_layers=4)
    for layer in (0, 2):
        model.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    found = sensitivities(list(measure_texts(model, [list(range(3, 40))], block=6)))
    # Layer 1 sees what layer 0 left alone; layer 3 is as layer 2 found it, behind layer 1.
    assert max(found[:2]) < 1e-6
    assert min(found[2:]) > 1e-4


@pytest.mark.needs_reasoner
def test_a_plan_divides_its_budget_by_the_bundled_table() -> None:
    model, _ = load_model("reasoner")
    values = load_layer_table("reasoner").values
    resolved = Plan.load("reasoner-h2o-layers").resolve(model.config.num_hidden_layers)
    budgets = [layer.budget for layer in resolved.layers]
    assert sum(budgets) == 96 * 4
    assert budgets == sorted(budgets)
    assert list(values) == sorted(values)
    assert budgets[0] == 24


def test_alone_it_bounds_all_layers_and_the_newest_rows_stay() -> None:
    engine = Engine(
        tiny.tiny_model("llama"), plan=Plan.uniform("layer_sensitivity", budget=9, buffer=4)
    )
    assert all(layer.bounded for layer in engine.plan.layers)
    run = engine.generate([list(range(30))], max_new_tokens=9)
    while not run.active or not run.active[0].tokens:
        run.step()
    held = run.cache.layers[0].positions[0, 0]
    assert len(held) == 13
    assert set(held[held >= 0].tolist()) >= set(range(21, 30))


def test_the_hash_of_the_table_is_in_the_plan(tmp_path: Path) -> None:
    file = table(tmp_path, 0.1, 0.2)
    named = LayerSensitivity(table=file).table
    assert named.startswith(f"{file}#")
    assert LayerSensitivity(table=named).table == named
    table(tmp_path, 0.1, 0.3)
    with pytest.raises(KVPolicyError, match="table"):
        LayerSensitivity(table=named)


@pytest.mark.needs_reasoner
def test_a_table_of_another_model_is_refused_with_both_depths(tmp_path: Path) -> None:
    model, _ = load_model("reasoner")
    plan = Plan.uniform(
        LayerSensitivity(table=table(tmp_path, 0.1, 0.2)), "h2o", budget=64, buffer=8
    )
    with pytest.raises(KVPolicyError, match=r"2 layers .* 4"):
        plan.resolve(model.config.num_hidden_layers)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 1, "quantity": "s", "model": "m", "values": 3, "measured": {}}'],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(LayerTableError, match=r"t\.json"):
        load_layer_table(tmp_path / "t.json")


@pytest.mark.parametrize("value", [float("nan"), "1", True, None])
def test_values_that_are_no_numbers_are_refused(value: object) -> None:
    with pytest.raises(LayerTableError, match="number"):
        LayerTable("s", "m", (0.5, value))
