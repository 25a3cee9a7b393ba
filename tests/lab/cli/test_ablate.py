"""``kvpolicy ablate``: its files, its output and its default folder."""

import csv
import json
from pathlib import Path

import pytest
from shell import Shell, refusal

from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.tasks.task import load_task

SMALL = (
    *("--n", 3, "--slots", 3, "--max-new-tokens", 20),
    *("--budgets", "12,20", "--buffer", 6, "--workers", 1),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_folder_holds_all_documented_files(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    words = ("--model", model_folder, *SMALL, "--policies", "full,h2o", "--output", "out")
    answer = kvpolicy("ablate", *words)
    assert answer.status == 0, answer.err
    out = tmp_path / "out"
    names = {"manifest.json", "samples.jsonl", "items.jsonl", "timings.jsonl"}
    names |= {"kept.jsonl", "table.json", "table.csv", "plot.png", "plot.svg"}
    assert names <= {path.name for path in out.iterdir()}
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    run, (session,) = manifest["run"], manifest["sessions"]
    (group,) = run["groups"]
    assert group["n"] == 3
    assert group["model"] == str(model_folder)
    assert len(group["model_fingerprint"]) == len(group["prompt_hash"]) == 16
    assert {cell["group"] for cell in run["cells"]} == {group["group"]}
    assert [cell["series"] for cell in run["cells"]] == ["full cache", "H2O", "H2O"]
    assert [cell["budget"] for cell in run["cells"]] == [None, 12, 20]
    assert run["cells"][1]["resolved"]["layers"][0]["stack"][0]["policy"] == "h2o"
    assert {"kvpolicy", "torch", "transformers", "python"} <= session["versions"].keys()
    with (out / "table.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert [line["plan"] for line in lines] == [row["plan"] for row in table]
    for label in ("full cache", "H2O", "95 % CI"):
        assert label in answer.out


@pytest.mark.usefixtures("packs_small_products")
def test_packed_weights_make_another_run(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full")
    plain = kvpolicy(*words, "--dry-run", "--json").json
    answer = kvpolicy(*words, "--cpu-weights", "packed", "--json")
    assert answer.status == 0, answer.err
    (group,) = answer.json["run"]["groups"]
    assert group["dtype"] == "float32, packed"
    assert answer.json["folder"] != plain["folder"]
    assert kvpolicy(*words, "--dry-run", "--json").json["left"] == 3
    assert kvpolicy(*words, "--cpu-weights", "packed", "--dry-run", "--json").json["left"] == 0


@pytest.mark.usefixtures("no_compiler")
def test_compiled_steps_make_another_run_and_compiling_is_said(
    kvpolicy: Shell, model_folder: Path
) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full")
    plain = kvpolicy(*words, "--json")
    answer = kvpolicy(*words, "--compile", "--json")
    assert answer.status == 0, answer.err
    (group,) = answer.json["run"]["groups"]
    assert group["dtype"] == "float32, compiled"
    assert answer.json["folder"] != plain.json["folder"]
    assert "s of them compiling\n" in answer.err
    assert "compiling" not in plain.err
    texts = [
        {one.item: one.text for one in read_run(Path(folder)).samples.values()}
        for folder in (plain.json["folder"], answer.json["folder"])
    ]
    assert texts[0] == texts[1]
    assert kvpolicy(*words, "--compile", "--dry-run", "--json").json["left"] == 0
    refused = kvpolicy(*words, "--output", answer.json["folder"])
    assert refused.status == 2
    assert "dtype is float32, compiled there and float32 here" in refused.err


def test_a_missing_compiler_is_answered_before_a_sweep_begins(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full", "--compile")
    refused = kvpolicy(*words, "--workers", 2)
    assert refused.status == 2
    assert "cannot be compiled: torch finds no C++ compiler that it can use" in refusal(refused)
    assert not list(tmp_path.iterdir())


def test_a_session_records_the_threads_that_are_used(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr("kvpolicy.lab.executors.local.limit_threads", lambda: 3)
    monkeypatch.setattr("torch.set_num_threads", used.append)
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full", "--output", "out")
    assert kvpolicy(*words).status == 0
    assert used == [3]
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    assert [session["threads"] for session in manifest["sessions"]] == [3]


def test_every_sample_carries_the_text_that_was_graded(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    kvpolicy("ablate", "--model", model_folder, *SMALL, "--policies", "h2o", "--output", "out")
    lines = (tmp_path / "out" / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    task = load_task("reasoner")
    items = task.examples(3, seed=0)
    assert sorted(s["item"] for s in samples) == [0, 0, 1, 1, 2, 2]
    for sample in samples:
        assert sample["correct"] == task.grade(sample["text"], items[sample["item"]])
        assert sample["peak_rows"] <= 20 + 6


def test_json_has_the_documented_shape(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("--model", model_folder, *SMALL, "--policies", "h2o", "--output", "out", "--json")
    found = kvpolicy("ablate", *words).json
    assert found.keys() == {"folder", "run", "table"}
    assert found["folder"] == "out"
    assert [row["budget"] for row in found["table"]] == [12, 20]
    assert found["table"][0]["accuracy"].keys() == {"value", "low", "high"}


def test_the_same_settings_find_the_same_folder_and_others_another(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full")
    first = kvpolicy(*words)
    again = kvpolicy(*words)
    assert again.status == 0
    assert again.out == first.out
    assert "nothing is computed again" in again.err
    assert len(list((tmp_path / "kvpolicy-ablate").iterdir())) == 1
    kvpolicy(*words, "--seed", 1)
    assert len(list((tmp_path / "kvpolicy-ablate").iterdir())) == 2


def test_the_folder_of_another_run_is_refused(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full", "--output", "out")
    kvpolicy(*words)
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    answer = kvpolicy(*words, "--n", 2)
    assert answer.status == 2
    assert "n is 3 there and 2 here" in answer.err
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


def test_plans_and_policies_are_compared_side_by_side(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text('budget = 15\nstack = ["streaming"]', encoding="utf-8")
    words = ("--model", model_folder, *SMALL, "--policies", "h2o+protect", "--plan", "mine.toml")
    table = kvpolicy("ablate", *words, "--set", "protect.n_recent=2", "--json").json["table"]
    # --budgets replaces the plan's own budget.
    assert [(row["series"], row["budget"]) for row in table] == [
        ("h2o+protect", 12),
        ("h2o+protect", 20),
        ("mine", 12),
        ("mine", 20),
    ]


def test_a_plan_alone_is_run_at_its_own_budget(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text('budget = 15\nstack = ["streaming"]', encoding="utf-8")
    words = ("--model", model_folder, "--n", 2, "--max-new-tokens", 20, "--workers", 1)
    table = kvpolicy("ablate", *words, "--plan", "mine.toml", "--json").json["table"]
    assert [(row["series"], row["budget"]) for row in table] == [("mine", 15)]


def test_samples_that_fail_are_counted_and_the_status_is_1(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    """A model with fewer positions than the prompts have tokens cannot answer them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(model_folder)
    config.max_position_embeddings = 60
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "short")
    AutoTokenizer.from_pretrained(model_folder).save_pretrained(tmp_path / "short")
    words = ("--model", "short", "--n", 10, "--max-new-tokens", 5, "--policies", "full")
    answer = kvpolicy("ablate", *words, "--workers", 1, "--json")
    (row,) = answer.json["table"]
    assert answer.status == 1
    assert row["n"] == 10
    assert 0 < row["num_errors"] < 10
    plain = kvpolicy("ablate", *words, "--workers", 1)
    assert f"10 ({row['num_errors']} failed)" in plain.out
    assert f"{row['num_errors']} samples failed; the first: the prompt has" in plain.err


@pytest.mark.parametrize("prompt", ["1 " * 9000, "a\0b", "a\ud800b"], ids=["long", "nul", "half"])
def test_a_cell_in_which_every_request_fails_is_reported(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, prompt: str
) -> None:
    example = json.dumps({"prompt": prompt, "answer": "1"})
    (tmp_path / "hard.jsonl").write_text(f"{example}\n", encoding="utf-8")
    words = ("--model", model_folder, "--task", "hard.jsonl:chat=false,grader=exact")
    more = ("--policies", "full,h2o", "--budgets", 16, "--buffer", 8, "--output", "out")
    for _ in range(2):  # the stored run, too
        answer = kvpolicy("ablate", *words, *more, "--workers", 1, "--json")
        assert answer.status == 1
        assert "2 samples failed; the first: " in answer.err
        assert [(row["num_errors"], row["throughput_tok_s"]) for row in answer.json["table"]] == [
            (1, None),
            (1, None),
        ]
    assert kvpolicy("results", "table", "out").status == 0
    assert kvpolicy("report", "out").status == 0
    assert kvpolicy("plot", "out", "--to", "out.png").status == 0
    assert kvpolicy("results", "compare", "out", "--with", "full cache").status == 0
