"""Sweep files: the installed ones, and invalid ones."""

from pathlib import Path

import pytest

from kvpolicy.entry_points import default_name, installed
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.sweep.grid import build_cells
from kvpolicy.lab.sweep.prepare import load_series
from kvpolicy.lab.sweep.sweep_file import GROUP, load_preset
from kvpolicy.lab.tasks.task import load_task, needs_tokenizer

pytestmark = pytest.mark.needs_reasoner

GOOD = """
model = "reasoner"
task = "reasoner"
n = 10
seed = 0
max_new_tokens = 50
slots = 4
budgets = [16]
buffer = 8

[[series]]
label = "a"
plan.stack = ["streaming"]
"""


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_the_default_preset_compares_full_caches_and_four_policies_at_four_budgets() -> None:
    name = default_name("sweep")
    assert name is not None
    preset = load_preset(name)
    cells = build_cells(preset.series, num_layers=4, budgets=preset.budgets, buffer=preset.buffer)
    assert preset.name == name
    assert preset.n >= 100
    assert len(preset.budgets) == 4
    assert len(cells) == 2 + 4 * len(preset.budgets)
    assert [cell.budget for cell in cells[:2]] == [None, None], "the references come first"
    assert [cell.resolved.layers[0].rows.key_bits for cell in cells[:2]] == [0, 8]
    assert all(cell.budget is not None for cell in cells[2:])


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("name", installed(GROUP))
def test_an_installed_preset_fits_the_bundled_reasoners(name: str) -> None:
    preset = load_preset(name)
    cells = build_cells(
        preset.series,
        num_layers=30 if "smollm2" in name else 4,  # of its model, since some layers are named
        budgets=preset.budgets or (64,) * bool(preset.bytes),
        buffer=preset.buffer,
    )
    assert preset.split == ("tune" if name.endswith("tune") else "test")
    assert {cell.series for cell in cells} == {series.label for series in preset.series}
    task = load_task(preset.tasks[0])
    if not needs_tokenizer(task):  # the others are drawn where their models are, see tests/real
        assert task.examples(1, seed=preset.seeds[0], split=preset.split)


def test_a_preset_can_be_a_file(tmp_path: Path) -> None:
    preset = load_preset(written(tmp_path, GOOD))
    assert preset.name == "mine"
    assert preset.budgets == (16,)
    assert preset.series[0].plan == {"stack": ["streaming"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('task = "reasoner"\n', ""), "tasks"),
        (("n = 10", "n = 0"), "n"),
        (("n = 10", 'n = "ten"'), "n"),
        (("budgets = [16]", "budgets = [0]"), "budgets"),
        (("slots = 4", "slots = 4\nslotz = 4"), "slotz"),
        (("model = ", "model : "), "TOML"),
        (('label = "a"', 'label = "a"\nlabl = "b"'), "labl"),
    ],
)
def test_an_invalid_preset_is_refused_with_the_reason(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    with pytest.raises(KVPolicyError, match="mine") as caught:
        load_preset(written(tmp_path, GOOD.replace(*change)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(KVPolicyError, match="baselines"):
        load_preset("baseline")


def test_a_missing_preset_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(KVPolicyError, match=r"none\.toml"):
        load_preset(str(tmp_path / "none.toml"))


def test_policies_are_labelled_as_they_are_written_and_as_in_a_file_that_is_named(
    tmp_path: Path,
) -> None:
    names = ["full", "h2o", "tova", "streaming"]
    assert [one.label for one in load_series(None, policies=names)] == names
    file = written(tmp_path, GOOD)
    found = load_series(file, policies=names, budgets=[16])
    assert [one.label for one in found] == ["full", "h2o", "tova", "a"]
    assert found[-1] == load_preset(file).series[0]


def test_a_stack_of_several_series_stands_for_all_of_them(tmp_path: Path) -> None:
    coarse = '[[series]]\nlabel = "b"\nplan = { stack = ["streaming"], rows = "int8" }\n'
    file = written(tmp_path, f"{GOOD}\n{coarse}")
    found = load_series(file, policies=["streaming"])
    assert found == list(load_preset(file).series)
    assert [one.label for one in found] == ["a", "b"]


def test_series_of_other_plans_have_other_labels(tmp_path: Path) -> None:
    files = [tmp_path / name / "h2o.toml" for name in "ab"]
    for budget, file in enumerate(files, 8):
        file.parent.mkdir()
        file.write_text(f'budget = {budget}\nbuffer = 4\nstack = ["h2o"]\n')
    found = load_series(None, policies=["h2o+protect", "h2o+protect"], plans=[*files, files[0]])
    labels = [one.label for one in found]
    assert labels == ["h2o+protect", "h2o+protect", "h2o", "h2o (2)", "h2o"]
