"""``kvpolicy lm-eval``: local tasks of the harness under a plan, from the command to the record."""

import json
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness_tasks import BOXED, CHOICE, ROLLING, write_task
from kvpolicy_reasoner.task import grade, make_problems
from shell import Answer, Shell, refusal

from kvpolicy.lab.tasks import datasets as rows

HAS_HARNESS = rows.importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not HAS_HARNESS, reason="the extra 'lm-eval' is not installed")

# Problems that the reasoner solves and does not solve within 300 tokens.
PROBLEMS = [problem for i, problem in enumerate(make_problems(8, seed=0)) if i in (2, 4, 6, 7)]
QUESTIONS = [
    {"question": f"rent is {n}. What is rent?", "choices": ["3", "4", "12 "], "answer": n - 3}
    for n in (3, 4, 5, 3, 4)
]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if HAS_HARNESS:
        import datasets

        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Three tasks: one of each kind."""
    home = tmp_path / "tasks"
    boxed = [{"question": problem.prompt, "answer": problem.answer} for problem in PROBLEMS]
    write_task(home, "sums", BOXED, boxed)
    write_task(home, "rents", CHOICE, QUESTIONS)
    write_task(home, "texts", ROLLING, [{"text": row["question"] * 3} for row in QUESTIONS])
    yield home
    shutil.rmtree(home)


def run(
    kvpolicy: Shell,
    folder: Path,
    *arguments: object,
    tasks: str = "sums",
    model: object = "reasoner",
) -> Answer:
    options = ("--tasks", tasks, "--include-path", folder, "--model", model)
    answer = kvpolicy("lm-eval", *options, *arguments)
    assert answer.status == 0, answer.err
    return answer


@needs_harness
def test_accuracy_equals_our_grader(kvpolicy: Shell, folder: Path) -> None:
    arguments = ("--policy", "full", "--max-new-tokens", 300, "--log-samples", "--json")
    record = run(kvpolicy, folder, *arguments).json
    samples = record["samples"]["sums"]
    assert [sample["doc"]["question"] for sample in samples] == [one.prompt for one in PROBLEMS]
    verdicts = [
        grade(sample["resps"][0][0], problem)
        for sample, problem in zip(samples, PROBLEMS, strict=True)
    ]
    assert set(verdicts) == {True, False}
    assert [bool(sample["exact_match"]) for sample in samples] == verdicts
    assert record["results"]["sums"]["exact_match,box"] == sum(verdicts) / len(verdicts)


@needs_harness
def test_the_record_has_the_plan_and_its_costs(kvpolicy: Shell, folder: Path) -> None:
    arguments = ("--policy", "streaming", "--budget", 24, "--buffer", 8, "--max-new-tokens", 40)
    answer = run(kvpolicy, folder, *arguments, "--output", "a.json", tasks="sums,rents,texts")
    assert "a.json" in answer.err
    record = json.loads(Path("a.json").read_text(encoding="utf-8"))
    ours = record["kvpolicy"]
    assert {layer["budget"] for layer in ours["plan"]["layers"]} == {24}
    assert ours["model"] == "reasoner"
    assert ours["session"]["versions"]["lm_eval"]
    assert set(ours["costs"]) == {"sums", "rents", "texts"} == set(record["results"])
    for name, cost in ours["costs"].items():
        assert cost["peak_rows"] <= 24 + 8, name
        assert cost["peak_bytes"] > 0
    assert ours["costs"]["sums"]["compactions"] > 0
    assert ours["costs"]["sums"]["num_cut_off"] == len(PROBLEMS)
    assert "samples" not in record
    for name in ours["costs"]:
        assert name in answer.out
    assert "Traceback" not in answer.err
    assert "it/s" not in answer.err, "bars of the harness"


@needs_harness
@pytest.mark.usefixtures("packs_small_products")
def test_packed_weights_are_another_model(
    kvpolicy: Shell, folder: Path, model_folder: Path
) -> None:
    arguments = ("--policy", "full", "--limit", 1, "--json", "--cpu-weights")
    plain, packed = (
        run(kvpolicy, folder, *arguments, order, tasks="rents", model=model_folder)
        for order in ("plain", "packed")
    )
    assert "9 products" in packed.err
    ours, without = (one.json["kvpolicy"] for one in (packed, plain))
    assert all(one["packed_bytes"] > 0 for one in ours["reports"].values())
    assert ours["model_fingerprint"] != without["model_fingerprint"]


@needs_harness
@pytest.mark.usefixtures("no_compiler")
def test_compiled_steps_are_another_model(
    kvpolicy: Shell, folder: Path, model_folder: Path
) -> None:
    arguments = ("--policy", "full", "--limit", 1, "--max-new-tokens", 8, "--json")
    plain, compiled = (
        run(kvpolicy, folder, *arguments, *more, model=model_folder)
        for more in ((), ("--compile",))
    )
    assert "compiling" in compiled.err
    assert "compiling" not in plain.err
    ours, without = (one.json["kvpolicy"] for one in (compiled, plain))
    assert {one["path"] for one in ours["reports"].values()} == {"static, compiled"}
    assert ours["model_fingerprint"] != without["model_fingerprint"]
    assert compiled.json["results"] == plain.json["results"]


@needs_harness
def test_choices_and_texts_are_scored_under_the_plan(kvpolicy: Shell, folder: Path) -> None:
    def figures(*arguments: object) -> dict[str, Any]:
        found = run(kvpolicy, folder, *arguments, "--json", tasks="rents,texts").json
        return found["results"]

    full = figures("--policy", "full")
    assert full["rents"]["acc,none"] in [n / 5 for n in range(6)]
    small = figures("--policy", "streaming", "--budget", 8, "--buffer", 2)
    assert small["texts"]["word_perplexity,none"] > full["texts"]["word_perplexity,none"]
    again = figures("--policy", "streaming", "--budget", 8, "--buffer", 2, "--slots", 1)
    assert again["texts"] == pytest.approx(small["texts"])


@needs_harness
def test_limit_and_few_shot_examples_change_the_questions(
    kvpolicy: Shell, folder: Path, model_folder: Path
) -> None:
    def record(*arguments: object) -> dict[str, Any]:
        arguments = ("--policy", "full", "--json", *arguments)
        return run(kvpolicy, folder, *arguments, tasks="rents", model=model_folder).json

    plain, shots = record("--limit", 2), record("--limit", 0.4, "--num-fewshot", 2)
    for one in (plain, shots):
        assert one["n-samples"]["rents"]["effective"] == 2
    assert shots["n-shot"]["rents"] == 2
    tokens = [one["kvpolicy"]["costs"]["rents"]["prompt_tokens"] for one in (plain, shots)]
    assert tokens[1] > 2 * tokens[0]


@needs_harness
def test_sampled_answers_depend_on_the_seed(
    kvpolicy: Shell, folder: Path, model_folder: Path
) -> None:
    def answers(*arguments: object) -> list[str]:
        drawing = ("--temperature", 4, "--top-p", 0.95, "--top-k", 40, "--max-new-tokens", 20)
        arguments = ("--policy", "full", "--log-samples", "--json", *drawing, *arguments)
        samples = run(kvpolicy, folder, *arguments, model=model_folder).json["samples"]["sums"]
        return [sample["resps"][0][0] for sample in samples]

    first = answers("--seed", 3)
    assert answers("--seed", 3) == first
    assert answers("--seed", 4) != first


@needs_harness
def test_a_task_can_be_a_file(kvpolicy: Shell, folder: Path) -> None:
    arguments = ("--policy", "full", "--limit", 1, "--json")
    answer = kvpolicy("lm-eval", "--tasks", folder / "rents.yaml", *arguments)
    assert list(answer.json["results"]) == ["rents"], answer.err


@needs_harness
def test_a_group_has_a_row_of_its_own(
    kvpolicy: Shell, folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The harness's own tasks are in the folder of this file: it takes seconds to list them.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(folder / "manager.py"))
    write_task(folder, "others", CHOICE, QUESTIONS[:2])
    group = "group: both\ntask: [rents, others]\naggregate_metric_list:\n  - metric: acc\n"
    (folder / "both.yaml").write_text(group, encoding="utf-8")
    arguments = ("--policy", "full", "--output", "a.json")
    answer = run(kvpolicy, folder, *arguments, tasks="both", model=model_folder)
    record = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert set(record["results"]) == {"both", "rents", "others"}
    assert set(record["kvpolicy"]["costs"]) == {"rents", "others"}
    assert all(name in answer.out for name in record["results"])


def interrupted(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch, after: int, *arguments: object
) -> Answer:
    """Interrupt the command after a number of answers."""
    from lm_eval.api.model import CacheHook

    keep, num_kept = CacheHook.add_partial, 0

    def keep_some(self: Any, *what: Any) -> None:
        nonlocal num_kept
        keep(self, *what)
        num_kept += 1
        if num_kept == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(CacheHook, "add_partial", keep_some)
        answer = kvpolicy(*arguments)
    assert (answer.status, answer.out) == (130, "")
    assert "Traceback" not in answer.err
    return answer


@needs_harness
def test_an_interrupt_without_output_loses_the_answers(
    kvpolicy: Shell, folder: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        "--tasks",
        "rents",
        "--include-path",
        folder,
        "--model",
        model_folder,
        "--slots",
        1,
    )
    answer = interrupted(kvpolicy, monkeypatch, 3, "lm-eval", *arguments, "--policy", "full")
    assert "--output" in answer.err


@needs_harness
@pytest.mark.parametrize(
    ("task", "sampling"),
    [("sums", ()), ("sums", ("--temperature", 2)), ("rents", ()), ("texts", ())],
)
def test_an_interrupted_evaluation_is_resumed(
    kvpolicy: Shell,
    folder: Path,
    model_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    sampling: tuple[object, ...],
) -> None:
    arguments = ["lm-eval", "--tasks", task, "--include-path", folder, "--model", model_folder]
    arguments += ["--policy", "streaming", "--budget", 8, "--buffer", 4, "--max-new-tokens", 20]
    arguments += sampling
    whole = kvpolicy(*arguments, "--json").json
    arguments += ["--output", "a.json", "--slots", 1]
    message = interrupted(kvpolicy, monkeypatch, 2, *arguments).err
    (num_kept,) = re.findall(r"interrupted; (\d) answers are in a.answers.db", message)
    answer = kvpolicy(*arguments)
    assert answer.status == 0, answer.err
    assert f"{num_kept} answers" in answer.err
    record = json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert record["kvpolicy"]["num_recalled"] == int(num_kept) > 0
    cost, whole_cost = (one["kvpolicy"]["costs"][task] for one in (record, whole))
    assert cost["new_tokens"] <= whole_cost["new_tokens"]
    assert (cost["num_sequences"] < whole_cost["num_sequences"]) == (task != "rents")
    assert record["results"][task] == pytest.approx(whole["results"][task])
    assert not Path("a.answers.db").exists()


@needs_harness
@pytest.mark.parametrize("content", ["mine, and without an end", '{"mine": 1}\n'])
def test_an_unrelated_file_is_left_unchanged(
    kvpolicy: Shell, folder: Path, model_folder: Path, content: str
) -> None:
    Path("a.answers.db").write_text(content, encoding="utf-8")
    arguments = ("--model", model_folder, "--output", "a.json")
    assert "a.answers.db" in refused(kvpolicy, folder, *arguments)
    assert Path("a.answers.db").read_text(encoding="utf-8") == content


@needs_harness
def test_an_evaluation_without_answers_leaves_no_file(kvpolicy: Shell, folder: Path) -> None:
    write_task(folder, "lost", CHOICE, QUESTIONS, data=str(folder / "nowhere.jsonl"))
    refused(kvpolicy, folder, "--output", "a.json", tasks="lost")
    assert not list(Path().glob("a.*"))


@needs_harness
def test_options_of_the_harness_are_passed_on(
    kvpolicy: Shell, folder: Path, model_folder: Path
) -> None:
    arguments = ("--policy", "full", "--log-samples", "--json", "--batch-size", 2)
    arguments += ("--gen-kwargs", "max_gen_toks=7,temperature=0.5,do_sample=True,top_k=4")
    record = run(kvpolicy, folder, *arguments, model=model_folder).json
    assert record["kvpolicy"]["slots"] == 2
    assert record["kvpolicy"]["costs"]["sums"]["new_tokens"] == 7 * len(PROBLEMS)
    settings = record["configs"]["sums"]["generation_kwargs"]
    assert settings["temperature"] == 0.5
    assert settings["top_k"] == 4


# Wrong input


def refused(kvpolicy: Shell, folder: Path, *arguments: object, tasks: str = "rents") -> str:
    options = ("--include-path", folder, "--policy", "full")
    return refusal(kvpolicy("lm-eval", "--tasks", tasks, *options, *arguments))


def test_without_lm_eval_the_command_prints_how_to_install_it(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows.importlib.util, "find_spec", lambda name: None)
    message = refusal(kvpolicy("lm-eval", "--tasks", "gsm8k", "--policy", "full"))
    assert "[lm-eval]" in message


@needs_harness
def test_an_unknown_task_gives_the_nearest_name(
    kvpolicy: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The harness's own tasks are in the folder of this file: it takes seconds to list them.
    monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(folder / "manager.py"))
    message = refused(kvpolicy, folder, tasks="sums,rentss")
    assert "'rentss'" in message


@needs_harness
@pytest.mark.slow
def test_tasks_of_the_harness_are_found_by_name_and_pattern(kvpolicy: Shell, folder: Path) -> None:
    from kvpolicy.lab.lm_eval.evaluate import Tasks

    assert Tasks(["gsm8k", "rents"], [folder]).names == ["gsm8k", "rents"]
    many = Tasks(["mmlu_*"]).names
    assert len(many) > 50
    assert all(name.startswith("mmlu_") for name in many)
    message = refused(kvpolicy, folder, tasks="rents,gsm8kk")
    assert re.search(r"gsm8k\b", message)


@needs_harness
@pytest.mark.parametrize("limit", ["0", "1.5"])
def test_a_limit_is_a_number_or_a_share(kvpolicy: Shell, folder: Path, limit: str) -> None:
    assert "--limit" in refused(kvpolicy, folder, "--limit", limit)


@needs_harness
def test_a_missing_folder_is_named(kvpolicy: Shell, tmp_path: Path) -> None:
    assert "no folder" in refused(kvpolicy, tmp_path / "nowhere")


@needs_harness
def test_a_missing_task_is_reported(kvpolicy: Shell, folder: Path) -> None:
    assert "names no task" in refused(kvpolicy, folder, tasks=",")


@needs_harness
def test_an_output_file_that_exists_is_left_alone(kvpolicy: Shell, folder: Path) -> None:
    Path("a.json").write_text("mine")
    assert "exists" in refused(kvpolicy, folder, "--output", "a.json")
    assert Path("a.json").read_text() == "mine"


@needs_harness
def test_a_missing_data_file_gives_one_sentence(kvpolicy: Shell, folder: Path) -> None:
    write_task(folder, "lost", CHOICE, QUESTIONS, data=str(folder / "nowhere.jsonl"))
    assert "lost" in refused(kvpolicy, folder, tasks="lost")


@needs_harness
def test_without_a_network_a_data_set_of_the_hub_is_refused_at_once(
    kvpolicy: Shell, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise OSError

    for name in (
        "http_proxy",
        "https_proxy",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    file = folder / "far.yaml"
    text = (folder / "rents.yaml").read_text().replace("dataset_path: json", "dataset_path: a/b")
    file.write_text(text.replace("task: rents", "task: far"))
    message = refused(kvpolicy, folder, tasks="far")
    assert "hub" in message


@needs_harness
def test_a_task_with_a_wrong_template_gives_one_sentence(kvpolicy: Shell, folder: Path) -> None:
    write_task(folder, "bad", CHOICE.replace("{{choices}}", "{{nothing.at.all}}"), QUESTIONS)
    assert "bad" in refused(kvpolicy, folder, tasks="bad")


@needs_harness
def test_a_chat_template_that_a_model_does_not_have_is_refused(
    kvpolicy: Shell, folder: Path, model_folder: Path
) -> None:
    arguments = ("--model", model_folder, "--apply-chat-template")
    assert "no chat template" in refused(kvpolicy, folder, *arguments)


@needs_harness
def test_programs_run_on_request_only(kvpolicy: Shell, folder: Path) -> None:
    write_task(folder, "code", f"unsafe_code: true\n{CHOICE}", QUESTIONS)
    assert "--execute-code" in refused(kvpolicy, folder, tasks="code")
    arguments = ("--policy", "full", "--limit", 1, "--execute-code")
    run(kvpolicy, folder, *arguments, tasks="code")


@needs_harness
def test_unsupported_settings_are_named(kvpolicy: Shell, folder: Path) -> None:
    body = BOXED.replace("until: []", "num_beams: 4")
    write_task(folder, "beams", body, [{"question": "a", "answer": "1"}])
    assert "num_beams=4" in refused(kvpolicy, folder, tasks="beams")
