"""Wrong input: one sentence on stderr, status 2, nothing on stdout."""

import io
from pathlib import Path

import attrs
import pytest
from shell import Answer, Shell, refusal

PLAN = 'budget = 16\nbuffer = 8\nstack = ["h2o"]\n'


@attrs.frozen
class Case:
    """A command, and what its error message must contain.

    ``{m}`` stands for a model folder, ``{d}`` for a folder with the files of `files`.
    """

    words: str
    parts: tuple[str, ...]


def case(words: str, *parts: str) -> Case:
    return Case(words, parts)


CASES = [
    # commands and options
    case("ablte", "'ablte'", "ablate"),
    case("xyzzy", "'xyzzy'", "list", "bench"),
    case("list --jsno", "--jsno", "--json"),
    case("plot run --output x.png", "--output", "kvpolicy plot --help"),
    case("plan suggest", "--length", "kvpolicy plan suggest --help"),
    case("plan shw", "shw", "show"),
    case("plan show --toml --json", "--toml", "--json"),
    case("list extra", "extra"),
    case("ablate --n ten", "--n", "ten"),
    case("ablate --n 0", "--n", "0"),
    case("ablate --n -5", "--n", "-5"),
    case("ablate --slots 0", "--slots"),
    case("ablate --workers 0", "--workers"),
    case("ablate --seed -1", "--seed"),
    case("ablate --max-new-tokens 0", "--max-new-tokens"),
    case("ablate --budgets 0,16", "--budgets", "'0'"),
    case("ablate --budgets 16,x", "--budgets", "'x'"),
    case("ablate --budgets 16,-4", "--budgets", "'-4'"),
    case("ablate --budgets ,", "--budgets"),
    case("ablate --buffer 0", "--buffer"),
    case("ablate --task resoner --model {m}", "'resoner'", "reasoner"),
    case("ablate --task reasoner:depth=3 --model {m}", "'depth'", "level"),
    case("ablate --task {d}/none.jsonl --model {m}", "none.jsonl"),
    case("ablate --task {d}/torn.jsonl:grader=exact --model {m}", "line 2", "torn.jsonl"),
    case("ablate --task perplexity:of=reasoner-needle --model {m}", "reasoner-needle"),
    case("ablate --task reasoner --by dpth --model {m}", "'dpth'", "depth"),
    case("ablate --task reasoner --attempts 4 --model {m}", "4", "--temperature"),
    case("ablate --task reasoner --temperature 1 --top-p 2 --model {m}", "top_p", "2"),
    case("ablate --task reasoner --attempts 0 --model {m}", "--attempts"),
    case("ablate --task {d}/chat.jsonl:grader=exact --model {m}", "chat=false"),
    case("tasks shw", "shw", "show"),
    case("tasks show", "NAME|FILE|ID"),
    case("tasks show nedle", "'nedle'", "needle"),
    case("tasks show math-500 --split tune", "math-500", "tune"),
    case("tasks show reasoner-needle:length=9", "length=9", "22"),
    case("steer calibrate --output a.safetensors --task agreement --model {m}", "agreement"),
    # policies and knobs
    case("ablate --policies h20 --model {m}", "'h20'", "h2o"),
    case("ablate --policies h2o+protct --model {m}", "'protct'", "protect"),
    case("ablate --policies h2o --set h2o.n_recnt=4 --model {m}", "n_recnt", "n_recent"),
    case("ablate --policies h2o --set rkv.mix_lambda=0 --model {m}", "rkv", "h2o"),
    case("ablate --policies h2o --set budget=9 --model {m}", "--budgets"),
    case("ablate --policies h2o --set nonsense --model {m}", "nonsense", "KEY=VALUE"),
    case("ablate --policies h2o --set h2o.n_recent=x --model {m}", "n_recent"),
    case("ablate --policies snapkv --budgets 4 --model {m}", "4", "8", "protect"),
    case("run hi --policy h20 --budget 16 --model {m}", "'h20'", "h2o"),
    case("run hi --policy h2o --budget 0 --model {m}", "budget", "0"),
    case("run hi --policy h2o --budget -1 --model {m}", "budget", "-1"),
    case("run hi --policy snapkv --budget 7 --model {m}", "7", "8", "protect"),
    case("run hi --policy h2o --model {m}", "--budget"),
    case("run hi --budget 16 --model {m}", "--budget", "--policy"),
    case("run hi --policy h2o --budget x --model {m}", "--budget x"),
    case("run hi --policy h2o --budget 0 --model {m}", "--budget 0"),
    case("run hi --policy rkv --budget 7 --model {m}", "--budget 7", "8 rows"),
    case("run hi --policy rkv --budget 9 --set buffer=0 --model {m}", "--set 'buffer=0'"),
    case("run hi --policy h20 --budget 9 --model {m}", "--policy h20", "h2o"),
    case("run hi --policy rkv --set rkv.mix_lambda=2 --model {m}", "--set 'rkv.mix_lambda=2'"),
    case("run hi --budget 9 --model {m}", "--budget 9", "--policy"),
    case("run hi --plan {d}/good.toml --set layers=3 --model {m}", "--set 'layers=3'"),
    case("ablate --policies h2o --task reasoner --budgets 0 --model {m}", "--budgets"),
    case("run hi --policy h2o --budget 25 % --model {m}", "argument"),
    case("run hi --policy h2o --budget 25% --model {m}", "--budget 25%", "--length"),
    case("run hi --policy h2o --budget 0% --length 99 --model {m}", "--budget 0%"),
    case("run hi --policy h2o --budget 120% --length 99 --model {m}", "118 rows"),
    case("run hi --policy h2o --budget -5% --length 99 --model {m}", "'-5%'"),
    case("run hi --policy h2o --budget 9% --length 0 --model {m}", "--length"),
    case("run hi --length 99 --model {m}", "--length", "--policy"),
    case("run hi --policy h2o --budget 16 --buffer 0 --model {m}", "--buffer"),
    case("run hi --policy h2o+ --budget 16 --model {m}", "''"),
    case(
        "run hi --seed 99999999999999999999 --model {m}",
        "--seed",
        "9,223,372,036,854,775,807",
    ),
    # models
    case("run hi --model reasonr", "'reasonr'", "reasoner"),
    case("run hi --model nobody/nothing", "nobody/nothing"),
    case("run hi --model {d}/nowhere/at/all", "nowhere"),
    case("run hi --model {d}", "{d}"),
    case("run hi --model {m} --dtype float23", "float23", "float32"),
    case("run hi --model {m} --device tpu", "tpu"),
    case("ablate --model {m}x", "{m}x", "{m}"),
    case("plan show {d}/good.toml --model {m}x", "{m}x", "{m}"),
    # plans and presets
    case("plan show {d}/none.toml --model {m}", "none.toml"),
    case("plan show {d} --model {m}", "{d}"),
    case("plan show {d}/broken.toml --model {m}", "broken.toml", "TOML"),
    case("plan show {d}/latin.toml --model {m}", "UTF-8"),
    case("plan show {d}/unknown_key.toml --model {m}", "budgte", "budget"),
    case("plan show {d}/unknown_policy.toml --model {m}", "rkvv", "rkv"),
    case("plan show {d}/unknown_knob.toml --model {m}", "mix_lamda", "mix_lambda"),
    case("plan show {d}/bad_knob.toml --model {m}", "mix_lambda", "2"),
    case("plan show {d}/layer_9.toml --model {m}", "layer 9", "0 to 1"),
    case("plan show {d}/twice.toml --model {m}", "layer 0", "twice"),
    case("plan show {d}/gap.toml --model {m}", "layer 1"),
    case("plan show {d}/where.toml --model {m}", "first", '"0:2"'),
    case("plan show {d}/good.toml --set budget=0 --model {m}", "budget", "0"),
    case("plan show {d}/good.toml --set budget=x --model {m}", "budget", "x"),
    case("plan show {d}/good.toml --slots 0 --model {m}", "--slots"),
    case("plan show {d}/good.toml --toml --json --model {m}", "--toml", "--json"),
    case("plan show {d}/share.toml --model {m}", '"25%"', "--length"),
    case("plan show {d}/good.toml --policy h2o --model {m}", "--policy"),
    case("plan show {d}/share.toml --set length=3 --model {m}", '"25%"', "3 tokens"),
    case("plan show {d}/good.toml --set budget=25 --set budget=200% --model {m}", "200%", "length"),
    case("plan show {d}/good.toml --set length=x --model {m}", "length", "'x'"),
    case("plan show {d}/reserved.toml --model {m}", "'sampling'", "--temperature"),
    case("plan show {d}/steering.toml --model {m}", "'steering'", "stack"),
    case("plan show {d}/loop.toml --model {m}", "loop.toml' -> "),
    case("plan show {d}/orphan.toml --model {m}", "none.toml", "orphan.toml"),
    case("plan show {d}/stepmother.toml --model {m}", "'skipvk'", "skipkv"),
    case("plan show {d}/good.toml --set extends=a.toml --model {m}", "extends"),
    case("plan show {d}/layers_3.toml --model {m}", "layers", "3"),
    case("plan show {d}/group_3.toml --model {m}", "layers", "3"),
    case("plan show {d}/nested.toml --model {m}", "nested.toml", "100 levels"),
    case("plan show {d}/digits.toml --model {m}", "digits.toml", "digits"),
    case("plan show {d}/huge.toml --model {m}", "2,147,483,647"),
    case("plan show {d}/good.toml --set layers.0.budget=3 --model {m}", "[[layers]]"),
    case("plan show {d}/good.toml --set h2o.name=3 --model {m}", "'name'", "n_recent"),
    case("plan show {d}/good.toml --set padding=left --model {m}", "'left'"),
    case("plan show {d}/good.toml --set schedule=x --model {m}", "schedule", "'x'"),
    case("plan check", "FILE"),
    case("plan check {d}/none.toml --model {m}", "none.toml"),
    case("plan check {d}/broken.toml --model {m}", "broken.toml", "TOML"),
    case("plan check {d}/latin.toml --model {m}", "UTF-8"),
    case("plan check {d} --model {m}", "{d}"),
    case("plan check {d}/unknown_key.toml --model {m}", "budget"),
    case("plan check {d}/unknown_policy.toml --model {m}", "rkvv", "rkv"),
    case("plan check {d}/twice.toml --model {m}", "layer 0", "twice"),
    case("plan check {d}/gap.toml --model {m}", "layer 1"),
    case("plan check {d}/loop.toml --model {m}", "extends itself"),
    case("plan check {d}/good.toml --set nonsense --model {m}", "nonsense", "KEY=VALUE"),
    case("plan check {d}/good.toml --model {m}x", "{m}x", "{m}"),
    case("plan check skipvk --model {m}", "'skipvk'", "skipkv", "plan.toml"),
    case("plan schema extra", "extra"),
    case("ablate --plan {d}/layers_3.toml --model {m}", "layers", "3"),
    case("ablate --plan {d}/layers_3.toml --set h2o.x=3 --model {m}", "layers", "3"),
    case("ablate --preset {d}/preset.toml --policies h2o --model {m}", "preset", "3"),
    case("bench --plan {d}/none.toml", "none.toml"),
    case("bench --preset {d}/preset.toml", "preset", "'x'", "3"),
    case("ablate --plan {d}/stack_3.toml --budgets 9 --model {m}", "stack", "3"),
    case("ablate --plan {d}/orphan.toml --model {m}", "none.toml"),
    case("ablate --plan {d}/good.toml --set x.y=3 --model {m}", "'x'"),
    case("ablate --preset baseline", "'baseline'", "baselines"),
    case("ablate --preset {d}/none.toml", "none.toml"),
    case("ablate --preset {d}/broken.toml", "broken.toml", "TOML"),
    case("ablate --preset {d}/good.toml", "good"),
    case("ablate --plan {d}/none.toml --model {m}", "none.toml"),
    # prompts
    case("run --model {m}", "prompt"),
    case("run hi --file {d}/prompts.txt --model {m}", "--prompts"),
    case("run --file {d}/none.txt --model {m}", "none.txt"),
    case("run --file {d}/empty.txt --model {m}", "empty.txt", "prompt"),
    case("run --file {d}/latin.toml --model {m}", "UTF-8"),
    case("run --file {d}/bytes.txt --model {m}", "bytes.txt", "UTF-8", "byte 1"),
    case("run - --model {m}", "standard input", "UTF-8", "byte 2"),
    case("run --file - --model {m}", "standard input", "UTF-8", "byte 2"),
    case("run --file {d}/torn.jsonl --model {m}", "line 2", "torn.jsonl"),
    case("run --file {d}/promptless.jsonl --model {m}", "line 1", "prompt"),
    case("run \udcff --model {m}", "\\udcff"),
    case("run --file {d}/list.jsonl --model {m}", "line 1", "prompt"),
    case("run --file {d} --model {m}", "{d}"),
    case("run hi --system x --model {m}", "--system"),
    case("run hi --raw --system x --model {m}", "--raw"),
    case("run hi --plan {d}/good.toml --policy h2o --model {m}", "good.toml", "--policy"),
    case("run hi --temperature -1 --model {m}", "--temperature"),
    case("run hi --top-p 1.5 --model {m}", "top_p", "1.5"),
    case("run hi --top-p 0 --model {m}", "top_p"),
    case("run hi --top-k -1 --model {m}", "--top-k"),
    case("run hi --max-new-tokens many --model {m}", "--max-new-tokens"),
    # plugins and outputs
    case("list --plugin {d}/none.py", "none.py"),
    case("list --plugin {d}/good.toml", "good.toml"),
    case("list --plugin {d}/raises.py", "raises.py", "ZeroDivisionError"),
    case("list --plugin {d}/empty.py", "empty.py", "hookimpl"),
    case("ablate --model {m} --n 1 --output {d}", "{d}"),
    case("ablate --model {m} --n 1 --output {d}/good.toml", "good.toml"),
    case("bench --output {d}/good.toml", "good.toml"),
    case("bench --prompt-max 3", "--prompt-max", "--prompt-min"),
    case("bench --rounds 0", "--rounds"),
    case("bench --policies h20 --quick", "'h20'", "h2o"),
    # steering
    case("steer calibrate", "--output"),
    case("steer calibrate --output a.pt", "a.pt", ".safetensors"),
    case("steer calibrate --output {d}/there.safetensors", "there.safetensors"),
    case("steer calibrate --output nowhere/a.safetensors", "nowhere"),
    case("steer calibrate --output a.safetensors --task resoner", "'resoner'", "reasoner"),
    case("steer calibrate --output a.safetensors --rules publised", "'publised'", "published"),
    case("steer calibrate --output a.safetensors --rules {d}/broken.toml", "broken.toml", "TOML"),
    case("steer calibrate --output a.safetensors --model {m}x", "{m}x", "{m}"),
    case("steer calibrate --output a.safetensors --model {m} --layers 2", "'2'", "0 to 1"),
    case(
        "steer calibrate --output a.safetensors --model {m} --layers 1 --default-layer 0",
        "--default-layer",
        "--layers",
    ),
    case("steer calibrate --output a.safetensors --n 0", "--n"),
    case("steer calibrate --output a.safetensors --max-new-tokens 0", "--max-new-tokens"),
    case("steer show", "NAME|FILE"),
    case("steer show resoner", "'resoner'", "reasoner"),
    case("steer show {d}/none.safetensors", "none.safetensors"),
    case("steer show {d}/there.safetensors", "there.safetensors"),
    case("steer shw", "shw", "show"),
    case("run hi --policy seal --model {m} --set seal.vector=resoner", "'resoner'", "reasoner"),
    case("run hi --policy seal --set seal.layer=9", "layer 9", "0, 1, 2, 3"),
    case("run . --policy seal --model {m}", "layer 3", "0 to 1"),
    case(
        "run . --policy seal --set seal.layer=1 --model {m} --json",
        *("128 numbers", "32", "kvpolicy steer calibrate"),
    ),
]

FILES = {
    "preset.toml": (
        'model = "reasoner"\ntask = "reasoner"\nn = 1\nseed = 0\nmax_new_tokens = 9\nslots = 1\n'
        'budgets = [9]\nbuffer = 4\n[[series]]\nlabel = "x"\nplan = {stack = [3]}\n'
    ),
    "share.toml": 'budget = "25%"\nstack = ["h2o"]\n',
    "reserved.toml": f"{PLAN}[sampling]\ntemperature = 1\n",
    "steering.toml": f'{PLAN}[steering]\nvector = "reasoner"\n',
    "loop.toml": 'extends = "loop.toml"\n',
    "orphan.toml": 'extends = "none.toml"\n',
    "stepmother.toml": 'extends = "skipvk"\n',
    "layers_3.toml": f"{PLAN}layers = 3\n",
    "group_3.toml": f"{PLAN}layers = [3]\n",
    "stack_3.toml": "stack = [3]\n",
    "nested.toml": f"budget = {'[' * 3000}{']' * 3000}\n",
    "digits.toml": f"budget = {'9' * 5000}\n",
    "huge.toml": PLAN.replace("16", "1" + "0" * 30),
    "good.toml": PLAN,
    "broken.toml": "budget = = 3",
    "unknown_key.toml": PLAN.replace("budget", "budgte"),
    "unknown_policy.toml": PLAN.replace("h2o", "rkvv"),
    "unknown_knob.toml": 'budget = 16\nstack = [{policy = "rkv", mix_lamda = 0.5}]',
    "bad_knob.toml": 'budget = 16\nstack = [{policy = "rkv", mix_lambda = 2}]',
    "layer_9.toml": 'budget = 16\nstack = ["h2o"]\n[[layers]]\nwhere = [0, 9]\n',
    "twice.toml": 'budget = 16\nstack = ["h2o"]\n[[layers]]\n[[layers]]\nwhere = [0]\n',
    "gap.toml": 'budget = 16\nstack = ["h2o"]\n[[layers]]\nwhere = [0]\n',
    "where.toml": 'budget = 16\nstack = ["h2o"]\n[[layers]]\nwhere = "first"\n',
    "prompts.txt": "hello\n",
    "empty.txt": "\n\n",
    "list.jsonl": "{}\n[3]\n",
    "half.jsonl": '{"prompt": "a \\ud83d b"}\n',
    "torn.jsonl": '{"prompt": "a"}\n{"prompt": \n',
    "chat.jsonl": '{"prompt": "1+1?", "answer": "2"}\n',
    "promptless.jsonl": '{"prompt": 3}\n',
    "there.safetensors": "no tensors",
    "raises.py": "1 / 0\n",
    "empty.py": "class NoPolicy:\n    pass\n",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "bytes.txt").write_bytes(b"a\xff\x00")
    (folder / "nul.txt").write_bytes(b"\x00\n")
    (folder / "mega.txt").write_text("rent = 3. " * 11_000, encoding="utf-8")
    (folder / "mega.jsonl").write_text(f'{{"prompt": {[5] * 10**6}}}', encoding="utf-8")
    (folder / "latin.toml").write_bytes('label = "é"'.encode("latin-1"))
    return folder


def problem_of(answer: Answer, parts: list[str]) -> str | None:
    """What is wrong with the answer to wrong input, which should name these parts."""
    try:
        sentence = refusal(answer)
    except AssertionError as error:
        return str(error)
    missing = [part for part in parts if part not in sentence]
    return f"{missing} not in {sentence}" if missing else None


@pytest.mark.slow
@pytest.mark.few(3)
@pytest.mark.parametrize("command", sorted({case.words.split()[0] for case in CASES}))
def test_wrong_input_gives_one_sentence_that_names_it(
    kvpolicy: Shell,
    command: str,
    files: Path,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(files.iterdir())
    monkeypatch.setattr("sys.dont_write_bytecode", True)  # of plugins that are loaded

    def fill(text: str) -> str:
        return text.replace("{m}", str(model_folder)).replace("{d}", str(files))

    problems = {}
    for case in CASES:
        if case.words.split()[0] == command:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"hi\xff")))
            answer = kvpolicy(*(fill(word) for word in case.words.split()))
            problems[case.words] = problem_of(answer, [fill(part) for part in case.parts])
    assert {words: problem for words, problem in problems.items() if problem} == {}
    assert sorted(files.iterdir()) == before, "no file is created"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("mega.txt", "512"),
        ("mega.jsonl", "1000000"),
        ("nul.txt", "prompt"),
        ("half.jsonl", "\\ud83d"),
    ],
)
def test_a_prompt_that_fails_does_not_affect_the_others(
    kvpolicy: Shell, files: Path, model_folder: Path, tmp_path: Path, file: str, message: str
) -> None:
    wrong = (files / file).read_bytes().splitlines()[0]
    right = b'{"prompt": [5, 6]}' if file.endswith(".jsonl") else b"."
    (tmp_path / file).write_bytes(b"\n".join([right, wrong, right]))
    words = ("run", "--file", tmp_path / file, "--model", model_folder, "--max-new-tokens", 2)
    answer = kvpolicy(*words, "--json")
    assert answer.status == 1
    lines = {line["id"]: line for line in answer.json_lines if line["kind"] == "result"}
    assert message in lines[1]["error"]
    assert [len(lines[i]["tokens"]) for i in range(3)] == [2, 0, 2]
    assert f"kvpolicy: prompt 1: {lines[1]['error']}." in kvpolicy(*words).err
