"""``kvpolicy ablate``: its files, its output and its default folder."""

import contextlib
import csv
import io
import json
from pathlib import Path

import pytest
from shell import Shell, refusal
from tiny import r1_tokenizer, tiny_model

from kvpolicy.cli.app import run
from kvpolicy.lab.store.read import read_run
from kvpolicy.lab.tasks.task import load_task

SMALL = (
    *("--n", 3, "--slots", 3, "--max-new-tokens", 20),
    *("--budgets", "12,20", "--buffer", 6, "--workers", 1),
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


WORDS = ("ablate", *SMALL, "--policies", "full,h2o")


@pytest.fixture(scope="module")
def out(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("ablate") / "out"
    words = (*WORDS, "--model", model_folder, "--output", folder)
    with contextlib.redirect_stdout(io.StringIO()):
        assert run([str(word) for word in words]) == 0
    return folder


@pytest.mark.slow
def test_the_folder_holds_all_documented_files(model_folder: Path, out: Path) -> None:
    names = {"manifest.json", "samples.jsonl", "items.jsonl", "timings.jsonl"}
    names |= {"kept.jsonl", "table.json", "table.csv", "plot.png", "plot.svg"}
    assert names <= {path.name for path in out.iterdir()}
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    run, (session, *_) = manifest["run"], manifest["sessions"]
    (group,) = run["groups"]
    assert group["n"] == 3
    assert group["model"] == str(model_folder)
    assert len(group["model_fingerprint"]) == len(group["prompt_hash"]) == 16
    assert {cell["group"] for cell in run["cells"]} == {group["group"]}
    assert [cell["series"] for cell in run["cells"]] == ["full", "h2o", "h2o"]
    assert [cell["budget"] for cell in run["cells"]] == [None, 12, 20]
    assert run["cells"][1]["resolved"]["layers"][0]["stack"][0]["policy"] == "h2o"
    assert {"kvpolicy", "torch", "transformers", "python"} <= session["versions"].keys()
    with (out / "table.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    table = json.loads((out / "table.json").read_text(encoding="utf-8"))
    assert [line["plan"] for line in lines] == [row["plan"] for row in table]


@pytest.mark.slow
def test_the_same_command_again_shows_the_table_and_computes_nothing(
    kvpolicy: Shell, model_folder: Path, out: Path
) -> None:
    words = (*WORDS, "--model", model_folder, "--output", out)
    before = (out / "samples.jsonl").read_bytes()
    answer = kvpolicy(*words)
    assert answer.status == 0
    for label in ("full", "h2o"):
        assert label in answer.out
    assert (out / "samples.jsonl").read_bytes() == before
    found = kvpolicy(*words, "--json").json
    assert found.keys() == {"folder", "run", "table"}
    assert found["folder"] == str(out)
    assert [row["budget"] for row in found["table"]] == [None, 12, 20]
    assert found["table"][0]["accuracy"].keys() == {"value", "low", "high"}


def test_every_sample_carries_the_text_that_was_graded(out: Path) -> None:
    lines = (out / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    task = load_task("reasoner")
    items = task.examples(3, seed=0)
    assert sorted(s["item"] for s in samples) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for sample in samples:
        assert sample["correct"] == task.grade(sample["text"], items[sample["item"]])
    assert {s["peak_rows"] <= 20 + 6 for s in samples if s["compactions"]} == {True}


def test_the_folder_of_another_run_is_refused(
    kvpolicy: Shell, model_folder: Path, out: Path
) -> None:
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    answer = kvpolicy(*WORDS, "--model", model_folder, "--output", out, "--n", 2)
    assert "n is 3" in refusal(answer)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    assert "float32, compiled" in refusal(refused)


def test_a_missing_compiler_is_answered_before_a_sweep_begins(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> str:
        raise RuntimeError("no compiler here")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", refuse)
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full", "--compile")
    assert "C++ compiler" in refusal(kvpolicy(*words, "--workers", 2))
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
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


def test_the_same_settings_find_the_same_folder_and_others_another(
    kvpolicy: Shell, model_folder: Path
) -> None:
    words = ("ablate", "--model", model_folder, *SMALL, "--policies", "full", "--dry-run", "--json")
    first, again, other = (kvpolicy(*words, "--seed", seed).json["folder"] for seed in (0, 0, 1))
    assert first == again != other


@pytest.mark.nightly
def test_plans_and_policies_are_compared_side_by_side(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text('budget = 15\nstack = ["streaming"]', encoding="utf-8")
    single = ("ablate", "--model", model_folder, "--n", 1, "--plan", "mine.toml", "--json")
    (alone,) = kvpolicy(*single).json["table"]
    assert (alone["series"], alone["budget"]) == ("mine", 15)
    words = ("--model", model_folder, *SMALL, "--policies", "h2o+protect", "--plan", "mine.toml")
    table = kvpolicy("ablate", *words, "--set", "protect.n_recent=2", "--json").json["table"]
    # --budgets replaces the plan's own budget.
    assert [(row["series"], row["budget"]) for row in table] == [
        ("h2o+protect", 12),
        ("h2o+protect", 20),
        ("mine", 12),
        ("mine", 20),
    ]


@pytest.mark.nightly
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
    assert f"{row['num_errors']} failed" in plain.out
    assert f"{row['num_errors']} samples failed" in plain.err


@pytest.mark.nightly
def test_cells_in_which_every_request_fails_are_reported(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    prompts = ("1 " * 9000, "a\0b", "a\ud800b")
    lines = [json.dumps({"prompt": prompt, "answer": "1"}) for prompt in prompts]
    (tmp_path / "hard.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ("--model", model_folder, "--task", "hard.jsonl:chat=false,grader=exact")
    more = ("--policies", "full,h2o", "--budgets", 16, "--buffer", 8, "--output", "out")
    for _ in range(2):  # the stored run, too
        answer = kvpolicy("ablate", *words, *more, "--workers", 1, "--json")
        assert answer.status == 1, answer.err
        assert "6 samples failed" in answer.err
        found = [(row["num_errors"], row["throughput_tok_s"]) for row in answer.json["table"]]
        assert found == [(3, None), (3, None)]
    assert kvpolicy("results", "table", "out").status == 0
    assert kvpolicy("report", "out").status == 0
    assert kvpolicy("plot", "out", "--to", "out.png").status == 0
    assert kvpolicy("results", "compare", "out", "--with", "full").status == 0


@pytest.mark.parametrize("preset", ["real", "real-long"])
def test_preset_of_a_model_that_is_not_installed_says_how_to_install_it(
    preset: str, kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPOLICY_CACHE", str(tmp_path))
    answer = kvpolicy("ablate", "--preset", preset)
    assert "kvpolicy models install smollm2" in refusal(answer)
    assert not list(tmp_path.iterdir())


@pytest.mark.needs_reasoner
def test_which_questions_are_put_into_a_chat_template_is_told(
    kvpolicy: Shell, tmp_path: Path
) -> None:
    (tmp_path / "asked.jsonl").write_text('{"prompt": "What is plum?", "answer": "1"}\n')
    words = ("ablate", "--policies", "full", "--dry-run", "--task")
    assert "chat=false" in kvpolicy(*words, "asked.jsonl").err
    assert "chat" not in kvpolicy(*words, "asked.jsonl:chat=false").err


def test_a_system_prompt_cannot_be_asked_without_a_chat(kvpolicy: Shell, tmp_path: Path) -> None:
    tokenizer = r1_tokenizer()
    tokenizer.chat_template = "{% for one in messages %}{{ one['content'] }}{% endfor %}"
    tiny_model("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "chat")
    tokenizer.save_pretrained(tmp_path / "chat")
    words = ("ablate", "--policies", "full", "--dry-run", "--model", tmp_path / "chat", "--n", 2)
    answer = kvpolicy(*words, "--task", "instructions:text_tokens=0")
    assert answer.status == 0, answer.err
    assert "chat template" in answer.err
    assert "chat=false" not in answer.err


@pytest.mark.slow
def test_a_cell_whose_policies_had_nothing_to_evict_is_told(
    kvpolicy: Shell, model_folder: Path
) -> None:
    words = ("--model", model_folder, *SMALL, "--policies", "h2o", "--budgets", "12,500")
    answer = kvpolicy("ablate", *words)
    assert answer.status == 0, answer.err
    (told,) = [line for line in answer.err.splitlines() if "nothing was evicted" in line]
    assert "at 500" in told
    assert "--budgets" in told


@pytest.mark.nightly
def test_a_cell_tells_how_far_it_is_before_its_first_sample_is_done(
    kvpolicy: Shell, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvpolicy.lab.sweep.jobs.PROGRESS_EVERY_S", 0)
    monkeypatch.setattr("kvpolicy.cli.output.LOG_EVERY_S", 0)
    words = ("--model", model_folder, *SMALL, "--n", 1, "--policies", "h2o")
    words += ("--task", "perplexity:of=reasoner")
    answer = kvpolicy("ablate", *words)
    assert answer.status == 0, answer.err
    told = [line for line in answer.err.splitlines() if "h2o at 12: 0/1, " in line]
    assert [int(line.split()[-2]) for line in told[:4]] == [1, 2, 3, 4]
