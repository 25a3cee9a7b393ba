"""``kvpolicy tasks``, and ``ablate`` on tasks of every kind."""

import csv
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from datafiles import GSM8K, LIVECODEBENCH, write_jsonl
from shell import Answer, Shell, refusal
from tiny import r1_tokenizer, tiny_model

from kvpolicy.lab.sandbox.run import find_wall
from kvpolicy.lab.sandbox.walls import Wall
from kvpolicy.lab.tasks.task import installed_tasks, load_task

pytestmark = pytest.mark.needs_reasoner

SMALL = ("--n", 2, "--slots", 2, "--max-new-tokens", 12, "--buffer", 6, "--workers", 1)

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="the extra 'tasks' is not installed"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def r1_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that is talked to as R1's are."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "r1", r1_tokenizer()
    tiny_model("llama", vocab=len(tokenizer), max_position_embeddings=2048).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def samples_of(folder: str) -> list[dict]:
    lines = Path(folder, "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_list_shows_every_task_with_its_options(kvpolicy: Shell) -> None:
    text, plain = kvpolicy("tasks", "list"), kvpolicy("tasks", "list", "--json")
    names = [info.name for info in installed_tasks()]
    assert [task["name"] for task in plain.json] == names
    assert all(name in text.out for name in names)
    (needle,) = (task for task in plain.json if task["name"] == "reasoner-needle")
    assert needle["options"] == {"length": "300"}
    assert needle["problem"] is None


def test_show_prints_problems_as_they_are(kvpolicy: Shell) -> None:
    item = load_task("reasoner-needle:length=60").examples(2, seed=3)[1]
    words = ("tasks", "show", "reasoner-needle:length=60", "--n", 2, "--seed", 3)
    (_, shown) = kvpolicy(*words, "--json").json
    assert shown["prompt"] == item.prompt
    assert (shown["answer"], shown["facets"]) == (item.answer, dict(item.facets))
    text = kvpolicy(*words).out
    assert item.prompt.rstrip("\n") in text
    assert f"answer: {item.answer}" in text


def test_a_long_problem_is_truncated_in_text_and_complete_in_json(kvpolicy: Shell) -> None:
    write_jsonl(Path("a.jsonl"), [{"prompt": "x" * 5000, "answer": "1"}])
    assert "3,000 more characters" in kvpolicy("tasks", "show", "a.jsonl").out
    assert len(kvpolicy("tasks", "show", "a.jsonl", "--json").json[0]["prompt"]) == 5000


def ablate(kvpolicy: Shell, model: Path, *words: object) -> Answer:
    budgets = ("--policies", "full,streaming", "--budgets", 12)
    answer = kvpolicy("ablate", "--model", model, *SMALL, *budgets, "--output", "out", *words)
    assert answer.status == 0, answer.err
    return answer


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["perplexity:of=reasoner", "agreement:of=reasoner"])
def test_a_metric_is_in_the_table_the_files_and_the_plot(
    kvpolicy: Shell, model_folder: Path, task: str
) -> None:
    columns = load_task(task).metric.columns
    answer = ablate(kvpolicy, model_folder, "--task", task)
    for column in columns:
        assert column.title in answer.out
    with Path("out/table.csv").open(encoding="utf-8", newline="") as file:
        full, small = csv.DictReader(file)
    for column in columns:
        assert float(full[column.name]) == pytest.approx(float(full[column.name]))
    assert (full["num_correct"], full["difference"]) == ("", "")
    assert small["difference"] != ""
    assert columns[0].heading.split(",")[0] in Path("out/plot.svg").read_text(encoding="utf-8")
    samples = samples_of("out")
    assert all(sample["correct"] is None and sample["values"] for sample in samples)
    again = ablate(kvpolicy, model_folder, "--task", task)
    assert "nothing is computed again" in again.err
    assert again.out == answer.out


@pytest.mark.nightly
def test_passages_are_read_by_a_model_with_a_chat_template_as_they_are(
    kvpolicy: Shell, r1_folder: Path
) -> None:
    words = ("perplexity:prompt_tokens=70,scored_tokens=40", "--n", 2)
    shown = kvpolicy("tasks", "show", *words, "--model", r1_folder, "--json").json
    tasks = ("agreement:prompt_tokens=70", "repetition:prompt_tokens=70", words[0])
    ablate(kvpolicy, r1_folder, *(part for task in tasks for part in ("--task", task)))
    samples = samples_of("out")
    assert len(samples) == 2 * 2 * len(tasks)
    expected = {one["index"]: len(r1_tokenizer()(one["prompt"])["input_ids"]) for one in shown}
    assert all(50 < length <= 70 for length in expected.values())
    assert all(sample["prompt_len"] == expected[sample["item"]] for sample in samples)
    assert all(sample["values"] for sample in samples)
    with Path("out/facets.csv").open(encoding="utf-8", newline="") as file:
        assert {line["value"] for line in csv.DictReader(file)} == {shown[0]["facets"]["text"]}


@pytest.mark.nightly
def test_a_table_by_difficulty_holds_every_sample(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("--task", "reasoner:level=easy", "--by", "depth", "--n", 6)
    answer = ablate(kvpolicy, model_folder, *words)
    assert "depth" in answer.out
    with Path("out/facets.csv").open(encoding="utf-8", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line["facet"] == "depth"]
    assert {line["value"] for line in lines} == {"1", "2"}
    assert sum(int(line["n"]) for line in lines) == 2 * 6
    assert all(sample["facets"]["depth"] in (1, 2) for sample in samples_of("out"))


@pytest.mark.nightly
@needs_math
def test_gsm8k_uses_the_r1_template_and_is_graded(kvpolicy: Shell, r1_folder: Path) -> None:
    write_jsonl(Path("gsm8k.jsonl"), GSM8K)
    words = ("--task", "gsm8k:source=gsm8k.jsonl", "--n", 100, "--attempts", 2)
    ablate(kvpolicy, r1_folder, *words, "--temperature", 0.6, "--top-p", 0.95)
    samples = samples_of("out")
    assert len(samples) == 2 * len(GSM8K) * 2
    tries = {(s["cell"], s["item"], s["attempt"]): s["text"] for s in samples}
    assert len(tries) == len(samples) == len({sample["key"] for sample in samples})
    pairs = [(text, tries[c, i, 1]) for (c, i, a), text in tries.items() if a == 0]
    assert any(first != second for first, second in pairs), "each attempt draws for itself"
    assert {s["prompt_len"] for s in samples} == {
        len(r1_tokenizer()(item.prompt, add_special_tokens=False)["input_ids"])
        # the first token, user, assistant, <think> and a line break
        + 5
        for item in load_task("gsm8k:source=gsm8k.jsonl").examples(9, seed=0)
    }
    (group,) = json.loads(Path("out/manifest.json").read_text(encoding="utf-8"))["run"]["groups"]
    assert (group["n"], group["attempts"]) == (3, 2)
    assert group["sampling"] == "temperature 0.6, top-p 0.95"


@pytest.mark.nightly
def test_programs_are_run_on_request_only(kvpolicy: Shell, r1_folder: Path, any_wall: Wall) -> None:
    write_jsonl(Path("test.jsonl"), LIVECODEBENCH)
    words = ("--model", r1_folder, *SMALL, "--policies", "full", "--output", "out")
    task = ("--task", "livecodebench:source=test.jsonl")
    refused = kvpolicy("ablate", *words, *task)
    assert refused.status == 2
    assert "--execute-code" in refused.err
    assert not Path("out").exists()
    allowed = kvpolicy("ablate", *words, *task, "--execute-code")
    assert allowed.status == 0, allowed.err
    assert [sample["correct"] for sample in samples_of("out")] == [False, False]
    (session,) = json.loads(Path("out/manifest.json").read_text(encoding="utf-8"))["sessions"]
    assert session["sandbox"] == any_wall.name
    assert any_wall.name in allowed.err


def test_the_sandbox_is_named(kvpolicy: Shell, any_wall: Wall) -> None:
    answer = kvpolicy("tasks", "sandbox")
    assert answer.out.startswith(f"Programs that a model writes run in {any_wall.name}.")
    assert all(path in answer.out for path in any_wall.readable)
    found = kvpolicy("tasks", "sandbox", "--json").json
    assert (found["sandbox"], found["readable"]) == (any_wall.name, any_wall.readable)


def test_a_machine_without_a_sandbox_is_told_what_to_install(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_wall.cache_clear()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "apt-get install bubblewrap" in refusal(kvpolicy("tasks", "sandbox"))


def test_a_preset_cannot_allow_programs(kvpolicy: Shell, r1_folder: Path) -> None:
    write_jsonl(Path("test.jsonl"), LIVECODEBENCH)
    preset = (
        f'model = "{r1_folder}"\ntask = "livecodebench:source=test.jsonl"\nn = 1\nseed = 0\n'
        "max_new_tokens = 4\nslots = 1\nbudgets = [16]\nbuffer = 8\nexecute_code = true\n"
        '[[series]]\nlabel = "a"\nplan.stack = ["streaming"]\n'
    )
    Path("mine.toml").write_text(preset, encoding="utf-8")
    answer = kvpolicy("ablate", "--preset", "mine.toml")
    assert answer.status == 2
    assert "execute_code" in answer.err
