"""Plans that extend other plans."""

from pathlib import Path

import pytest

from kvpolicy import Plan
from kvpolicy.errors import PlanError
from kvpolicy.lab.sweep.grid import build_cells
from kvpolicy.lab.sweep.sweep_file import Series

BASE = """
budget = 64
buffer = 16
stack = ["h2o", "protect"]
"""
GROUPS = """
budget = 48
[[layers]]
where = "0:2"
stack = ["full"]
[[layers]]
where = "2:"
stack = ["rkv"]
budget = 32
"""


@pytest.fixture
def write(tmp_path: Path):
    def to(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    return to


def test_keys_replace_those_of_the_base(write) -> None:
    write("base.toml", BASE)
    plan = Plan.load(write("child.toml", 'extends = "base.toml"\nbudget = 32\n'))
    assert (plan.budget, plan.buffer) == (32, 16)
    assert [spec.policy for spec in plan.stack] == ["h2o", "protect"]


def test_a_base_is_relative_to_the_file_that_names_it(write, monkeypatch, tmp_path) -> None:
    write("a/base.toml", BASE)
    write("a/middle/one.toml", 'extends = "../base.toml"\nbuffer = 8\n')
    child = write("b/child.toml", 'extends = "../a/middle/one.toml"\nbudget = 40\n')
    monkeypatch.chdir(tmp_path / "b")
    for named in (child, "child.toml"):
        plan = Plan.load(named)
        assert (plan.budget, plan.buffer, len(plan.stack)) == (40, 8, 2)


def test_an_installed_plan_is_extended_by_name(write) -> None:
    plan = Plan.load(write("mine.toml", 'extends = "skipkv"\nbudget = 96\n'))
    installed = Plan.load("skipkv")
    assert plan.budget == 96 != installed.budget
    assert (plan.stack, plan.buffer) == (installed.stack, installed.buffer)


def test_a_plan_given_as_data_extends_a_file(write, monkeypatch, tmp_path) -> None:
    write("base.toml", BASE)
    monkeypatch.chdir(tmp_path)
    assert Plan.from_dict({"extends": "base.toml", "budget": 20}).buffer == 16
    assert Plan.from_dict({"extends": "skipkv"}) == Plan.load("skipkv")


def test_groups_of_layers_are_replaced_as_a_whole(write) -> None:
    write("base.toml", GROUPS)
    text = 'extends = "base.toml"\n[[layers]]\nwhere = "all"\nstack = ["streaming"]\n'
    plan = Plan.load(write("child.toml", text))
    layers = plan.resolve(4).layers
    assert [layer.stack[0].policy for layer in layers] == ["streaming"] * 4
    assert [layer.budget for layer in layers] == [48] * 4, "the budget of the base is inherited"


def test_an_empty_list_of_groups_removes_those_of_the_base(write) -> None:
    write("base.toml", GROUPS)
    text = 'extends = "base.toml"\nlayers = []\nstack = ["h2o"]\n'
    layers = Plan.load(write("child.toml", text)).resolve(3).layers
    assert [(layer.stack[0].policy, layer.budget) for layer in layers] == [("h2o", 48)] * 3


def test_a_budget_of_a_group_overrides_that_of_the_extending_plan(write) -> None:
    write("base.toml", GROUPS)
    plan = Plan.load(write("child.toml", 'extends = "base.toml"\nbudget = 99\n'))
    assert [layer.budget for layer in plan.resolve(4).layers] == [99, 99, 32, 32]


def test_overrides_apply_to_inherited_values(write) -> None:
    write("base.toml", GROUPS)
    child = write("child.toml", 'extends = "base.toml"\nbuffer = 8\n')
    plan = Plan.load(child, ["layers.1.budget=24", "rkv.mix_lambda=0.3", "budget=50"])
    layers = plan.resolve(3).layers
    assert [layer.budget for layer in layers] == [50, 50, 24]
    assert layers[2].stack[0].knobs["mix_lambda"] == 0.3


def test_an_extending_plan_equals_the_same_plan_in_one_file(write) -> None:
    write("base.toml", BASE)
    child = Plan.load(write("child.toml", 'extends = "base.toml"\nbudget = 33\n'))
    whole = Plan.load(write("whole.toml", BASE.replace("64", "33")))
    assert child == whole
    assert child.resolve(4).digest() == whole.resolve(4).digest()


def test_a_sweep_accepts_plans_that_extend_others(write) -> None:
    write("base.toml", BASE)
    series = Series.from_file(write("child.toml", 'extends = "base.toml"\nbuffer = 4\n'))
    (cell,) = build_cells([series], num_layers=2, budgets=[99], buffer=None)
    assert (cell.budget, cell.buffer) == (64, 4)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ({"a": "a"}, "'{d}/a.toml' -> '{d}/a.toml'"),
        ({"a": "b", "b": "a"}, "'{d}/a.toml' -> '{d}/b.toml' -> '{d}/a.toml'"),
        (
            {"a": "b", "b": "c", "c": "b"},
            "'{d}/a.toml' -> '{d}/b.toml' -> '{d}/c.toml' -> '{d}/b.toml'",
        ),
        ({"a": "../{f}/a"}, "a.toml"),
    ],
)
def test_a_plan_that_extends_itself_is_refused(write, tmp_path, chain, message) -> None:
    for name, base in chain.items():
        base = base.replace("{f}", tmp_path.name)
        write(f"{name}.toml", f'extends = "{base}.toml"\n')
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "a.toml")
    assert message.replace("{d}", str(tmp_path)) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('extends = "none.toml"', "none.toml"),
        ('extends = "broken.toml"', "broken.toml"),
        ('extends = "skipvk"', "'skipvk'"),
        ("extends = 3", "3"),
        ('extends = ["a.toml", "b.toml"]', "a.toml"),
        ('extends = ""', "extends"),
        ('extends = "a\\u0000.toml"', "null byte"),
        ('extends = "."', "'.'"),
        ('extends = "./"', "'.'"),
        ('extends = "/"', "'/'"),
    ],
)
def test_a_base_that_cannot_be_read_is_named_with_the_extending_plan(
    write, tmp_path, text: str, message: str
) -> None:
    write("broken.toml", "budget = = 3")
    with pytest.raises(PlanError) as caught:
        Plan.load(write("child.toml", text))
    assert "child.toml" in str(caught.value)
    assert message.replace("{d}", str(tmp_path)) in str(caught.value)


def test_an_error_in_a_base_is_reported(write) -> None:
    write("base.toml", "bugdet = 3\n")
    with pytest.raises(PlanError, match=r"'bugdet'.* budget"):
        Plan.load(write("child.toml", 'extends = "base.toml"\nstack = ["h2o"]\n'))


def test_overrides_cannot_change_the_base(write) -> None:
    write("base.toml", BASE)
    with pytest.raises(PlanError, match="extends"):
        Plan.load(write("child.toml", BASE), ['extends="base.toml"'])
