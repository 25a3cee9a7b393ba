"""Reading plans, overriding their entries, and resolving them."""

import re
import tomllib
from pathlib import Path

import attrs
import pytest

from kvpolicy import Plan, hookimpl, load_policy
from kvpolicy.entry_points import default_name, installed, installed_file
from kvpolicy.errors import KVPolicyError, PlanError
from kvpolicy.lab.sweep.sweep_file import load_preset
from kvpolicy.plan.plan import check_plan, default_buffer
from kvpolicy.plan.spec import LayerGroup, PolicySpec

MIXED = """
budget = 64
buffer = 16

[[layers]]
where = "0:2"
stack = ["full"]

[[layers]]
where = [2, -1]
stack = [{ policy = "rkv", mix_lambda = 0.5 }, "protect"]
budget = 32
buffer = 4
"""


@attrs.define(eq=False)
class Mine:
    """A policy made in Python."""

    strength: int = 3

    @hookimpl
    def score(self, positions):
        return positions.float()


def load(tmp_path, text: str, overrides=()) -> Plan:
    path = tmp_path / "plan.toml"
    path.write_text(text)
    return Plan.load(path, overrides)


def test_layers_get_the_values_of_their_group(tmp_path):
    layers = load(tmp_path, MIXED).resolve(4).layers
    assert [[spec.policy for spec in layer.stack] for layer in layers] == [
        ["full"],
        ["full"],
        ["rkv", "protect"],
        ["rkv", "protect"],
    ]
    assert [(layer.budget, layer.buffer, layer.bounded) for layer in layers] == [
        (64, 16, False),
        (64, 16, False),
        (32, 4, True),
        (32, 4, True),
    ]
    assert layers[3].stack[0].knobs["mix_lambda"] == 0.5
    assert layers[3].stack[0].knobs["window_size"] == 8, "defaults are spelled out"


def test_only_layers_with_equal_policies_share_a_stack(tmp_path):
    stacks = load(tmp_path, MIXED).resolve(4).stacks()
    assert stacks[0] is stacks[1]
    assert stacks[2] is stacks[3]
    assert stacks[0] is not stacks[2]


@pytest.mark.parametrize(
    ("where", "expected"),
    [("all", [0, 1, 2, 3]), (":", [0, 1, 2, 3]), ("-2:", [2, 3]), ("::2", [0, 2]), ("1:2", [1])],
)
def test_where_is_a_slice_as_in_python(where, expected):
    rest = [layer for layer in range(4) if layer not in expected]
    groups = [LayerGroup(where, (PolicySpec("streaming"),), budget=9)]
    if rest:
        groups.append(LayerGroup(tuple(rest), (PolicySpec("full"),)))
    resolved = Plan(layers=tuple(groups)).resolve(4)
    chosen = [layer.layer_idx for layer in resolved.layers if layer.stack[0].policy == "streaming"]
    assert chosen == expected


@pytest.mark.parametrize(
    ("override", "look", "expected"),
    [
        ("budget=96", lambda plan: plan.budget, 96),
        ("layers.1.buffer=8", lambda plan: plan.layers[1].buffer, 8),
        ("rkv.mix_lambda=0.25", lambda plan: plan.layers[1].stack[0].knobs["mix_lambda"], 0.25),
        ("protect.n_sink = 2", lambda plan: plan.layers[1].stack[1].knobs["n_sink"], 2),
        ("rkv.pooling=avgpool", lambda plan: plan.layers[1].stack[0].knobs["pooling"], "avgpool"),
        ('layers.0.where="0:2"', lambda plan: plan.layers[0].where, "0:2"),
    ],
)
def test_overrides_change_one_entry(tmp_path, override, look, expected):
    assert look(load(tmp_path, MIXED, [override])) == expected


INNER = """
budget = 64
stack = [
  "h2o",
  { policy = "mix", of = [
    "h2o",
    { policy = "rkv", weight = 2 },
    { policy = "mix", of = ["rkv", "snapkv"] },
  ] },
]
"""


def test_overrides_apply_to_policies_inside_others(tmp_path):
    plan = load(tmp_path, INNER, ["rkv.mix_lambda=0.25", "h2o.n_recent=9", "mix.normalise=sum"])
    alone, outer = plan.resolve(1).layers[0].stack
    h2o, rkv, inner = outer.knobs["of"]
    assert alone.knobs["n_recent"] == h2o["n_recent"] == 9
    assert (rkv["weight"], rkv["mix_lambda"]) == (2.0, 0.25)
    assert outer.knobs["normalise"] == inner["normalise"] == "sum"
    assert inner["of"][0]["mix_lambda"] == 0.25
    assert inner["of"][1] == load_policy("mix", of=["snapkv"]).of[0], "other policies are unchanged"


def test_an_override_of_an_unknown_policy_suggests_the_nearest(tmp_path):
    with pytest.raises(PlanError, match=r"'snapvk'.* snapkv"):
        load(tmp_path, INNER, ["snapvk.window_size=4"])


def test_digests_are_equal_exactly_for_equal_plans(tmp_path):
    first = load(tmp_path, MIXED).resolve(4)
    again = load(tmp_path, MIXED + "\n# a comment\n").resolve(4)
    other = load(tmp_path, MIXED, ["rkv.mix_lambda=0.51"]).resolve(4)
    assert first.digest() == again.digest()
    assert first.digest() != other.digest()
    # A default written out is the same plan.
    spelled = load(tmp_path, MIXED, ["rkv.window_size=8"]).resolve(4)
    assert spelled.digest() == first.digest()


def test_uniform_equals_the_same_plan_as_a_file(tmp_path):
    text = 'stack = [{ policy = "rkv", mix_lambda = 0.2 }, "protect"]\nbudget = 40\nbuffer = 8\n'
    made = Plan.uniform("rkv", "protect", budget=40, buffer=8, knobs={"rkv": {"mix_lambda": 0.2}})
    assert made.resolve(3).to_dict() == load(tmp_path, text).resolve(3).to_dict()


def test_a_policy_object_is_used_itself():
    policy = Mine(strength=5)
    resolved = Plan.uniform(policy, budget=8).resolve(2)
    assert resolved.stacks()[0].policies == [policy]
    assert resolved.to_dict()["layers"][0]["stack"] == [{"policy": "mine", "strength": 5}]


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("budget", "KEY=VALUE"),
        ("=3", "KEY=VALUE"),
        ("layers.9.budget=3", "2 [[layers]]"),
        ("layers.x.budget=3", "2 [[layers]]"),
        ("h2o.n_recent=3", "'h2o'"),
        ("rvk.mix_lambda=0.1", " rkv"),
        ("a.b.c.d=3", "POLICY.KNOB="),
        ("budgt=3", " budget"),
    ],
)
def test_a_wrong_override_is_refused(tmp_path, override, named):
    with pytest.raises(KVPolicyError, match=re.escape(named)):
        load(tmp_path, MIXED, [override]).resolve(4)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(KVPolicyError, match=r"missing\.toml"):
        Plan.load(tmp_path / "missing.toml")
    with pytest.raises(KVPolicyError, match="TOML"):
        load(tmp_path, "budget = [")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    with pytest.raises(KVPolicyError, match="UTF-8"):
        Plan.load(latin)


def test_knobs_of_a_policy_outside_the_stack_are_refused():
    with pytest.raises(KVPolicyError, match="'h2o'"):
        Plan.uniform("rkv", budget=64, knobs={"h2o": {"n_recent": 3}})


# The buffer of a plan that names none


@pytest.mark.parametrize(
    ("budget", "buffer"),
    [(1, 1), (16, 16), (32, 32), (96, 32), (256, 32), (512, 64), (1024, 128), (10**6, 128)],
)
def test_the_default_buffer_fits_the_budget(budget: int, buffer: int) -> None:
    plans = [
        Plan.uniform("h2o", budget=budget),
        Plan.from_dict({"stack": ["h2o"], "layers": [{"budget": budget}]}),
        Plan.from_dict({"stack": ["h2o"]}, [f"budget={budget}"]),
        Plan.uniform("h2o", budget="50%", length=2 * budget),
    ]
    resolved = [plan.resolve(2) for plan in plans]
    resolved.append(Plan.uniform("h2o").resolve(2, default_budget=budget))
    assert {layer.buffer for plan in resolved for layer in plan.layers} == {buffer}
    assert len({plan.digest() for plan in resolved}) == 1
    assert (
        resolved[0].digest()
        == Plan.uniform("h2o", budget=budget, buffer=buffer).resolve(2).digest()
    ), "a default that is written out is the same plan"


@pytest.mark.needs_reasoner
def test_the_default_buffer_is_that_of_the_default_sweep() -> None:
    sweep = load_preset(default_name("sweep") or "")
    assert {default_buffer(budget) for budget in sweep.budgets} == {sweep.buffer}


def test_a_group_may_name_a_buffer_where_the_plan_has_none() -> None:
    groups = [{"where": "0:1", "buffer": 3}, {"where": "1:2", "budget": 8}, {"where": "2:"}]
    layers = Plan.from_dict({"stack": ["h2o"], "budget": 64, "layers": groups}).resolve(3).layers
    assert [layer.buffer for layer in layers] == [3, 8, 32]


# How the user gave an entry is named in errors


@pytest.mark.parametrize(
    "override",
    [
        "budget=0",
        "layers.1.buffer=0",
        "layers.1.stack=[3]",
        'layers.1.stack=["rkvv"]',
        "layers.1.budget=3",
        "rkv.mix_lambda=3",
        "rkv.mixlambda=3",
        "bugdet=3",
        "layers.1.bugdet=3",
        "layers.1.budget=9%",
    ],
)
def test_an_error_names_the_override_that_it_comes_from(tmp_path: Path, override: str) -> None:
    with pytest.raises(KVPolicyError) as caught:
        load(tmp_path, MIXED, [override]).resolve(4)
    assert f"--set '{override}'" in str(caught.value)
    data = tomllib.loads(MIXED)
    (problem,) = check_plan(data, [override], num_layers=4).problems
    assert f"--set '{override}'" in str(problem)


def test_an_error_of_the_file_is_not_blamed_on_an_override(tmp_path: Path) -> None:
    text = MIXED.replace("mix_lambda = 0.5", "mix_lambda = 5")
    with pytest.raises(KVPolicyError) as caught:
        load(tmp_path, text, ["rkv.window_size=8", "budget=65"]).resolve(4)
    assert "--set" not in str(caught.value)
    assert "'mix_lambda'" in str(caught.value)


# Plans that packages install

BUNDLED = installed("kvpolicy.plans")


@pytest.mark.few(10)
@pytest.mark.parametrize("name", BUNDLED)
def test_an_installed_plan_resolves_and_begins_with_its_source(name: str) -> None:
    plan = Plan.load(name)
    resolved = plan.resolve(30 if "smollm2" in name else 4)  # one steers a layer of its model
    assert all(layer.budget and layer.bounded for layer in resolved.layers)
    assert name in plan.name
    path = installed_file("kvpolicy.plans", name, suffix=".toml", what="plan")
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_a_file_with_the_name_of_an_installed_plan_needs_its_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skipkv.toml").write_text('stack = ["h2o"]\nbudget = 9\n')
    assert Plan.load("skipkv.toml").budget == 9
    assert Plan.load("skipkv").budget == 1024


def test_an_unknown_name_suggests_the_nearest_and_a_file() -> None:
    with pytest.raises(PlanError, match=r"'skipvk'.* skipkv"):
        Plan.load("skipvk")


def test_rows_are_stored_as_the_plan_or_a_group_says() -> None:
    mixed = {"keys": "int8", "values": "int4"}
    groups = [{"where": "0:1"}, {"where": "1:2", "rows": "model"}, {"where": "2:", "rows": mixed}]
    data = {"stack": ["full"], "rows": "int8", "layers": groups}
    resolved = Plan.from_dict(data).resolve(3)
    written = [layer.to_dict().get("rows") for layer in resolved.layers]
    assert written == ["int8", None, mixed]
    slabs = [
        layer.slab(stack, 9)
        for layer, stack in zip(resolved.layers, resolved.stacks(), strict=True)
    ]
    assert [(slab.key_bits, slab.value_bits) for slab in slabs] == [(8, 8), (0, 0), (8, 4)]


def test_a_plan_that_says_how_rows_are_stored_by_default_is_the_same_plan() -> None:
    digests = {
        Plan.uniform("full", **rows).resolve(2).digest()
        for rows in ({}, {"rows": "model"}, {"rows": {"keys": "model"}})
    }
    assert len(digests) == 1
    eight, four = ({"keys": one, "values": one} for one in ("int8", "int4"))
    for alike in (["int8", eight], ["int4", four, four | {"exact": 16}]):
        other = {Plan.uniform("full", rows=rows).resolve(2).digest() for rows in alike}
        assert len(other) == 1
        assert not digests & other
        digests |= other


def test_the_newest_rows_stay_exact_where_these_have_four_bits() -> None:
    given = {
        "int8": 0,
        "int4": 16,
        "int8/int4": 8,
        "model/int4": 8,
        "int4/model": 16,
        ("int4", "int4", 7): 7,
        ("model", "int4", 0): 0,
    }
    for rows, exact in given.items():
        names = ("keys", "values", "exact")
        given_as = rows if isinstance(rows, str) else dict(zip(names, rows, strict=True))
        plan = Plan.from_dict({"stack": ["full"], "rows": given_as})
        resolved = plan.resolve(1)
        assert resolved.layers[0].slab(resolved.stacks()[0], 9).exact == exact
