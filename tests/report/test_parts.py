"""The parts a report is made of: programs bundled, runs gathered, layers told."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import write_run

from kvpolicy.errors import ResultsError
from kvpolicy.lab.archive import read_run
from kvpolicy.lab.report.build import build
from kvpolicy.lab.report.bundle import bundle
from kvpolicy.lab.report.gather import gather
from kvpolicy.lab.report.layers import alike, ranges, rest_of

PLANS = [("full cache", None), ("H2O", 64)]


def test_a_bundle_has_every_module_once_after_what_it_needs() -> None:
    modules = {
        "main": 'import { a, b } from "./one.js";\nimport { c } from "./two.js";\na(b, c);\n',
        "one": 'import { c } from "./two.js";\nconst own = 1;\nexport const b = own;\n'
        "export function a() {}\n",
        "two": "const own = 2;\nexport async function c() {}\n",
    }
    program = bundle("main", modules.__getitem__)
    heads = [line.split()[1] for line in program.splitlines() if line.startswith("const module_")]
    assert heads == ["module_two", "module_one", "module_main"]
    assert "import" not in program
    assert "export" not in program
    assert "return { b, a };" in program
    assert "const { c } = module_two;" in program


def test_modules_that_import_each_other_are_named() -> None:
    modules = {name: f'import {{ x }} from "./{other}.js";\n' for name, other in ("ab", "ba")}
    with pytest.raises(AssertionError, match="a imports b imports a"):
        bundle("a", modules.__getitem__)


def test_runs_that_share_a_group_are_one_group(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "a", plans=PLANS[:1], n=4))
    other = read_run(write_run(tmp_path / "b", plans=PLANS, n=4, only_first=6))
    (view,) = gather([one, other])
    assert [cell.label for cell in view.cells] == ["full cache", "H2O 64"]
    assert [len(cell.samples) for cell in view.cells] == [4, 2]
    assert view.num_expected == 8


def test_seeds_come_together_and_one_by_one(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", plans=PLANS, seeds=(3, 5), n=4))
    together, *single = gather([run])
    assert together.is_pooled
    assert together.seeds == (3, 5)
    assert [view.seeds for view in single] == [(3,), (5,)]
    assert [len(cell.samples) for cell in together.cells] == [8, 8]


def test_cells_of_the_same_series_and_budget_have_names_of_their_own(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", plans=[("H2O", 64), ("R-KV", 64)], n=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    for i, cell in enumerate(manifest["run"]["cells"]):
        cell |= {"series": "one", "knobs": {"one.knob": i}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (view,) = gather([read_run(folder)])
    assert [cell.label for cell in view.cells] == ["one 64 one.knob=0", "one 64 one.knob=1"]


def test_a_run_without_samples_is_told(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", only_first=0))
    with pytest.raises(ResultsError, match="no sample is done yet"):
        gather([run])


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", plans=PLANS, seeds=(0, 1))
    assert build([read_run(folder)]) == build([read_run(folder)])


@given(st.lists(st.integers(0, 30), unique=True, min_size=1).map(sorted))
def test_ranges_name_the_numbers_and_no_others(numbers: list[int]) -> None:
    said: list[int] = []
    for part in ranges(numbers).split(", "):
        first, _, last = part.partition(" to ")
        said += range(int(first), int(last or first) + 1)
    assert said == numbers


def test_alike_layers_stand_together() -> None:
    layers = [
        {"layer": i, "stack": [{"policy": "p", "knob": i % 2}], "budget": 8, "buffer": 4}
        for i in range(5)
    ]
    even, odd = alike({"layers": layers})
    assert (even["layers"], odd["layers"]) == ("0, 2, 4", "1, 3")
    assert even["stack"] == [{"policy": "p", "knobs": {"knob": 0}}]
    assert rest_of({"layers": layers, "schedule": [], "padding": "stored"}) == {"padding": "stored"}
