"""Whatever is wrong with the input: one sentence on stderr, status 2, nothing on stdout."""

from pathlib import Path

import attrs
import pytest
from shell import Shell

PLAN = 'budget = 16\nbuffer = 8\nstack = ["h2o"]\n'


@attrs.frozen
class Case:
    """A command, and what its answer must contain.

    ``{m}`` stands for a model folder, ``{d}`` for a folder with the files of `files`.
    """

    words: str
    says: tuple[str, ...]

    def __str__(self) -> str:
        return self.words


def case(words: str, *says: str) -> Case:
    return Case(words, says)


CASES = [
    # commands and options
    case("ablte", "no command 'ablte'", "ablate"),
    case("xyzzy", "no command 'xyzzy'", "list", "bench"),
    case("list --jsno", "--jsno", "--json"),
    case("plan shw", "shw", "show"),
    case("plan show", "FILE"),
    case("list extra", "extra"),
    case("ablate --n ten", "--n"),
    case("ablate --n 0", "--n"),
    case("ablate --n -5", "--n"),
    case("ablate --slots 0", "--slots"),
    case("ablate --workers 0", "--workers"),
    case("ablate --seed -1", "--seed"),
    case("ablate --max-new-tokens 0", "--max-new-tokens"),
    case("ablate --budgets 0,16", "--budgets", "'0'"),
    case("ablate --budgets 16,x", "--budgets", "'x'"),
    case("ablate --budgets 16,-4", "--budgets", "'-4'"),
    case("ablate --budgets ,", "--budgets", "no number"),
    case("ablate --buffer 0", "--buffer"),
    case("ablate --task resoner --model {m}", "'resoner'", "reasoner"),
    case("ablate --task reasoner:depth=3 --model {m}", "'depth'", "level"),
    case("ablate --task {d}/none.jsonl --model {m}", "none.jsonl", "cannot be read"),
    case("ablate --task {d}/torn.jsonl:grader=exact --model {m}", "line 2", "torn.jsonl"),
    case("ablate --task perplexity:of=needle --model {m}", "needle", "no reference"),
    case("ablate --task reasoner --by dpth --model {m}", "'dpth'", "depth"),
    case("ablate --task reasoner --attempts 4 --model {m}", "4 attempts", "--temperature 0.6"),
    case("ablate --task reasoner --temperature 1 --top-p 2 --model {m}", "top_p", "2"),
    case("ablate --task reasoner --attempts 0 --model {m}", "--attempts"),
    case("ablate --task {d}/chat.jsonl:grader=exact --model {m}", "chat template", "chat=false"),
    case("tasks shw", "shw", "show"),
    case("tasks show", "NAME|FILE|ID"),
    case("tasks show nedle", "'nedle'", "needle"),
    case("tasks show math-500 --split tune", "math-500", "tune"),
    case("tasks show needle:length=9", "length=9", "22"),
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
    case("run hi --policy h2o --model {m}", "no budget"),
    case("run hi --budget 16 --model {m}", "--budget", "--policy"),
    case("run hi --policy h2o --budget x --model {m}", "--budget"),
    # models
    case("run hi --model reasonr", "'reasonr'", "reasoner"),
    case("run hi --model nobody/nothing", "nobody/nothing"),
    case("run hi --model {d}/nowhere/at/all", "nowhere"),
    case("run hi --model {d}", "cannot be loaded"),
    case("run hi --model {m} --dtype float23", "float23", "float32"),
    case("run hi --model {m} --device tpu", "tpu"),
    case("ablate --model {m}x", "{m}x", "{m}"),
    case("plan show {d}/good.toml --model {m}x", "{m}x", "{m}"),
    # plans and presets
    case("plan show {d}/none.toml --model {m}", "none.toml", "cannot be read"),
    case("plan show {d} --model {m}", "cannot be read"),
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
    case("ablate --preset baseline", "'baseline'", "baselines"),
    case("ablate --preset {d}/none.toml", "none.toml"),
    case("ablate --preset {d}/broken.toml", "broken.toml", "TOML"),
    case("ablate --preset {d}/good.toml", "good"),
    case("ablate --plan {d}/none.toml --model {m}", "none.toml"),
    # prompts
    case("run --model {m}", "no prompt"),
    case("run hi --file {d}/prompts.txt --model {m}", "--file"),
    case("run --file {d}/none.txt --model {m}", "none.txt", "cannot be read"),
    case("run --file {d}/empty.txt --model {m}", "empty.txt", "no prompt"),
    case("run --file {d}/latin.toml --model {m}", "UTF-8"),
    case("run --file {d}/torn.jsonl --model {m}", "line 2", "torn.jsonl"),
    case("run --file {d}/promptless.jsonl --model {m}", "line 1", "prompt"),
    case("run hi --chat --model {m}", "chat template", "--chat"),
    case("run hi --plan {d}/good.toml --policy h2o --model {m}", "--plan", "--policy"),
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
    case("ablate --model {m} --n 1 --output {d}", "not empty"),
    case("ablate --model {m} --n 1 --output {d}/good.toml", "is a file"),
    case("bench --output {d}/good.toml", "exists"),
    case("bench --prompt-max 3", "--prompt-max", "--prompt-min"),
    case("bench --rounds 0", "--rounds"),
    case("bench --policies h20 --new-tokens 2", "'h20'", "h2o"),
    # steering
    case("steer calibrate", "--output"),
    case("steer calibrate --output a.pt", "a.pt", ".safetensors"),
    case("steer calibrate --output {d}/there.safetensors", "exists"),
    case("steer calibrate --output nowhere/a.safetensors", "no folder nowhere"),
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
    case("steer show {d}/none.safetensors", "none.safetensors", "No such file"),
    case("steer show {d}/there.safetensors", "there.safetensors", "not safetensors"),
    case("steer shw", "shw", "show"),
    case("run hi --policy seal --model {m} --set seal.vector=resoner", "'resoner'", "reasoner"),
    case("run hi --policy seal --set seal.layer=9", "layer 9", "0, 1, 2, 3"),
    case("run . --policy seal --model {m} --json", "128 numbers", "32", "kvpolicy steer calibrate"),
]

FILES = {
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
    (folder / "latin.toml").write_bytes('label = "é"'.encode("latin-1"))
    return folder


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_answered_with_one_sentence(
    kvpolicy: Shell,
    case: Case,
    files: Path,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(files.iterdir())

    def fill(text: str) -> str:
        return text.replace("{m}", str(model_folder)).replace("{d}", str(files))

    answer = kvpolicy(*(fill(word) for word in case.words.split()))
    assert answer.status == 2, answer.err
    assert answer.out == ""
    sentence = answer.err.splitlines()[-1]
    assert sentence.startswith("kvpolicy: ")
    assert sentence.endswith((".", "?")), sentence
    assert "Traceback" not in answer.err
    for word in case.says:
        assert fill(word) in sentence
    assert sorted(files.iterdir()) == before, "nothing is left behind"
    assert list(tmp_path.iterdir()) == []


def test_a_defect_of_ours_is_not_dressed_up_as_a_mistake_of_the_users(
    kvpolicy: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        msg = "a defect"
        raise LookupError(msg)

    monkeypatch.setattr("kvpolicy.cli.listing.installed_policies", broken)
    with pytest.raises(LookupError, match="a defect"):
        kvpolicy("list")
