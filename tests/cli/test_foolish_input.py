"""Foolish input of every kind: one sentence, whatever a file, a path or a number holds.

Each kind is a table: add a row for a new kind of input, or a command that takes such input.
"""

import inspect
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from run_folders import write_run
from shell import Answer, Shell

from kvpolicy.cli.app import command_names, load_command
from kvpolicy.text import visible, visible_lines

# Numbers


def numeric_options() -> Iterator[tuple[str, str, type]]:
    """Command, option and type of every number on the command line."""
    for name in command_names():
        command = load_command(name)
        for sub, one in getattr(command, "commands", {"": command}).items():
            annotations = inspect.signature(one.callback).parameters
            for param in one.params:
                kinds = set(types_in(annotations[param.name].annotation)) if param.name else set()
                for kind in kinds & {int, float}:
                    yield f"{name} {sub}".strip(), param.opts[0], kind


def types_in(annotation: Any) -> Iterator[Any]:
    """The plain types in ``Annotated[list[int] | None, ...]``."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for one in inner:
        yield from types_in(one)


NUMERIC = sorted({(command, option, kind.__name__) for command, option, kind in numeric_options()})
NUMBERS = {
    "int": ["nan", "1e400", str(2**63), "9" * 60, "9" * 5000, "", "x", "0.5", "\x1b[31m"],
    "float": ["nan", "inf", "-inf", "1e400", "9" * 5000, "", "x", "\x1b[31m"],
}
# Arguments without which a command is refused before its numbers are read.
REQUIRED = {
    "epicache ask": "store question",
    "epicache build": "conversation --output store",
    "guard record": "--output a.jsonl",
    "guard replay": "a.jsonl",
    "layers measure": "--output a.json",
    "plan show": "a.toml",
    "plan suggest": "--model m --length 9 --memory 1MB",
    "plot": "run --to a.svg",
    "report": "run",
    "results compare": "run",
    "results export": "run --to a.csv",
    "results table": "run",
    "steer calibrate": "--output a.safetensors",
    "tasks show": "reasoner-needle",
    "trimkv train": "--output a.safetensors",
    "reasoner train": "--output a",
    "lm-eval": "--tasks a",
}


def test_every_number_is_found() -> None:
    options = {option for _, option, _ in NUMERIC}
    assert {"--slots", "--temperature", "--height", "--seed", "--n", "--layer"} <= options


def some(values: Sequence[Any], number: int, *, whole: bool) -> Sequence[Any]:
    """All values, or every fourth: which ones differs with the number of a command."""
    return values if whole else values[number % 4 :: 4]


# Each value with some commands, and in the nightly tests with all.
WHOLE = pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["some", "all"]
)


@pytest.mark.few(9)
@pytest.mark.needs_reasoner  # the default model: without one, that comes first
@WHOLE
@pytest.mark.parametrize("command", sorted({command for command, _, _ in NUMERIC}))
def test_a_foolish_number_names_its_option(kvpolicy: Shell, command: str, whole: bool) -> None:
    words = [*command.split(), *shlex.split(REQUIRED.get(command, ""))]
    for number, (one, option, kind) in enumerate(NUMERIC):
        if one == command:
            for value in some(NUMBERS[kind], number, whole=whole):
                assert option in sentence_of(kvpolicy(*words, f"{option}={value}")), value


def sentence_of(answer: Answer) -> str:
    """The last line of what a refused command prints; lines before it are notes."""
    assert answer.status == 2, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    *notes, sentence = answer.err.removesuffix("\n").split("\n")
    for line in (*notes, sentence):
        assert line.startswith("kvpolicy: ")
        assert line == visible(line)
        assert len(line) < 3000
    return sentence


# Paths and files

LONG = "a" * 300
DEEP = "[" * 100_000
SUFFIXES = [".toml", ".jsonl", ".json", ".txt", ".safetensors", ".py", ".csv", ".parquet", ""]

# Content of a file that no command can use, by its name without the suffix.
CONTENTS: dict[str, bytes] = {
    "random": random.Random(1).randbytes(3000),
    "utf16": "budget = 3".encode("utf-16"),
    "archive": b"PK\x03\x04" + bytes(100),
    "deep": DEEP.encode(),
    "deep_table": f"a = {DEEP}".encode(),
    "deep_keys": ("a." * 5000 + "a = 1").encode(),
    "deep_object": ('{"a":' * 100_000).encode(),
    "digits": ('{"prompt": [' + "9" * 5000 + "]}").encode(),
    "digits_toml": b"budget = " + b"9" * 5000,
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "nan": b'{"prompt": NaN, "question": NaN, "answer": NaN}',
    "scalar": b"3",
    "escapes": b'{"\\u001b[31m": "\\u202e"}',
    "header": (2**63).to_bytes(8, "little") + b"{}",
}
# Names of files that no command can use.
PATHS = [
    LONG + "{suffix}",
    f"{'a/' * 3000}a" + "{suffix}",
    "a\0b{suffix}",
    "a\udcff{suffix}",
    "a\ud800{suffix}",
    "\x1b[31m\u202e{suffix}",
    "a\nb{suffix}",
    "none{suffix}",
    "~nobody/none{suffix}",
    "/dev/null/none{suffix}",
    "{folder}/folder{suffix}",
    "{folder}/loop{suffix}",
    "{folder}/empty{suffix}",
    "{folder}/mark{suffix}",
    *("{folder}/" + name + "{suffix}" for name in CONTENTS),
]

READERS = {
    "plan show {path}": [".toml"],
    "plan check {path}": [".toml"],
    "run . --plan {path}": [".toml"],
    "serve --port 0 --plan a={path} --model none": [".toml"],
    "run --prompts {path} --model none": [".jsonl"],
    "run --prompts {path} --output out --model none": [".jsonl"],
    "list --plugin {path}": [".py"],
    "run . --model {path}": [""],
    "ablate --dry-run --preset {path} --dry-run": [".toml"],
    "tasks show {path}:grader=exact": [".jsonl", ".json"],
    "tasks show livecodebench:source={path}": [".jsonl"],
    "steer show {path}": [".safetensors"],
    "steer calibrate --output none.safetensors --rules {path}": [".toml"],
    "run . --policy seal --set seal.vector={path}": [".safetensors"],
    "results table {path}": [""],
    "report {path} --output none.html": [""],
    "plot {path} --to none.svg": [""],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foolish")
    for suffix in SUFFIXES:
        (folder / f"folder{suffix}").mkdir()
        (folder / f"loop{suffix}").symlink_to(folder / f"loop{suffix}")
        for name, content in {**CONTENTS, "empty": b"", "mark": b"\xef\xbb\xbf"}.items():
            (folder / f"{name}{suffix}").write_bytes(content)
    return folder


def check(answer: Answer) -> None:
    """A command is refused in one sentence, or does something sensible; nothing has an effect."""
    assert answer.status in (0, 1, 2), answer.err
    assert "Traceback" not in answer.err
    if answer.status == 2:
        sentence_of(answer)
    for text in (answer.out, answer.err):
        assert text == visible_lines(text)


READ = [(command, suffix) for command, suffixes in READERS.items() for suffix in suffixes]


@pytest.mark.few(6)
@WHOLE
@pytest.mark.parametrize(("command", "suffix"), READ, ids=str)
def test_a_foolish_file_is_answered_well(
    kvpolicy: Shell,
    command: str,
    suffix: str,
    whole: bool,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for pattern in some(PATHS, READ.index((command, suffix)), whole=whole):
        path = pattern.replace("{suffix}", suffix).replace("{folder}", str(folder))
        words = [word.replace("{path}", path) for word in command.split()]
        answer = kvpolicy(*words)
        check(answer)
        if "{folder}" not in pattern:
            assert answer.status == 2, pattern
    assert list(tmp_path.iterdir()) == []


WRITERS = {
    "report {run} --output {path}": ".html",
    "plot {run} --to {path}": ".svg",
    "results export {run} --to {path}": ".csv",
    "steer calibrate --output {path}": ".safetensors",
    "run --prompts {run}/items.jsonl --output {path}": ".jsonl",
    "bench --quick --output {path}": ".json",
    "ablate --policies h2o --budgets 12 --buffer 6 --n 1 --output {path}": "",
    "reasoner train --output {path}": "",
}
UNWRITABLE = [
    LONG + "{suffix}",
    "a\0b{suffix}",
    "a\ud800{suffix}",
    "/dev/null/none{suffix}",
    "/dev/full",
    "/proc/none{suffix}",
    "{file}/none{suffix}",
]


@pytest.mark.needs_reasoner
@WHOLE
@pytest.mark.parametrize(("command", "suffix"), WRITERS.items(), ids=str)
def test_a_path_that_cannot_be_written_is_refused(
    kvpolicy: Shell, command: str, suffix: str, whole: bool, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    file = tmp_path / f"mine{suffix}"
    file.write_text("mine")
    for pattern in some(UNWRITABLE, [*WRITERS].index(command), whole=whole):
        path = pattern.replace("{suffix}", suffix).replace("{file}", str(file))
        words = [
            word.replace("{path}", path).replace("{run}", str(run)) for word in command.split()
        ]
        sentence_of(kvpolicy(*words))
        assert file.read_text() == "mine"


# Options that together do nothing, or not what was asked for

IDLE = {
    "run hi --max-new-tokens 1 --set budget=9": "--set budget=9",
    "ablate --dry-run --policies ,": "--policies",
    "bench --quick --policies ,": "--policies",
    "results table {run} --series H2O --budget all": "run",
    "ablate --dry-run --preset {empty}": "models",
    "steer calibrate --output a.safetensors --rules {empty}": "rules",
    "check h2o --layers 1000000": "--layers",
    "plan show skipkv --set skipkv.mix_lambda=x": "'x'",
    "list --plugin {folder}": "'.'",
}


@pytest.mark.needs_reasoner
def test_what_would_have_no_effect_is_refused(
    kvpolicy: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.toml").touch()
    places = {"run": write_run(tmp_path / "run"), "empty": "empty.toml", "folder": "."}
    for command, named in IDLE.items():
        assert named in sentence_of(kvpolicy(*command.format(**places).split())), command


# Texts

HOSTILE = "=1\x1b]52;c;aGk=\x07\x1b[31m\u202e\u2066\u200b\u2028\x9b\r\nnext[red]"
SHOWN = visible(HOSTILE)
TEXTS = [
    "lst{text}",
    "list --{text}",
    "plan show {text}.toml",
    "plan show skipkv --set {text}",
    "plan show skipkv --set budget={text}",
    "plan show skipkv --set {text}=1",
    "run . --max-new-tokens 1 --policy {text} --budget 9",
    "run . --max-new-tokens 1 --policy h2o --budget {text}",
    "run . --model {text}",
    "run . --max-new-tokens 1 --dtype {text}",
    "run . --max-new-tokens 1 --device {text}",
    "serve --port 0 --plan {text}",
    "serve --port 0 --plan a={text}.toml",
    "serve --port 0 --model {text}",
    "serve --port 0 --host {text}",
    "serve --port 0 --kv-memory {text}",
    "ablate --dry-run --preset {text}",
    "ablate --dry-run --grid {text}",
    "ablate --dry-run --grid {text}=1",
    "ablate --dry-run --budgets {text}",
    "ablate --dry-run --seeds {text}",
    "ablate --dry-run --task {text}",
    "ablate --dry-run --task reasoner-needle:{text}=1",
    "check --cases 1 {text}",
    "check h2o --cases 1 --set {text}",
    "tasks show {text}",
    "tasks show reasoner-needle:length={text}",
    "tasks show reasoner-needle --split {text}",
    "steer show {text}",
    "steer calibrate --output a.safetensors --n 1 --max-new-tokens 1 --layers x{text}",
    "results table {text}",
    "results table run --by {text}",
    "report {text} --output a.html",
    "plot {text} --to a.svg",
    "plot run --to a.svg --quantity {text}",
    "plot run --to a.svg --width {text}",
    "bench --quick --policies x{text}",
    "reasoner sample --name {text}",
]


FOOLISH = ["", " ", "9" * 5000, f"{DEEP}]", "a" * 5000, "\ud800", "a=b=c", "[1,", "{"]


@pytest.mark.few(12)
@pytest.mark.needs_reasoner
@WHOLE
@pytest.mark.parametrize("command", TEXTS)
def test_a_foolish_text_is_shown_without_effect(
    kvpolicy: Shell, command: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run")

    def answer(text: str) -> Answer:
        found = kvpolicy(*(word.replace("{text}", text) for word in command.split()))
        check(found)
        return found

    assert answer(HOSTILE).status == 2
    for text in some(FOOLISH, TEXTS.index(command), whole=whole):
        answer(text)


def test_names_in_results_are_shown_without_effect(kvpolicy: Shell, tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run",
        name=HOSTILE,
        models=[HOSTILE],
        tasks=[HOSTILE],
        plans=[("full cache", None), (HOSTILE, 64)],
        outcome=lambda *_: {"text": HOSTILE, "facets": {HOSTILE: HOSTILE}},
    )
    for words in (
        ("results", "list", tmp_path),
        ("results", "table", run),
        ("results", "compare", run, "full cache", f"{HOSTILE}@64", "--items"),
        ("report", run, "--output", tmp_path / "a.html"),
    ):
        answer = kvpolicy(*words)
        assert answer.status == 0, answer.err
        check(answer)
    assert SHOWN in kvpolicy("results", "table", run).out
    assert "'=1" in kvpolicy("results", "table", run, "--csv").out


def test_docstrings_and_exceptions_of_plugins_are_shown_without_effect(
    kvpolicy: Shell, tmp_path: Path
) -> None:
    plugin = tmp_path / "plugin.py"
    plugin.write_text(
        "from kvpolicy import hookimpl\n"
        "class Evil:\n"
        f"    {HOSTILE.splitlines()[0]!r}\n"
        "    @hookimpl\n"
        "    def score(self, keys):\n"
        f"        raise ValueError({HOSTILE!r})\n",
        encoding="utf-8",
    )
    answer = kvpolicy("list", "--plugin", plugin)
    check(answer)
    assert r"\u001b]52" in answer.out
    plugin.write_text(f"raise ValueError({HOSTILE!r})\n", encoding="utf-8")
    assert r"\u001b]52" in sentence_of(kvpolicy("list", "--plugin", plugin))


@given(st.sampled_from(TEXTS), st.text(st.characters(), max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_answered_well(kvpolicy: Shell, command: str, text: str) -> None:
    check(kvpolicy(*(word.replace("{text}", text) for word in command.split())))
