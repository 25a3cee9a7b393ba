"""Without the package of the bundled reasoners, commands work with an explicit model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fresh_process import run_fresh

import kvpolicy

# Runs commands in a new process in which the package is hidden.
CODE = """
import contextlib, importlib.metadata, io, json, sys

visible = importlib.metadata.entry_points
def others(**chosen):
    return [point for point in visible(**chosen) if not point.value.startswith("kvpolicy_reasoner")]
importlib.metadata.entry_points = others
sys.modules["kvpolicy_reasoner"] = None

from kvpolicy.cli.app import run
answers = {}
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(words.split())
    answers[words] = [status, out.getvalue(), err.getvalue()]
print(json.dumps(answers))
"""

REFUSED = {
    "plan show skipkv": "--model",
    "run hi": "--model",
    "trace hi": "--model",
    "lm-eval --tasks gsm8k": "--model",
    "steer calibrate --output made.safetensors": "--model",
    "steer calibrate --output made.safetensors --model any": "--task",
    "ablate": "--preset",
    "ablate --policies full": "--model and --task",
    "ablate --policies full --model any --task none.jsonl": "none.jsonl",
    "tasks show perplexity": "--model",
    "reasoner sample": "no command is named 'reasoner'",
}
WORKING = ("--help", "list", "tasks list", "plan show --help", "ablate --help", "plan schema")


def answers_to(words: Iterable[str], folder: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        done = run_fresh(CODE, json.dumps([*words]), folder=folder)
    assert done.status == 0, done.err
    found: dict[str, Any] = json.loads(done.out)
    return found


@pytest.mark.nightly
def test_a_command_names_the_option_that_has_no_default(tmp_path: Path) -> None:
    for words, (status, out, err) in answers_to(REFUSED, tmp_path).items():
        assert (status, out) == (2, ""), (words, err)
        assert err.startswith("kvpolicy: ")
        assert err.count("\n") == 1
        assert REFUSED[words] in err


def test_other_commands_work_and_do_not_name_the_reasoners(tmp_path: Path) -> None:
    for words, (status, out, err) in answers_to(WORKING, tmp_path).items():
        assert (status, err) == (0, ""), words
        if words != "list":  # a policy may use a vector of the reasoners by default
            assert "reasoner" not in out.lower(), words


def test_the_package_does_not_name_the_reasoners() -> None:
    folder = Path(kvpolicy.__file__).parent
    files = [file for file in folder.rglob("*") if file.suffix in (".py", ".toml", ".js", ".html")]
    assert [str(file) for file in files if "reasoner" in file.read_text("utf-8").lower()] == []
