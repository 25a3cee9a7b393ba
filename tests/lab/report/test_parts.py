"""Parts of a report: bundled programs, merged runs, layers of plans."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import complete_edit, write_lines, write_run

from kvpolicy.errors import ResultsError
from kvpolicy.lab.report.build import build
from kvpolicy.lab.report.content import (
    group_content,
    grouped_layers,
    labels_of,
    plan_without_layers,
    ranges,
)
from kvpolicy.lab.report.gather import gather
from kvpolicy.lab.report.page import bundle
from kvpolicy.lab.report.texts import item_ranges, text_lengths
from kvpolicy.lab.steer.thoughts import load_rules
from kvpolicy.lab.store.read import read_run

PLANS = [("full cache", None), ("H2O", 64)]


def test_a_bundle_has_every_module_once_after_its_imports() -> None:
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


def test_an_import_circle_is_refused() -> None:
    modules = {name: f'import {{ x }} from "./{other}.js";\n' for name, other in ("ab", "ba")}
    with pytest.raises(AssertionError, match="a imports b imports a"):
        bundle("a", modules.__getitem__)


def test_runs_that_share_a_group_are_merged(tmp_path: Path) -> None:
    one = read_run(write_run(tmp_path / "a", plans=PLANS[:1], n=4))
    other = read_run(write_run(tmp_path / "b", plans=PLANS, n=4, only_first=6))
    (view,) = gather([one, other])
    assert view.labels == ["full cache", "H2O 64"]
    assert [len(cell.samples) for cell in view.cells] == [4, 2]
    assert view.num_expected == 8


def test_runs_of_two_versions_are_not_mixed(tmp_path: Path) -> None:
    """Ids of groups and cells know nothing of versions; the keys of samples do."""
    wrong = {"correct": False}
    runs = [
        read_run(write_run(tmp_path / "a", plans=PLANS, n=4, outcome=lambda *_: {"correct": True})),
        read_run(
            write_run(tmp_path / "b", plans=PLANS, n=6, version="9", outcome=lambda *_: wrong)
        ),
        read_run(
            write_run(tmp_path / "c", plans=PLANS, n=4, version="9", outcome=lambda *_: wrong)
        ),
    ]
    assert list(runs[0].groups) == list(runs[2].groups)
    views = gather(runs)
    assert [(view.version, view.group.n) for view in views] == [("0.1.0", 4), ("9", 6), ("9", 4)]
    for view in views:
        assert [len(cell.samples) for cell in view.cells] == [view.group.n] * 2
        assert view.num_expected == len(view.samples)
        assert {sample.correct for sample in view.samples} == {view.version == "0.1.0"}
    labels = labels_of(views)
    assert len(set(labels)) == 3
    assert [label.split(" · ")[3] for label in labels] == [f"kvpolicy {v.version}" for v in views]


def test_a_model_under_two_names_is_shown_once(tmp_path: Path) -> None:
    for name in ("reasoner", "models/reasoner"):
        folder = write_run(tmp_path / name.replace("/", "-"), plans=PLANS, n=4)
        manifest = json.loads((folder / "manifest.json").read_text())
        manifest["run"]["groups"][0]["model"] = name
        (folder / "manifest.json").write_text(json.dumps(manifest))
        complete_edit(folder)
    runs = [read_run(tmp_path / name) for name in ("reasoner", "models-reasoner")]
    (view,) = gather(runs)
    assert [len(cell.samples) for cell in view.cells] == [4, 4]


def test_expected_samples_count_cells_that_have_not_begun(tmp_path: Path) -> None:
    """One cell has not begun with either seed; the runs differ in how much they ask."""
    one = read_run(write_run(tmp_path / "a", plans=PLANS, n=4, only_first=4))
    other = read_run(write_run(tmp_path / "b", plans=PLANS, seeds=(1,), n=6, only_first=5))
    together, first, second = gather([one, other])
    assert [view.num_expected for view in (together, first, second)] == [20, 8, 12]
    assert together.labels == ["full cache"]
    assert together.groups == (*one.groups, *other.groups)


def test_settings_of_one_seed_are_not_shown_for_pooled_seeds(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", plans=PLANS, seeds=(0, 1), n=4))
    views = gather([run])
    settings = [
        dict(group_content(view, load_rules("published"), ["full cache", "H2O"], "")["settings"])
        for view in views
    ]
    assert [{"n", "prompt hash"} <= stated.keys() for stated in settings] == [False, True, True]
    assert {"n", "prompt hash"} & settings[0].keys() == set()
    assert all(stated["kvpolicy"] == "0.1.0" for stated in settings)


def test_facets_with_too_many_values_have_no_table(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        return {"facets": {"depth": item % 32, "id": f"problem {item}"}}

    run = read_run(write_run(tmp_path / "a", plans=PLANS, n=33, outcome=outcome))
    (view,) = gather([run])
    content = group_content(view, load_rules("published"), ["full cache", "H2O"], "")
    assert [(one["name"], len(one["values"])) for one in content["facets"]] == [("depth", 32)]
    assert content["left_out"] == [{"name": "id", "num": 33}]
    assert [set(cell["facets"]) for cell in content["cells"]] == [{"depth"}] * 2
    assert [item["others"] for item in content["items"]] == [[f"id problem {i}"] for i in range(33)]
    depths = [sum(1 for i in range(33) if i % 32 == depth) for depth in range(32)]
    assert [one["n"] for one in content["cells"][0]["facets"]["depth"]] == depths


def test_parts_of_samples_have_a_table_but_are_no_property_of_items(tmp_path: Path) -> None:
    def outcome(cell: dict[str, Any], item: int, attempt: int) -> dict[str, Any]:
        layers = {"parts": [0, 1], "values": {"nll": [1.0, float(item)]}}
        heads = {"parts": list(range(33)), "values": {"nll": [1.0] * 33}}
        return {"facets": {"depth": 3}, "breakdowns": {"layer": layers, "head": heads}}

    run = read_run(write_run(tmp_path / "a", plans=PLANS, n=3, outcome=outcome))
    (view,) = gather([run])
    content = group_content(view, load_rules("published"), ["full cache", "H2O"], "")
    assert content["facets"] == [
        {"name": "depth", "values": [3], "of_items": True},
        {"name": "layer", "values": [0, 1], "of_items": False},
    ]
    assert content["left_out"] == [{"name": "head", "num": 33}]
    assert [one["n"] for one in content["cells"][0]["facets"]["layer"]] == [3, 3]
    assert all(item["facets"] == {"depth": 0} for item in content["items"])


@pytest.mark.parametrize("long", ["prompt", "reference", "text"])
def test_blocks_of_texts_have_a_limited_size(tmp_path: Path, long: str) -> None:
    size = 100_000
    outcome = {"text": "x" * size} if long == "text" else {}
    folder = write_run(tmp_path / "a", plans=PLANS[:1], n=30, outcome=lambda *_: outcome)
    if long != "text":
        items = [json.loads(line) for line in (folder / "items.jsonl").read_text().splitlines()]
        write_lines(folder / "items.jsonl", [item | {long: "x" * size} for item in items])
        complete_edit(folder)
    (view,) = gather([read_run(folder)])
    blocks = item_ranges(view)
    assert [index for items in blocks for index in items] == list(range(30))
    assert all(size * len(items) < 1_000_000 for items in blocks)
    assert sum(text_lengths(view)) >= 30 * size


def test_seeds_are_shown_pooled_and_separately(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", plans=PLANS, seeds=(3, 5), n=4))
    together, *single = gather([run])
    assert together.is_pooled
    assert together.seeds == (3, 5)
    assert [view.seeds for view in single] == [(3,), (5,)]
    assert [len(cell.samples) for cell in together.cells] == [8, 8]


def test_labels_of_cells_are_unique(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", plans=[("H2O", 64), ("R-KV", 64)], n=2)
    manifest = json.loads((folder / "manifest.json").read_text())
    for i, cell in enumerate(manifest["run"]["cells"]):
        cell |= {"series": "one", "knobs": {"one.knob": i}}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    complete_edit(folder)
    (view,) = gather([read_run(folder)])
    assert view.labels == [f"one, plan={cell['plan'][:8]} 64" for cell in manifest["run"]["cells"]]


def test_a_run_without_samples_is_refused(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", only_first=0))
    with pytest.raises(ResultsError, match="run"):
        gather([run])


def test_the_same_runs_give_the_same_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", plans=PLANS, seeds=(0, 1))
    assert build([read_run(folder)]) == build([read_run(folder)])


@given(st.lists(st.integers(0, 30), unique=True, min_size=1).map(sorted))
def test_ranges_name_exactly_the_numbers(numbers: list[int]) -> None:
    actual: list[int] = []
    for part in ranges(numbers).split(", "):
        first, _, last = part.partition(" to ")
        actual += range(int(first), int(last or first) + 1)
    assert actual == numbers


def test_equal_layers_share_an_entry() -> None:
    layers = [
        {"layer": i, "stack": [{"policy": "p", "knob": i % 2}], "budget": 8, "buffer": 4}
        for i in range(5)
    ]
    even, odd = grouped_layers({"layers": layers})
    assert (even["layers"], odd["layers"]) == ("0, 2, 4", "1, 3")
    assert even["stack"] == [{"policy": "p", "knobs": {"knob": 0}}]
    assert plan_without_layers({"layers": layers, "schedule": [], "padding": "stored"}) == {
        "padding": "stored"
    }
