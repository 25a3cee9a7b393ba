"""``kvpolicy plan show`` prints the bytes that the engine allocates."""

from pathlib import Path

import pytest
from families import family_model
from folders import NUM_LAYERS
from shell import Shell

from kvpolicy.engine.engine import Engine
from kvpolicy.model.loading import load_model
from kvpolicy.plan.plan import Plan

PLANS = {
    "full": 'stack = ["full"]',
    "h2o": 'budget = 16\nbuffer = 8\nstack = ["h2o"]',
    "rkv": 'budget = 16\nbuffer = 8\nstack = [{policy = "rkv", window_size = 4}, "protect"]',
    "skipkv": 'budget = 16\nbuffer = 8\nstack = [{policy = "skipkv", window_size = 4}]',
    "pyramid": 'budget = 16\nbuffer = 8\nstack = [{policy = "pyramidkv", window_size = 4}]',
    "mix": (
        "budget = 16\nbuffer = 8\n"
        'stack = [{policy = "mix", of = ["streaming", {policy = "rkv", window_size = 4}]}]'
    ),
    "shared": 'budget = 16\nbuffer = 8\nheads = "shared"\nstack = ["h2o"]',
    "mixed": (
        'budget = 12\nbuffer = 4\n[[layers]]\nwhere = "0:1"\nstack = ["full"]\n'
        '[[layers]]\nwhere = "1:"\nstack = ["streaming"]\n'
    ),
}


def written(tmp_path: Path, name: str) -> Path:
    path = tmp_path / f"{name}.toml"
    path.write_text(PLANS[name], encoding="utf-8")
    return path


@pytest.mark.few(5)
@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("slots", [1, 3])
def test_the_bytes_are_those_the_engine_allocates(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path, name: str, slots: int
) -> None:
    path = written(tmp_path, name)
    shown = kvpolicy(
        *("plan", "show", path, "--model", model_folder, "--json"),
        *("--slots", slots, "--tokens", 50),
    ).json
    model, _ = load_model(str(model_folder))
    engine = Engine(model, None, Plan.load(path), slots=slots)
    # The longest sequence takes 50 positions; compactions never happen, so nothing is copied.
    run = engine.generate([[5] * 10] * slots, max_new_tokens=40, stop_ids=())
    assert shown["bytes"] == slots * shown["bytes_per_slot"] == run.report.peak_kv_bytes
    assert shown["digest"] == engine.plan.digest()


def test_percentages_refer_to_a_full_cache_of_the_longest_sequence(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    full = kvpolicy("plan", "show", written(tmp_path, "full"), "--model", model_folder, "--json")
    assert full.json["bytes_per_slot"] == full.json["full_bytes_per_slot"]
    assert full.json["tokens"] == 512, "the model's positions"


def test_budgets_allocated_by_a_policy_are_shown_as_allocated(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    path = written(tmp_path, "pyramid")
    shown = kvpolicy("plan", "show", path, "--model", model_folder, "--json").json
    assert [layer["budget"] for layer in shown["layers"]] == [27, 5]
    lines = kvpolicy("plan", "show", path, "--model", model_folder).out.splitlines()
    assert any(line.startswith("0 ") and " 27 " in line for line in lines)
    assert any(line.startswith("1 ") and " 5 " in line for line in lines)


def test_equal_consecutive_layers_are_one_row(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    uniform = kvpolicy("plan", "show", written(tmp_path, "h2o"), "--model", model_folder).out
    assert "0-1 " in uniform
    mixed = kvpolicy("plan", "show", written(tmp_path, "mixed"), "--model", model_folder).out
    assert "0-1 " not in mixed
    assert "full" in mixed
    assert "streaming(n_sink=4)" in mixed


def test_an_override_is_shown(kvpolicy: Shell, tmp_path: Path, model_folder: Path) -> None:
    path = written(tmp_path, "rkv")
    words = ("--set", "budget=20", "--set", "rkv.mix_lambda=0.5", "--json")
    shown = kvpolicy("plan", "show", path, "--model", model_folder, *words).json
    assert [layer["budget"] for layer in shown["layers"]] == [20] * NUM_LAYERS
    assert shown["layers"][0]["stack"][0]["mix_lambda"] == 0.5


def test_policies_inside_others_are_shown_as_policies(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    shown = kvpolicy("plan", "show", written(tmp_path, "mix"), "--model", model_folder)
    assert "mix(of=[streaming(weight=1.0, n_sink=4), rkv(weight=1.0, mix_lambda" in shown.out


def test_no_weights_are_needed(kvpolicy: Shell, tmp_path: Path, model_folder: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    answer = kvpolicy("plan", "show", written(tmp_path, "h2o"), "--model", bare)
    assert answer.status == 0, answer.err


@pytest.mark.slow
def test_a_model_that_cannot_be_run_is_refused(kvpolicy: Shell, tmp_path: Path) -> None:
    from transformers import T5Config

    T5Config(num_layers=1, d_model=8).save_pretrained(tmp_path / "t5")
    answer = kvpolicy("plan", "show", written(tmp_path, "h2o"), "--model", tmp_path / "t5")
    assert answer.status == 2
    assert "decoder-only" in answer.err


@pytest.fixture(scope="session")
def windowed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer has a window of 20 tokens, and whose second has none."""
    folder = tmp_path_factory.mktemp("windowed")
    family_model("gpt_oss", window=20).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("name", "rows"), [("full", [20, 50]), ("h2o", [20, 24])])
def test_a_layer_with_a_sliding_window_has_at_most_its_rows(
    kvpolicy: Shell, tmp_path: Path, windowed_folder: Path, name: str, rows: list[int]
) -> None:
    path = written(tmp_path, name)
    arguments = ("plan", "show", path, "--model", windowed_folder, "--tokens", 50)
    shown = kvpolicy(*arguments, "--json").json
    assert [layer["rows_per_slot"] for layer in shown["layers"]] == rows
    assert [layer["sliding_window"] for layer in shown["layers"]] == [20, None]
    row = 2 * (2 * 8 * 4 + 8)  # two KV heads: keys and values in fp32, and a position
    assert shown["full_bytes_per_slot"] == (20 + 50) * row
    if name == "full":
        assert shown["bytes_per_slot"] == shown["full_bytes_per_slot"]
    _, headers, _, first, second = kvpolicy(*arguments).out.splitlines()[1:6]
    assert "window" in headers
    assert first.split()[:1] + first.split()[3:5] == ["0", "20", str(rows[0])]
    assert second.split()[:1] + second.split()[3:5] == ["1", "-", str(rows[1])]


def test_a_model_without_sliding_windows_has_no_such_column(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    shown = kvpolicy("plan", "show", written(tmp_path, "full"), "--model", model_folder)
    assert shown.out.splitlines()[2].split() == [
        "layers",
        "budget",
        "buffer",
        "rows/slot",
        "KV/slot",
        "policies",
    ]


def test_a_budget_that_heads_share_is_shown_as_shared(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    shown = kvpolicy("plan", "show", written(tmp_path, "shared"), "--model", model_folder)
    assert "16 shared" in shown.out
    own = kvpolicy("plan", "show", written(tmp_path, "h2o"), "--model", model_folder)
    assert "shared  " not in own.out


def test_the_option_is_the_key_of_the_plan(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("plan", "show", "--policy", "h2o", "--budget", 16, "--buffer", 4, "--json")
    words += ("--model", model_folder, "--slots", 2, "--tokens", 200)
    by_option = kvpolicy(*words, "--prefill-buffer", 40).json
    assert by_option == kvpolicy(*words, "--set", "prefill_buffer=40").json
    without = kvpolicy(*words, "--prefill-buffer", 4).json
    assert "prefill_buffer" not in without["layers"][0]
    rows = without["bytes_per_slot"] // 20
    assert by_option["staging_bytes"] == by_option["bytes"] - without["bytes"] == 36 * rows


def test_policies_are_shown_without_a_file(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    words = ("plan", "show", "--model", model_folder, "--json")
    options = ("--policy", "h2o", "--budget", 16, "--buffer", 8)
    named = kvpolicy(*words, *options).json
    assert named == kvpolicy(*words, written(tmp_path, "h2o")).json
    assert kvpolicy(*words, written(tmp_path, "h2o"), *options).status == 2


def test_what_a_compaction_copies_is_shown(
    kvpolicy: Shell, tmp_path: Path, model_folder: Path
) -> None:
    words = ("--model", model_folder, "--json", "--slots", 1)
    shown = kvpolicy("plan", "show", written(tmp_path, "h2o"), *words).json
    model, _ = load_model(str(model_folder))
    engine = Engine(model, None, Plan.load(written(tmp_path, "h2o")))
    run = engine.generate([[5] * 10], max_new_tokens=40, stop_ids=())
    run.results()
    assert run.report.compactions
    assert shown["bytes"] < run.report.peak_kv_bytes <= shown["bytes"] + shown["copied_bytes"]
