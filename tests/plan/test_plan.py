"""Plans: what a file says becomes what each layer does, and every mistake becomes a sentence."""

from pathlib import Path

import attrs
import pytest

from kvpolicy import Plan, hookimpl, load_policy
from kvpolicy.entry_points import installed, installed_file
from kvpolicy.errors import KVPolicyError, PlanError
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


def test_every_layer_gets_what_its_group_says(tmp_path):
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


def test_layers_with_the_same_stack_share_it_and_others_do_not(tmp_path):
    stacks = load(tmp_path, MIXED).resolve(4).stacks()
    assert stacks[0] is stacks[1]
    assert stacks[2] is stacks[3]
    assert stacks[0] is not stacks[2]


@pytest.mark.parametrize(
    ("where", "expected"),
    [("all", [0, 1, 2, 3]), (":", [0, 1, 2, 3]), ("-2:", [2, 3]), ("::2", [0, 2]), ("1:2", [1])],
)
def test_where_selects_as_python_slices_do(where, expected):
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
def test_overrides_change_what_they_name(tmp_path, override, look, expected):
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


def test_an_override_reaches_policies_inside_of_others(tmp_path):
    plan = load(tmp_path, INNER, ["rkv.mix_lambda=0.25", "h2o.n_recent=9", "mix.normalise=sum"])
    alone, outer = plan.resolve(1).layers[0].stack
    h2o, rkv, inner = outer.knobs["of"]
    assert alone.knobs["n_recent"] == h2o["n_recent"] == 9
    assert (rkv["weight"], rkv["mix_lambda"]) == (2.0, 0.25)
    assert outer.knobs["normalise"] == inner["normalise"] == "sum"
    assert inner["of"][0]["mix_lambda"] == 0.25
    assert inner["of"][1] == load_policy("mix", of=["snapkv"]).of[0], "the others are left alone"


def test_a_policy_that_is_nowhere_inside_either_is_told_with_the_nearest(tmp_path):
    with pytest.raises(PlanError, match="uses no policy 'snapvk'; did you mean snapkv"):
        load(tmp_path, INNER, ["snapvk.window_size=4"])


def test_a_digest_is_stable_and_tells_plans_apart(tmp_path):
    first = load(tmp_path, MIXED).resolve(4)
    again = load(tmp_path, MIXED + "\n# a comment\n").resolve(4)
    other = load(tmp_path, MIXED, ["rkv.mix_lambda=0.51"]).resolve(4)
    assert first.digest() == again.digest()
    assert first.digest() != other.digest()
    # A default written out is the same plan.
    spelled = load(tmp_path, MIXED, ["rkv.window_size=8"]).resolve(4)
    assert spelled.digest() == first.digest()


def test_uniform_is_the_same_plan_as_its_file(tmp_path):
    text = 'stack = [{ policy = "rkv", mix_lambda = 0.2 }, "protect"]\nbudget = 40\nbuffer = 8\n'
    made = Plan.uniform("rkv", "protect", budget=40, buffer=8, knobs={"rkv": {"mix_lambda": 0.2}})
    assert made.resolve(3).to_dict() == load(tmp_path, text).resolve(3).to_dict()


def test_a_policy_made_in_python_is_taken_as_it_is():
    policy = Mine(strength=5)
    resolved = Plan.uniform(policy, budget=8).resolve(2)
    assert resolved.stacks()[0].policies == [policy]
    assert resolved.to_dict()["layers"][0]["stack"] == [{"policy": "mine", "strength": 5}]


MISTAKES = {
    "not toml": ("budget = [", "not TOML"),
    "unknown key": ('stack = ["full"]\nbugdet = 3', "'bugdet'; did you mean budget"),
    "unknown key in a group": (
        '[[layers]]\nstak = ["full"]',
        "in layers[0]: unknown key 'stak'; did you mean stack",
    ),
    "unknown policy": ('stack = ["snapvk"]\nbudget = 64', "'snapvk'; did you mean snapkv"),
    "unknown knob": (
        'stack = [{ policy = "rkv", mix_lamda = 1 }]\nbudget = 64',
        "no knob 'mix_lamda'; did you mean mix_lambda",
    ),
    "refused knob": (
        'stack = [{ policy = "rkv", mix_lambda = 2 }]\nbudget = 64',
        "'mix_lambda' must be <= 1: 2",
    ),
    "knob of the wrong kind": (
        'stack = [{ policy = "rkv", window_size = "8" }]\nbudget = 64',
        "'window_size' must be <class 'int'>",
    ),
    "no policy": ("budget = 3", "names no policy"),
    "policy is no name": ("stack = [3]\nbudget = 3", "in stack[0]: 3 is not a policy"),
    "no budget": ('stack = ["streaming"]', "no budget"),
    "budget zero": (
        'stack = ["streaming"]\nbudget = 0',
        "in budget: 0 is out of range; write a whole number from 1",
    ),
    "buffer zero": (
        'stack = ["streaming"]\nbudget = 9\nbuffer = 0',
        "in buffer: 0 is out of range",
    ),
    "budget below what is protected": (
        'stack = ["rkv", "protect"]\nbudget = 11',
        "protect 12 rows: 4 first and 8 newest",
    ),
    "budget is text": ('stack = ["streaming"]\nbudget = "64"', "'64' is not a count"),
    "budget is a fraction": ('stack = ["streaming"]\nbudget = 0.5', "0.5 is not a count"),
    "budget is true": ('stack = ["streaming"]\nbudget = true', "True is not a count"),
    "layer twice": (
        '[[layers]]\nwhere = "all"\nstack = ["full"]\n[[layers]]\nwhere = [2]\nstack = ["full"]',
        "covers layer 2 twice",
    ),
    "layer missing": ('[[layers]]\nwhere = "1:"\nstack = ["full"]', "does not cover layer 0"),
    "layer beyond": ('[[layers]]\nwhere = [7]\nstack = ["full"]', "names layer 7; the model has"),
    "empty slice": ('[[layers]]\nwhere = "9:"\nstack = ["full"]', "covers none"),
    "no slice": ('[[layers]]\nwhere = "first"\nstack = ["full"]', "is not a set of layers; write"),
    "where is empty": ('[[layers]]\nwhere = []\nstack = ["full"]', "is not a set of layers; write"),
}


@pytest.mark.parametrize(("text", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_answered_with_one_sentence(tmp_path, text, sentence):
    with pytest.raises(KVPolicyError) as caught:
        load(tmp_path, text).resolve(4)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("budget", "not KEY=VALUE"),
        ("=3", "not KEY=VALUE"),
        ("layers.9.budget=3", "has 2 [[layers]] groups"),
        ("layers.x.budget=3", "has 2 [[layers]] groups"),
        ("h2o.n_recent=3", "uses no policy 'h2o'"),
        ("rvk.mix_lambda=0.1", "did you mean rkv"),
        ("a.b.c.d=3", "write KEY=, layers.N.KEY= or POLICY.KNOB="),
        ("budgt=3", "did you mean budget"),
    ],
)
def test_a_mistaken_override_is_answered_with_one_sentence(tmp_path, override, sentence):
    with pytest.raises(KVPolicyError, match=r".*") as caught:
        load(tmp_path, MIXED, [override]).resolve(4)
    assert sentence in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(KVPolicyError, match=r"missing\.toml"):
        Plan.load(tmp_path / "missing.toml")
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b"# \xe9\n")
    with pytest.raises(KVPolicyError, match="not UTF-8"):
        Plan.load(latin)


def test_knobs_of_a_policy_outside_the_stack_are_refused():
    with pytest.raises(KVPolicyError, match="'h2o', which is not in the stack"):
        Plan.uniform("rkv", budget=64, knobs={"h2o": {"n_recent": 3}})


# Plans that packages bring along

BUNDLED = installed("kvpolicy.plans")


@pytest.mark.parametrize("name", BUNDLED)
def test_a_bundled_plan_resolves_and_says_where_it_comes_from(name: str) -> None:
    plan = Plan.load(name)
    resolved = plan.resolve(4)
    assert all(layer.budget and layer.bounded for layer in resolved.layers)
    assert name in plan.name
    path = installed_file("kvpolicy.plans", name, suffix=".toml", what="plan")
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_a_file_of_the_same_name_is_named_with_its_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "skipkv.toml").write_text('stack = ["h2o"]\nbudget = 9\n')
    assert Plan.load("skipkv.toml").budget == 9
    assert Plan.load("skipkv").budget == 1024


def test_an_unknown_name_is_answered_with_the_nearest_and_what_a_file_would_be() -> None:
    with pytest.raises(PlanError, match=r"no plan is named 'skipvk'.*skipkv.*plan\.toml"):
        Plan.load("skipvk")
