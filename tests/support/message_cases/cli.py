"""Commands that are refused."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path

from kvpolicy.cli.app import run

PLAN = 'budget = 16\nbuffer = 8\nstack = ["h2o"]\n'
FILES = {
    "good.toml": PLAN,
    "broken.toml": "budget = = 3",
    "unknown_key.toml": PLAN.replace("budget", "budgte"),
    "unknown_knob.toml": 'budget = 16\nstack = [{policy = "rkv", mix_lamda = 0.5}]',
    "twice.toml": 'budget = 16\nstack = ["h2o"]\n[[layers]]\n[[layers]]\nwhere = [0]\n',
    "loop.toml": 'extends = "loop.toml"\n',
    "empty.txt": "\n\n",
    "torn.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    "promptless.jsonl": '{"prompt": 3}\n',
    "raises.py": "1 / 0\n",
    "empty.py": "class NoPolicy:\n    pass\n",
}


def refused(words: str, files: dict[str, str] = FILES) -> Callable[[Path], str]:
    """What a command prints to stderr; ``{d}`` stands for a folder with the files."""

    def case(folder: Path) -> str:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = run([word.replace("{d}", str(folder)) for word in words.split()])
        assert (status, out.getvalue()) == (2, ""), err.getvalue()
        return err.getvalue()

    return case


CASES: dict[str, Callable[[Path], object]] = {
    words: refused(words)
    for words in (
        "plan show {d}/none.toml",
        "plan check {d}/broken.toml",
        "plan check {d}/unknown_key.toml",
        "plan check {d}/unknown_knob.toml",
        "plan check {d}/twice.toml",
        "plan check {d}/loop.toml",
        "plan check {d}/good.toml --set nonsense",
        "plan check {d}/good.toml --set budget=x",
        "plan show {d}/good.toml --toml --json",
        "run --model none",
        "run hi --model {d}/nowhere/at/all",
        "run hi --seed 99999999999999999999",
        "run hi --plan {d}/good.toml --policy h2o --model none",
        "run hi --budget 9 --model none",
        "run --file {d}/none.txt --model none",
        "run --file {d}/empty.txt --model none",
        "run --file {d}/torn.jsonl --model none",
        "run --file {d}/promptless.jsonl --model none",
        "run hi --file {d}/empty.txt --model none",
        "check streaming --profile slow",
        "check streaming --set n_sink=2",
        "check streaming --set streaming.n_snik=2",
        "list --plugin {d}/none.py",
        "list --plugin {d}/good.toml",
        "list --plugin {d}/raises.py",
        "list --plugin {d}/empty.py",
    )
}
