"""Tasks, sweeps, files of answers and results that are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run_folders import make_run, write_run
from tiny import r1_tokenizer
from tokenizer_kinds import KINDS

from kvpolicy.lab.analysis.export import check_can_write
from kvpolicy.lab.prompt_files.store import AnswerStore, check_output
from kvpolicy.lab.steer.thoughts import load_rules
from kvpolicy.lab.store.read import find_runs, read_run
from kvpolicy.lab.store.store import Store
from kvpolicy.lab.sweep.sweep_file import load_preset
from kvpolicy.lab.tasks.chat_template import wrap
from kvpolicy.lab.tasks.conversation import read_conversations
from kvpolicy.lab.tasks.prose import Prose
from kvpolicy.lab.tasks.task import fitted, load_task
from message_cases.cli import refused

SWEEP = """
models = ["a"]
tasks = ["t"]
seeds = [0, 1]
budgets = [16, 32]
n = 3
max_new_tokens = 9
slots = 2
buffer = 4
combine = "zip"
policies = ["full"]
"""
TALK = {"utterances": ["a"], "questions": [{"question": "b", "answer": "c"}]}


def preset(*change: str) -> Callable[[Path], object]:
    def case(folder: Path) -> object:
        path = folder / "mine.toml"
        path.write_text(SWEEP.replace(*change), encoding="utf-8")
        return load_preset(str(path))

    return case


def rules(text: str) -> Callable[[Path], object]:
    def case(folder: Path) -> object:
        (folder / "rules.toml").write_text(text, encoding="utf-8")
        return load_rules(str(folder / "rules.toml"))

    return case


def talk(row: Any) -> Callable[[Path], object]:
    def case(folder: Path) -> object:
        (folder / "talks.jsonl").write_text(json.dumps(row), encoding="utf-8")
        return read_conversations(folder / "talks.jsonl")

    return case


def questions(text: str, name: str = "a.jsonl") -> Callable[[Path], object]:
    def case(folder: Path) -> object:
        (folder / name).write_text(text, encoding="utf-8")
        return load_task(str(folder / name)).examples(2, seed=0)

    return case


def passages(
    options: str, text: str = "the ab one two. " * 9, kind: str = "Gemma"
) -> Callable[[Path], object]:
    def case(folder: Path) -> object:
        (folder / "a.txt").write_text(text, encoding="utf-8")
        task = load_task(f"agreement:of={folder / 'a.txt'},{options}")
        return fitted(task, KINDS[kind]()).examples(2, seed=0)

    return case


def instructed(make_tokenizer: Callable[[], Any]) -> Callable[[Path], object]:
    def case(_: Path) -> object:
        task = fitted(load_task("instructions:text_tokens=0"), r1_tokenizer())
        return wrap(task.examples(1, seed=0), make_tokenizer())

    return case


def needles(options: str) -> object:
    return fitted(load_task(f"needle:{options}"), r1_tokenizer()).examples(1, seed=0)


def another_run(folder: Path) -> object:
    with Store(folder / "run", make_run(n=3)):
        pass
    return Store(folder / "run", make_run(n=4))


def a_second_process(folder: Path) -> object:
    with Store(folder / "run", make_run(n=3)):
        return Store(folder / "run", make_run(n=3))


def a_folder_in_use(folder: Path) -> object:
    (folder / "thesis.tex").touch()
    return Store(folder, make_run(n=3))


def other_answers(folder: Path) -> object:
    with AnswerStore(folder / "a.jsonl", {"seed": 0, "stop": []}, 2):
        pass
    return AnswerStore(folder / "a.jsonl", {"seed": 1, "stop": ["x"]}, 2)


def answers_of_somebody(folder: Path) -> object:
    (folder / "a.jsonl").touch()
    return AnswerStore(folder / "a.jsonl", {}, 2)


def damaged(name: str, text: str) -> Callable[[Path], object]:
    def case(folder: Path) -> object:
        path = write_run(folder / "run") / name
        path.write_text(text, encoding="utf-8")
        run = read_run(folder / "run")
        return run.samples, run.items

    return case


CASES: dict[str, Callable[[Path], object]] = {
    "an option that a task lacks": lambda _: load_task("reasoner-needle:lenth=60"),
    "an option that is no number": lambda _: load_task("reasoner-needle:length=long"),
    "a prompt that is too short": lambda _: load_task("reasoner-needle:length=10"),
    "a number of keys": lambda _: load_task("multikey:keys=20"),
    "more keys than there are": lambda _: load_task("needle:keys=1000"),
    "tokens without a tokenizer": lambda _: load_task("needle:keys=2").examples(1, seed=0),
    "more instructions than there are": lambda _: load_task("instructions:count=8"),
    "instructions in a chat without a system prompt": instructed(r1_tokenizer),
    "instructions without a chat": instructed(KINDS["Gemma"]),
    "needles without a haystack": lambda _: needles("keys=90"),
    "a switch": lambda _: load_task("gsm8k:chat=maybe"),
    "a grader": lambda _: load_task("questions:source=a.jsonl,grader=kind"),
    "a split": lambda _: load_task("math-500").examples(1, seed=0, split="tune"),
    "a text without a model": lambda _: load_task("agreement").examples(1, seed=0),
    "a text that is too short": passages("prompt_tokens=999"),
    "a text without words": passages("prompt_tokens=9", "\n"),
    "a text in another language": passages("prompt_tokens=40", "une autre langue " * 50, "words"),
    "a split of a text": lambda _: Prose("a.txt", "a b", {"test": (0, 3)}).passages(
        1, [9], None, seed=0, split="tune"
    ),
    "a prompt of fewer tokens than a word": passages("prompt_tokens=9", "do" * 60),
    "a number of tokens": passages("prompt_tokens=0"),
    "tokens of a task's prompts": lambda _: load_task("agreement:of=needle,prompt_tokens=9"),
    "a line of questions": questions('{"prompt": "a"}\nnothing\n'),
    "no question": questions(""),
    "columns": questions('{"what": 1}\n'),
    "lines in a list": questions('{"prompt": 1}\n{"prompt": 2}', "a.json"),
    "a conversation without utterances": talk({}),
    "topics": talk(TALK | {"topics": ["x", "y"]}),
    "a question of a conversation": talk(TALK | {"questions": ["b"]}),
    "a sweep with one thing twice": preset('models = ["a"]', 'models = ["a"]\nmodel = "b"'),
    "a sweep with a wrong seed": preset("seeds = [0, 1]", "seeds = [0, 1.5]"),
    "a sweep combined in no way": preset('"zip"', '"cross"'),
    "a sweep with a misspelt key": preset("combine", "combin"),
    "lists of unequal length": lambda folder: preset("[16, 32]", "[9, 16, 32]")(folder).points(),  # type: ignore[attr-defined]
    "rules that are not TOML": rules("a = = 1"),
    "rules without rules": rules(""),
    "a folder of another run": another_run,
    "a folder that somebody writes": a_second_process,
    "a folder of other things": a_folder_in_use,
    "answers of another run": other_answers,
    "an output of somebody else": answers_of_somebody,
    "an output in no folder": lambda folder: check_output(folder / "none" / "a", "prompts"),
    "no run": lambda folder: find_runs(folder / "none", warn=print),
    "a damaged line": damaged("samples.jsonl", "{\n"),
    "a damaged manifest": damaged("manifest.json", "{}"),
    "a table of no known kind": lambda folder: check_can_write(folder / "a.xls"),
    "ablate --budgets 16,x": refused("ablate --budgets 16,x"),
    "ablate --budgets ,": refused("ablate --budgets ,"),
    "ablate --preset none.toml": refused("ablate --preset {d}/none.toml"),
    "bench --prompt-max 3": refused("bench --prompt-max 3"),
    **{
        f"plan suggest {words}".strip(): refused(f"plan suggest --length 100 {words}")
        for words in (
            "",
            "--passages 3",
            "--quality 0",
            "--quality 0.9 --budget 8",
            "--quality 0.9 --policy h2o --policies h2o",
        )
    },
    "plan suggest --length 9 --quality 0.9": refused("plan suggest --length 9 --quality 0.9"),
    "results table none": refused("results table {d}/none"),
    "steer calibrate in another format": refused("steer calibrate --output a.pt"),
    "steer show none.safetensors": refused("steer show {d}/none.safetensors"),
    "a figure without room": refused("plot {d} --to a.svg --width 0.1"),
}
