"""``kvpolicy plan check``, ``plan schema`` and ``plan show --toml``."""

import json
from pathlib import Path

import pytest
from folders import NUM_LAYERS
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_strategies import mutated, plan_data, tables
from shell import Shell

from kvpolicy import Plan
from kvpolicy.cli.app import run
from kvpolicy.plan.dump import _key, _value
from kvpolicy.plan.schema import plan_schema

GOOD = 'length = 200\nbudget = "10%"\nbuffer = 8\nstack = ["h2o", "protect"]\n'
BAD = """
bugdet = 3
padding = "left"
stack = ["rvk"]
[sampling]
[[layers]]
where = "0:1"
stack = ["rkv"]
budget = 4
[[layers]]
where = [0, 7]
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.toml"
    path.write_text(GOOD)
    return path


def test_a_valid_plan_prints_one_line_with_its_digest(
    kvpolicy: Shell, good: Path, model_folder: Path
) -> None:
    answer = kvpolicy("plan", "check", good, "--model", model_folder)
    digest = Plan.load(good).resolve(NUM_LAYERS).digest()
    assert answer.status == 0
    assert answer.out == f"{good}: OK on the 2 layers of {model_folder}, digest {digest}\n"
    assert answer.err == ""
    shown = kvpolicy("plan", "check", good, "--model", model_folder, "--json")
    assert shown.status == 0
    assert shown.json == {
        "file": str(good),
        "model": str(model_folder),
        "ok": True,
        "digest": digest,
        "problems": [],
        "warnings": [],
    }


def test_every_problem_is_one_sentence(kvpolicy: Shell, tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(BAD)
    words = ("plan", "check", path, "--model", model_folder, "--set", "h3o.n_recent=2")
    answer = kvpolicy(*words)
    assert answer.status == 2
    assert answer.out == ""
    lines = answer.err.splitlines()
    expected = [
        *("h3o", "'sampling' is reserved", "'bugdet'", "'rvk'", "layer 7"),
        *("layer 0 a budget of 4", "'left' is not a padding"),
    ]
    assert all(line.startswith("kvpolicy: ") and line.endswith((".", "?")) for line in lines)
    for words_of_line in expected:
        assert sum(words_of_line in line for line in lines) == 1, words_of_line
    as_json = kvpolicy(*words, "--json")
    assert as_json.status == 2
    assert as_json.json["ok"] is False
    assert as_json.json["digest"] is None
    assert len(as_json.json["problems"]) == len(lines)
    errors = {problem["error"] for problem in as_json.json["problems"]}
    assert {"PlanError", "UnknownPolicyError", "BudgetError"} <= errors


def test_a_missing_model_is_one_more_problem(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text('bugdet = 3\nstack = ["full"]\n')
    answer = kvpolicy("plan", "check", path, "--model", f"{model_folder}x")
    assert answer.status == 2
    first, second = answer.err.splitlines()
    assert "'bugdet'" in first
    assert f"model '{model_folder}x'" in second


def test_a_policy_of_a_plugin_file_is_found(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "mine.py").write_text(
        "from kvpolicy import hookimpl\n\n\nclass Mine:\n    @hookimpl\n"
        "    def score(self, keys):\n        return keys.norm(dim=-1)\n"
    )
    (tmp_path / "mine.toml").write_text('budget = 9\nstack = ["mine"]\n')
    words = ("plan", "check", tmp_path / "mine.toml", "--model", model_folder)
    assert kvpolicy(*words).status == 2
    assert kvpolicy(*words, "--plugin", tmp_path / "mine.py").status == 0


def test_the_schema_is_printed(kvpolicy: Shell) -> None:
    assert kvpolicy("plan", "schema").json == plan_schema()


def test_a_resolved_plan_is_printed_as_toml_that_loads_again(
    kvpolicy: Shell, good: Path, tmp_path: Path, model_folder: Path
) -> None:
    words = ("--model", model_folder, "--toml")
    shown = kvpolicy("plan", "show", good, *words, "--set", "protect.n_sink=2")
    assert shown.status == 0, shown.err
    assert "budget = 20 # 10% of 200 tokens is 20 rows" in shown.out
    again = tmp_path / "again.toml"
    again.write_text(shown.out)
    expected = Plan.load(good, ["protect.n_sink=2"]).resolve(NUM_LAYERS)
    assert Plan.load(again).resolve(NUM_LAYERS) == expected
    assert (
        kvpolicy("plan", "show", again, *words).out.splitlines()[1:]
        == (shown.out.replace(" # 10% of 200 tokens is 20 rows", "").splitlines()[1:])
    )


def test_a_share_is_shown_with_its_calculation(
    kvpolicy: Shell, good: Path, model_folder: Path
) -> None:
    shown = kvpolicy("plan", "show", good, "--model", model_folder)
    assert "budget 10% of 200 tokens is 20 rows" in shown.words
    layers = kvpolicy("plan", "show", good, "--model", model_folder, "--json").json["layers"]
    assert [layer["budget"] for layer in layers] == [20] * NUM_LAYERS
    assert {layer["budget_from"] for layer in layers} == {"10% of 200 tokens is 20 rows"}


def test_a_share_may_be_given_on_the_command_line(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("run", ".", "--policy", "h2o", "--buffer", 4, "--max-new-tokens", 30, "--json")
    for share in (("--budget", "10%", "--length", 90), ("--budget", 9)):
        answer = kvpolicy(*words, *share, "--model", model_folder)
        assert answer.status == 0, answer.err
        result, report = answer.json_lines
        assert result["peak_rows"] == 13
        plan = Plan.uniform("h2o", budget=9, buffer=4)
        assert report["plan_digest"] == plan.resolve(NUM_LAYERS).digest()


def test_the_plan_in_the_reference_conforms_to_its_schema() -> None:
    pages = Path(__file__).parents[2] / "docs" / "reference"
    assert "#:schema ./plan.schema.json" in (pages / "plan.md").read_text(encoding="utf-8")
    assert json.loads((pages / "plan.schema.json").read_text(encoding="utf-8"))["title"]


# Anything at all as a plan file


def as_toml(data: dict[str, object]) -> str:
    return "".join(f"{_key(key)} = {_value(value)}\n" for key, value in data.items())


def writable(value: object) -> bool:
    """Whether TOML has such values, and UTF-8 such letters."""
    if isinstance(value, dict):
        return all(writable(one) for pair in value.items() for one in pair)
    if isinstance(value, list):
        return all(map(writable, value))
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return isinstance(value, (bool, int, float))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.binary(max_size=60)
    | st.text("budget=stack[]{}\"'\n#.0159%,", max_size=60).map(str.encode)
    | (plan_data(num_layers=2) | mutated(num_layers=2) | tables)
    .filter(writable)
    .map(as_toml)
    .map(str.encode)
)
def test_no_plan_file_causes_a_traceback(
    tmp_path: Path, model_folder: Path, content: bytes
) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(content)
    model = ["--model", str(model_folder)]
    checked = run(["plan", "check", str(path), *model])
    assert checked in (0, 2)
    assert run(["plan", "show", str(path), *model]) == checked
    assert run(["plan", "show", str(path), *model, "--toml"]) == checked
