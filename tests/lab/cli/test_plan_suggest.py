"""``kvpolicy plan suggest``: what is suggested is what the other commands do."""

import json
import tomllib
from pathlib import Path

import pytest
from shell import Shell, refusal

from kvpolicy.lab.tasks.task import load_task
from kvpolicy.model.loading import load_model

GIVEN = ("--length", 100, "--memory", "60kB")


@pytest.fixture
def bare(model_folder: Path, tmp_path: Path) -> Path:
    """The model without weights and tokenizer."""
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    return folder


@pytest.mark.few(1)
@pytest.mark.parametrize("policy", ["rkv", "h2o+protect", "skipkv", "pyramidkv"])
def test_the_plan_written_is_the_one_suggested_and_takes_as_many_bytes(
    kvpolicy: Shell, bare: Path, tmp_path: Path, policy: str
) -> None:
    output = tmp_path / "plan.toml"
    words = ("--model", bare, "--policy", policy, "--slots", 2, "--output", output, "--json")
    answer = kvpolicy("plan", "suggest", *GIVEN, *words)
    assert answer.status == 0, answer.err
    suggested = answer.json["suggested"]
    assert suggested["bytes"] <= 60_000
    shown = kvpolicy(
        *("plan", "show", output, "--model", bare, "--slots", 2, "--tokens", 100, "--json")
    ).json
    assert (shown["bytes"], shown["digest"]) == (suggested["bytes"], suggested["digest"])
    for layer in suggested["layers"]:
        row = layer["kv_bytes_per_row"] + layer["other_bytes_per_row"]
        stored = layer["rows_per_slot"] * row + layer["window_bytes_per_slot"]
        assert stored == layer["bytes_per_slot"], "the arithmetic that is printed"
    (chosen,) = [one for one in answer.json["alternatives"] if one["slots"] == 2]
    assert chosen["bytes"] == suggested["bytes"]
    # The default buffer of the budget suggested: giving both as options is the same plan.
    again = kvpolicy(
        *("plan", "suggest", *GIVEN, "--model", bare, "--policy", policy, "--json"),
        *("--budget", chosen["budget"], "--buffer", chosen["buffer"], "--slots", 2),
    )
    assert again.json["suggested"] == suggested


def test_the_text_has_the_numbers_of_the_json(kvpolicy: Shell, bare: Path) -> None:
    found = kvpolicy("plan", "suggest", *GIVEN, "--model", bare, "--json").json
    answer = kvpolicy("plan", "suggest", *GIVEN, "--model", bare)
    lines = answer.out.splitlines()
    suggested = found["suggested"]
    layer = suggested["layers"][0]
    assert lines[0].startswith(f"rkv on {bare}: 2 layers, float32, sequences of up to 100 tokens")
    for part in ("budget {budget:,} rows", "buffer {buffer:,} rows"):
        assert part.format_map(layer) in answer.words
    assert f"slots {suggested['slots']:,}" in answer.words
    assert any(f"{suggested['slots']:,} x {suggested['bytes_per_slot']:,} B" in x for x in lines)
    assert sum(line.endswith("suggested") for line in lines) == 2  # slots, and precisions
    assert all(len(line) <= 100 for line in lines[1:])


def test_a_staging_area_is_a_part_of_what_is_suggested(
    kvpolicy: Shell, bare: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.toml"
    words = ("--model", bare, "--policy", "h2o", "--slots", 2, "--prefill-buffer", 48)
    answer = kvpolicy("plan", "suggest", *GIVEN, *words, "--output", output)
    assert answer.status == 0, answer.err
    shown = kvpolicy(
        *("plan", "show", output, "--model", bare, "--slots", 2, "--tokens", 100, "--json")
    ).json
    staging = shown["staging_bytes"]
    assert staging > 0
    assert 2 * shown["bytes_per_slot"] + staging == shown["bytes"] <= 60_000
    assert f"2 x {shown['bytes_per_slot']:,} B and {staging:,} B of staging" in answer.out
    assert "rows, 48 while a prompt enters" in answer.words


def test_weights_are_counted_if_asked_for(kvpolicy: Shell, bare: Path, model_folder: Path) -> None:
    model, _ = load_model(str(model_folder))
    weights = sum(one.nbytes for one in [*model.parameters(), *model.buffers()])
    words = ("plan", "suggest", "--length", 100, "--model", bare)
    alone = kvpolicy(*words, "--memory", "60kB", "--json").json
    assert (alone["weights"], alone["memory_of_cache"]) == (weights, 60_000)
    memory = f"{60_000 + weights}B"
    together = kvpolicy(*words, "--memory", memory, "--with-weights", "--json").json
    assert together["memory_of_cache"] == 60_000
    assert together["suggested"] == alone["suggested"]
    too_small = kvpolicy(*words, "--memory", "9kB", "--with-weights")
    assert "--memory 9kB" in refusal(too_small)


def test_a_full_cache_that_fits_is_said(kvpolicy: Shell, bare: Path) -> None:
    words = ("plan", "suggest", "--length", 50, "--memory", "1GiB", "--model", bare)
    answer = kvpolicy(*words)
    assert "budget all rows" in answer.words
    assert kvpolicy(*words, "--json").json["alternatives"][-1]["whole"] is True


def test_too_few_rows_are_said(kvpolicy: Shell, bare: Path) -> None:
    answer = kvpolicy("plan", "suggest", "--length", 500, "--memory", "20kB", "--model", bare)
    assert "slots 1 " in answer.words
    assert "--keep" in answer.out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--length", 100, "--memory", "10B"), "1 sequence takes "),
        (("--length", 10**6, "--memory", "1GB"), "the model has positions for 512"),
        (("--length", 0, "--memory", "1GB"), "--length"),
        (("--length", 100), "--memory"),
        (("--memory", "1GB"), "--length"),
        ((*GIVEN, "--slots", 0), "--slots"),
        (("--length", 100, "--quality", 0), "--quality"),
        (("--length", 100, "--quality", 1.01), "--quality"),
        (("--length", 100, "--quality", "nan"), "--quality"),
        (("--length", 8, "--quality", 0.9), "--length"),
        (("--length", 100, "--quality", 0.9, "--budget", 8), "--budget"),
        (("--length", 100, "--quality", 0.9, "--policy", "h2o", "--policies", "h2o"), "--policies"),
        (("--length", 100, "--quality", 0.9, "--policies", "h2oo"), "no policy is named 'h2oo'"),
        (("--length", 100, "--quality", 0.9, "--policies", "full"), "full evicts nothing"),
        (("--length", 100, "--quality", 0.9, "--of", "none.txt"), "none.txt"),
        (("--length", 999, "--quality", 0.9), "the model has positions for 512"),
        ((*GIVEN, "--passages", 3), "--quality"),
        ((*GIVEN, "--rows", "int3"), "--rows int3"),
        ((*GIVEN, "--rows", "int8", "--set", "rows=int8"), "--rows and --set rows"),
        ((*GIVEN, "--keep", 101), "--keep"),
        ((*GIVEN, "--policy", "rkvv"), "--policy rkvv: no policy is named 'rkvv'"),
        ((*GIVEN, "--budget", 4), "--budget 4 gives layer 0 a budget of 4"),
        ((*GIVEN, "--set", "rkv.mix_lambda=3"), "--set 'rkv.mix_lambda=3': policy 'rkv' refuses"),
        ((*GIVEN, "--output", "plan.json"), "does not end in .toml"),
    ],
    ids=str,
)
def test_wrong_options_get_one_sentence(
    kvpolicy: Shell, bare: Path, words: tuple[object, ...], sentence: str
) -> None:
    assert sentence in refusal(kvpolicy("plan", "suggest", *words, "--model", bare))


@pytest.fixture
def chains(tmp_path: Path) -> Path:
    """A text that the tokenizer of the model knows."""
    examples = load_task("reasoner").examples(12, seed=3, split="train")
    text = tmp_path / "chains.txt"
    text.write_text("\n\n".join(" ".join(f"{e.prompt} {e.reference}".split()) for e in examples))
    return text


@pytest.mark.needs_reasoner
@pytest.mark.slow
def test_the_least_budget_that_keeps_the_quality_is_suggested(
    kvpolicy: Shell, model_folder: Path, chains: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.toml"
    words = ("plan", "suggest", "--model", model_folder, "--length", 120, "--of", chains)
    words = (*words, "--policies", "h2o,streaming", "--passages", 2, "--rows", "model")
    answer = kvpolicy(*words, "--quality", 0.4, "--output", output, "--json")
    assert answer.status == 0, answer.err
    found, suggested = answer.json["quality"], answer.json["suggested"]
    assert (found["wanted"], found["passages"], answer.json["memory"]) == (0.4, 2, None)
    assert answer.json["alternatives"] == []
    passing = [one for one in found["measured"] if one["match"]["value"] >= 0.4]
    least = min(passing, key=lambda one: (one["budget"], one["output_error"]))
    assert [layer["budget"] for layer in suggested["layers"]] == [least["budget"]] * 2
    assert suggested["layers"][0]["stack"][0]["policy"] == least["policy"]
    assert least["bytes_per_slot"] == suggested["bytes_per_slot"]
    shown = kvpolicy("plan", "show", output, "--model", model_folder, "--tokens", 120, "--json")
    assert shown.json["digest"] == suggested["digest"]
    assert shown.json["bytes_per_slot"] == suggested["bytes_per_slot"]
    # With a memory, the same budget for as many slots as fit.
    printed = kvpolicy(*words, "--quality", 0.4, "--memory", "100kB")
    assert f"budget {least['budget']:,} rows" in printed.words
    (chosen,) = [line for line in printed.out.splitlines() if line.endswith("chosen")]
    assert chosen.split()[:3] == [least["policy"], "model", str(least["budget"])]
    # The full cache's tokens, all of them, are more than anything that evicts has.
    most = max(found["measured"], key=lambda one: one["match"]["value"])
    assert most["match"]["value"] < 1
    unreachable = refusal(kvpolicy(*words, "--quality", 1))
    assert "--quality 1" in unreachable
    assert f"{most['policy']} with {most['budget']:,} rows" in unreachable


@pytest.mark.needs_reasoner
@pytest.mark.slow
def test_precision_is_measured_like_budget_and_policy(
    kvpolicy: Shell, model_folder: Path, chains: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.toml"
    words = ("plan", "suggest", "--model", model_folder, "--length", 120, "--of", chains)
    words = (*words, "--policies", "streaming", "--passages", 2, "--json")
    answer = kvpolicy(*words, "--quality", 0.5, "--output", output)
    assert answer.status == 0, answer.err
    measured, suggested = answer.json["quality"]["measured"], answer.json["suggested"]
    full = {one["rows"]: one for one in measured if one["budget"] is None}
    assert list(full) == ["int8", "int8/int4", "int4"]
    assert full["int8"]["match"]["value"] > 0.9
    good = [one for one in full.values() if one["match"]["value"] >= 0.5]
    fewest = min(good, key=lambda one: one["bytes_per_slot"])
    evicting = [one for one in measured if one["budget"] is not None]
    assert {one["rows"] for one in evicting} == {fewest["rows"]}
    passing = [one for one in measured if one["match"]["value"] >= 0.5]
    assert suggested["bytes_per_slot"] == min(one["bytes_per_slot"] for one in passing)
    shown = kvpolicy("plan", "show", output, "--model", model_folder, "--tokens", 120, "--json")
    assert shown.json["digest"] == suggested["digest"]
    # Nothing that evicts has all tokens of the full cache: then it is a full cache in fewer bits.
    answer = kvpolicy(*words, "--quality", full["int8"]["match"]["value"], "--rows", "int8")
    assert answer.status == 0, answer.err
    assert {layer.get("rows") for layer in answer.json["suggested"]["layers"]} == {"int8"}


def test_precisions_are_compared_in_equal_bytes(kvpolicy: Shell, bare: Path) -> None:
    words = ("plan", "suggest", *GIVEN, "--model", bare, "--policy", "h2o", "--buffer", 4)
    found = kvpolicy(*words, "--slots", 4, "--json").json
    budget = found["suggested"]["layers"][0]["budget"]
    precisions = {one["rows"]: one for one in found["precisions"]}
    assert list(precisions) == ["model", "int8", "int8/int4", "int4"]
    for rows, one in precisions.items():
        alone = kvpolicy(*words, "--slots", 4, "--rows", rows, "--json").json
        assert alone["suggested"]["layers"][0]["budget"] == one["largest"]["budget"]
        assert alone["suggested"]["bytes"] == one["largest"]["bytes"] <= 60_000
        assert [other["rows"] for other in alone["precisions"]] == [rows]
        more = kvpolicy(*words, "--budget", budget, "--rows", rows, "--json").json
        assert more["suggested"]["slots"] == one["slots_with_budget"]
    assert (
        precisions["int8"]["largest"]["budget"] > budget == precisions["model"]["largest"]["budget"]
    )
    printed = kvpolicy(*words, "--slots", 4)
    for rows, one in precisions.items():
        (line,) = [line for line in printed.out.splitlines() if line.startswith(f"{rows} ")]
        budget_of = "all" if one["largest"]["whole"] else f"{one['largest']['budget']:,}"
        assert budget_of in line.split()
    set_rows = kvpolicy(*words, "--slots", 4, "--set", "rows=int8", "--json").json
    assert [one["rows"] for one in set_rows["precisions"]] == ["int8"]


def test_an_existing_file_is_kept(kvpolicy: Shell, bare: Path, tmp_path: Path) -> None:
    output = tmp_path / "plan.toml"
    output.write_text("mine")
    answer = kvpolicy("plan", "suggest", *GIVEN, "--model", bare, "--output", output)
    assert "exists" in refusal(answer)
    assert output.read_text() == "mine"


def test_the_file_says_what_it_was_suggested_for(
    kvpolicy: Shell, bare: Path, tmp_path: Path
) -> None:
    output = tmp_path / "plan.toml"
    kvpolicy("plan", "suggest", *GIVEN, "--model", bare, "--slots", 3, "--output", output)
    text = output.read_text()
    assert text.startswith(f"# suggested for 3 slots of {bare} and 100 tokens")
    assert json.loads(json.dumps(tomllib.loads(text)))["layers"][0]["where"] == "all"
