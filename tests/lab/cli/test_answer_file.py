"""``kvpolicy run --output``: each prompt answered once, in order, whatever interrupts it."""

import json
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from child_process import Ended, Kill, run_in_child
from commands import kvpolicy, model_folder
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kill_plugin import Fuse
from shell import Shell, refusal
from small_disk import fill, on_small_disk

from kvpolicy.engine.engine import Engine
from kvpolicy.model.loading import load_model
from kvpolicy.plan.plan import Plan

__all__ = ["kvpolicy", "model_folder"]

H2O = ("--policy", "h2o", "--budget", 12, "--buffer", 6, "--max-new-tokens", 30, "--slots", 3)
NUM = 8
KILLS = st.builds(Kill, st.integers(1, 24), st.booleans())  # a run has some 25 steps

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="forks its children")


def records(num: int = NUM) -> list[dict[str, Any]]:
    """Prompts of several lengths: with ids, without, with limits, and one that is refused."""
    found: list[dict[str, Any]] = [
        {"id": f"q{i}", "prompt": f" tea is {i}. What is tea?" * (1 + i % 3)} for i in range(num)
    ]
    del found[3]["id"]
    found[4]["id"] = 99
    found[5] |= {"max_new_tokens": 4, "temperature": 0.7, "seed": 2}
    found[6]["prompt"] = [10**6]
    return found


def write(folder: Path, *lines: object) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture
def words(tmp_path: Path, model_folder: Path) -> list[object]:
    prompts, output = write(tmp_path, *records()), tmp_path / "out.jsonl"
    return ["run", "--prompts", prompts, "--output", output, "--model", model_folder, *H2O]


@pytest.fixture(scope="module")
def undisturbed(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = ("--prompts", write(folder, *records()), "--output", folder / "out.jsonl")
    ended = run_in_child(folder, "run", *words, "--model", model_folder, *H2O)
    assert ended.status == 1, ended.err
    return folder


@pytest.fixture
def expected(undisturbed: Path) -> bytes:
    """Its output."""
    return (undisturbed / "out.jsonl").read_bytes()


@pytest.mark.slow
def test_ids_and_order_are_those_of_the_file_and_texts_those_of_each_prompt_alone(
    kvpolicy: Shell, words: list[object], tmp_path: Path, model_folder: Path
) -> None:
    answer = kvpolicy(*words, "--json")
    assert answer.status == 1, "one prompt has an error"
    answers = read(tmp_path / "out.jsonl")
    ids = [record.get("id", number) for number, record in enumerate(records())]
    assert [one["id"] for one in answers] == ids
    model, tokenizer = load_model(str(model_folder))
    engine = Engine(model, tokenizer, Plan.uniform("h2o", budget=12, buffer=6))
    for record, found in zip(records(), answers, strict=True):
        if "seed" not in record:
            (alone,) = engine.generate([record["prompt"]], max_new_tokens=30).results()
            assert found["text"] == (alone.text or "")
            assert found.get("error") == alone.error
    assert answers[5]["num_tokens"] == 4
    summary = answer.json
    assert summary["num_prompts"] == NUM
    assert summary["finish_reasons"]["error"] == 1
    assert sum(summary["finish_reasons"].values()) == NUM
    assert summary["new_tokens"] == sum(one["num_tokens"] for one in answers)
    assert summary["plan_digest"] == engine.plan.digest()
    (worker,) = summary["workers"]
    assert worker["num_prompts"] == NUM
    assert worker["throughput_tok_s"] == worker["new_tokens"] / worker["busy_s"] > 0


@pytest.mark.slow
def test_the_same_command_again_computes_nothing(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    first = kvpolicy(*words)
    content = (tmp_path / "out.jsonl").read_bytes()
    assert f"{NUM} prompts" in first.err
    assert f"{NUM} answers" in first.err
    assert (tmp_path / "out.jsonl.run" / "manifest.json").exists()
    assert kvpolicy(*words).status == 1
    assert (tmp_path / "out.jsonl").read_bytes() == content
    assert kvpolicy(*words, "--json").json["workers"] == []


@pytest.mark.nightly
def test_another_run_is_refused_and_replaced_if_that_is_wanted(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    write(tmp_path, *records(8))
    kvpolicy(*words)
    output = tmp_path / "out.jsonl"
    content, before = output.read_bytes(), output.stat()
    for more, named in (
        (("--budget", 14), "plan"),
        (("--max-new-tokens", 31), "max_new_tokens"),
        (("--seed", 4), "seed"),
        (("--stop", "x"), "stop"),
        (("--dtype", "bfloat16"), "model"),
    ):
        sentence = refusal(kvpolicy(*words, *more))
        assert all(word in sentence for word in (named, "--overwrite", "--output"))
    write(tmp_path, *records(8)[::-1])
    assert "prompts" in refusal(kvpolicy(*words))
    assert output.read_bytes() == content
    assert kvpolicy(*words, "--overwrite").status == 1
    assert output.stat().st_ino != before.st_ino
    ids = [record.get("id", number) for number, record in enumerate(records(8)[::-1])]
    assert [one["id"] for one in read(output)] == ids


@pytest.mark.nightly
def test_other_slots_continue_the_same_run(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    write(tmp_path, *records(8))
    kvpolicy(*words)
    assert kvpolicy(*words, "--slots", 1, "--keep-going", "--json").json["workers"] == []


# With a prefix store

CACHE = ("--prefix-cache", "1MiB", "--prefix-block", 4)
SYSTEM = " oak is 9. fig = oak - 2." * 2  # longer than the budget


def alike(num: int = 10) -> list[dict[str, Any]]:
    return [{"prompt": f"{SYSTEM} tea is {i}. What is tea?"} for i in range(num)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    ["h2o", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("snapkv", "full"))],
)
def test_with_a_prefix_store_the_output_is_the_same(
    kvpolicy: Shell, words: list[object], tmp_path: Path, policy: str
) -> None:
    write(tmp_path, *alike())
    limits = () if policy == "full" else H2O[2:6]
    knobs = ("--set", "snapkv.window_size=4") if policy == "snapkv" else ()
    words = [*words[:7], "--policy", policy, *limits, *H2O[6:], *knobs]
    plain = kvpolicy(*words, "--json").json
    content = (tmp_path / "out.jsonl").read_bytes()
    assert (plain["reused_tokens"], "prefix_store" in plain["workers"][0]) == (0, False)
    again = kvpolicy(*words, *CACHE, "--overwrite", "--json")
    assert (tmp_path / "out.jsonl").read_bytes() == content
    summary = again.json
    (worker,) = summary["workers"]
    assert summary["prompt_tokens"] == plain["prompt_tokens"] == worker["prompt_tokens"]
    assert summary["prompt_tokens"] == sum(
        one["prompt_len"] for one in read(tmp_path / "out.jsonl")
    )
    assert summary["reused_tokens"] == worker["reused_tokens"] > 9 * 16
    assert worker["prefix_store"]["reused_tokens"] == summary["reused_tokens"]
    assert worker["prefix_store"]["hits"] > 0 == worker["prefix_store"]["turns"]
    assert f"{summary['reused_tokens']:,} of {summary['prompt_tokens']:,}" in again.err


@pytest.mark.nightly
def test_a_session_with_a_prefix_store_continues_one_without(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    kvpolicy(*words)
    assert kvpolicy(*words, *CACHE, "--json").json["workers"] == []


@pytest.mark.slow
def test_the_folder_of_a_prefix_store_is_found_by_the_next_file(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    write(tmp_path, *alike(4))
    words = [*words, *CACHE, "--prefix-spill", tmp_path / "prefixes", "--json"]
    first = kvpolicy(*words).json
    write(tmp_path, *alike(8)[4:])
    second = kvpolicy(*words, "--overwrite").json
    assert first["workers"][0]["prefix_store"]["spilled_blocks"] > 0
    assert second["workers"][0]["prefix_store"]["spill_loads"] > 0
    assert second["reused_tokens"] > first["reused_tokens"] > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefix-block", 8), "--prefix-cache"),
        ((*CACHE, "--prefix-eviction", "lro"), "'lro'"),
        ((*CACHE, "--prefix-spill", "/dev/null/a"), "/dev/null/a"),
        ((*CACHE, "--prefix-eviction", "lro", "--on", "ray"), "'lro'"),
        ((*CACHE, "--prefix-spill", "a", "--on", "ray"), "--prefix-spill"),
    ],
)
def test_wrong_stores_are_refused_before_a_model_is_loaded(
    kvpolicy: Shell, words: list[object], options: tuple[object, ...], message: str
) -> None:
    assert message in refusal(kvpolicy(*words, "--model", "no/such/model", *options))


@on_linux
@pytest.mark.slow
def test_a_full_disk_of_a_prefix_store_changes_no_answer(
    kvpolicy: Shell, words: list[object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(tmp_path, *alike())
    kvpolicy(*words)
    expected = (tmp_path / "out.jsonl").read_bytes()
    folder = tmp_path / "prefixes"
    folder.mkdir()
    words = [*words, "--prefix-cache", "10KiB", "--prefix-block", 4, "--prefix-spill", folder]

    def body() -> None:
        fill(folder)
        ended = kvpolicy(*words, "--overwrite")
        assert ended.status == 0
        (warning,) = (record.getMessage() for record in caplog.records)
        assert str(folder) in warning
        assert str(folder) in ended.err.splitlines()[-1]

    on_small_disk(folder, 1 << 20, body)
    assert (tmp_path / "out.jsonl").read_bytes() == expected


@pytest.mark.slow
@on_linux
@pytest.mark.parametrize(
    "more", [pytest.param((), marks=pytest.mark.nightly), CACHE], ids=["plain", "prefix store"]
)
@given(kills=st.lists(KILLS, min_size=1, max_size=2))
@example(kills=[Kill(17, torn=True), Kill(14)])  # in the middle of an answer, then behind one
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_killed_at_any_steps_no_answer_is_lost_or_doubled(
    words: list[object],
    tmp_path: Path,
    expected: bytes,
    more: tuple[object, ...],
    kills: list[Kill],
) -> None:
    with TemporaryDirectory(dir=tmp_path) as name:
        folder = Path(name)
        again = [*words, *more, "--output", folder / "out.jsonl"]
        again += ["--prefix-spill", folder / "prefixes"] if more else []
        journal, done = folder / "out.jsonl.run" / "answers.jsonl", 0
        for kill in kills:
            ended = run_in_child(folder, *again, kill=kill)
            assert ended.status in (1, -signal.SIGKILL), ended.err
            if ended.status == 1:
                break
            content = journal.read_bytes() if journal.exists() else b""
            numbers = [json.loads(line)["index"] for line in content.split(b"\n")[:-1]]
            assert len(set(numbers)) == len(numbers)
            if journal.exists() or not (folder / "out.jsonl").exists():
                assert len(numbers) >= done
                done = len(numbers)
        assert run_in_child(folder, *again).status == 1
        assert (folder / "out.jsonl").read_bytes() == expected


@on_linux
@pytest.mark.slow
def test_killed_at_a_compaction_it_continues_behind_what_was_answered(
    words: list[object], tmp_path: Path
) -> None:
    fuse = Fuse(tmp_path)
    options = ("--plugin", fuse.plugin, "--policy", "fused")
    words = [*words[:7], *options, *words[9:]]
    undisturbed = [*words, "--output", tmp_path / "undisturbed.jsonl"]
    assert run_in_child(tmp_path, *undisturbed).status == 1
    journal, sizes = tmp_path / "out.jsonl.run" / "answers.jsonl", []
    for num_calls in (35, 20):
        fuse.light(num_calls, signal.SIGKILL)
        ended = run_in_child(tmp_path, *words)
        assert ended.status == -signal.SIGKILL, ended.err
        sizes.append(journal.read_bytes().count(b"\n"))
    assert sizes == sorted(set(sizes)), "every session has answered some"
    journal.write_bytes(journal.read_bytes()[:-5])
    ended = run_in_child(tmp_path, *words)
    assert f"{sizes[-1] - 1} of {NUM}" in ended.err
    expected = (tmp_path / "undisturbed.jsonl").read_bytes()
    assert (tmp_path / "out.jsonl").read_bytes() == expected
    manifest = json.loads((tmp_path / "out.jsonl.run" / "manifest.json").read_text())
    assert len(manifest["sessions"]) == 3


@pytest.mark.slow
@on_linux
def test_ctrl_c_says_what_is_kept_and_how_to_continue(words: list[object], tmp_path: Path) -> None:
    fuse = Fuse(tmp_path)
    words = [*words[:7], "--plugin", fuse.plugin, "--policy", "fused", *words[9:]]
    fuse.light(20, signal.SIGINT)
    ended = run_in_child(tmp_path, *words)
    assert ended.status == 130
    kept = (tmp_path / "out.jsonl.run" / "answers.jsonl").read_bytes().count(b"\n")
    sentence = ended.err.splitlines()[-1]
    assert all(part in sentence for part in (f"{kept} of {NUM} answers", f"{tmp_path}/out.jsonl"))
    assert 0 < kept < NUM
    assert "Traceback" not in ended.err
    assert run_in_child(tmp_path, *words).status == 1
    assert len(read(tmp_path / "out.jsonl")) == NUM


@on_linux
@pytest.mark.parametrize("share", [0.3, pytest.param(0.8, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_sentence_and_the_run_is_resumable(
    words: list[object], tmp_path: Path, undisturbed: Path, share: float
) -> None:
    expected = (undisturbed / "out.jsonl").read_bytes()
    # The manifest, which names folders and versions, is written; not all answers are.
    size = (undisturbed / "out.jsonl.run" / "manifest.json").stat().st_size + 64
    assert size < len(expected), (size, len(expected))
    most_bytes = round(size + share * (len(expected) - size))
    ended = run_in_child(tmp_path, *words, most_bytes=most_bytes)
    assert ended.status == 2, ended.err
    sentence = ended.err.splitlines()[-1]
    assert all(part in sentence for part in ("answers.jsonl", f"of {NUM} answers")), sentence
    assert "Traceback" not in ended.err
    assert not list(tmp_path.rglob("*.new"))
    ended: Ended = run_in_child(tmp_path, *words)
    assert ended.status == 1, ended.err
    assert (tmp_path / "out.jsonl").read_bytes() == expected


FAILING = """
from kvpolicy import hookimpl

class Failing:
    @hookimpl
    def score(self, positions):
        raise ValueError("odd")
"""


def test_a_policy_that_fails_ends_the_run_or_its_prompts(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    plugin = tmp_path / "failing.py"
    plugin.write_text(FAILING, encoding="utf-8")
    short = {"id": "short", "prompt": [5, 6], "max_new_tokens": 2}
    write(tmp_path, short, {"id": "long", "prompt": [5] * 40}, short | {"id": "other"})
    words = [*words[:7], "--plugin", plugin, "--policy", "failing", *words[9:], "--slots", 1]
    ended = kvpolicy(*words)
    assert ended.status == 2
    assert "odd" in ended.err
    assert "1 of 3 answers" in ended.err.splitlines()[-1]
    ended = kvpolicy(*words, "--keep-going")
    assert ended.status == 1
    answers = read(tmp_path / "out.jsonl")
    assert [one["id"] for one in answers] == ["short", "long", "other"]
    assert [one["finish_reason"] for one in answers] == ["length", "error", "length"]
    assert "odd" in answers[1]["error"]


ODD = {
    "a line that is not JSON": ('{"prompt": "x"}\n{"prompt": ', (), "line 2 of "),
    "a limit below 1": ('{"prompt": "x", "max_new_tokens": 0}', (), "line 1 of "),
    "two ids alike": ('{"prompt": "x"}\n{"id": 0, "prompt": "x"}', (), "id 0"),
    "no prompt": ("\n", (), "prompt"),
    "no file": (None, (), "prompts.jsonl"),
    "no template": ('{"messages": [{"role": "user", "content": "x"}]}', (), "chat template"),
    "system": ('{"prompt": "x"}', ("--system", "y"), "chat template"),
    "raw and system": ('{"prompt": "x"}', ("--raw", "--system", "y"), "--system"),
    "standard input": ('{"prompt": "x"}', ("--prompts", "-"), "--output"),
    "another prompt": ('{"prompt": "x"}', ("hi",), "--output"),
    "in order": ('{"prompt": "x"}', ("--in-order",), "--in-order"),
    "split": ('{"prompt": "x"}', ("--tensor-parallel",), "--tensor-parallel"),
    "workers here": ('{"prompt": "x"}', ("--workers", 2), "--workers"),
    "resources here": ('{"prompt": "x"}', ("--cpus-per-worker", 2), "--cpus-per-worker"),
    "no folder": ('{"prompt": "x"}', ("--output", "none/out"), "none"),
    "heat": ('{"prompt": "x"}', ("--top-p", 0), "top_p"),
    "a wrong plan": ('{"prompt": "x"}', ("--set", "h2o.none=1"), "none"),
}


@pytest.mark.parametrize("name", ODD)
def test_foolish_input_is_refused_before_anything_is_computed(
    kvpolicy: Shell, words: list[object], tmp_path: Path, name: str
) -> None:
    content, more, part = ODD[name]
    path = tmp_path / "prompts.jsonl"
    path.unlink() if content is None else path.write_text(content, encoding="utf-8")
    assert part in refusal(kvpolicy(*words, *more))
    assert not (tmp_path / "out.jsonl").exists()


def test_the_prompts_are_never_overwritten(
    kvpolicy: Shell, words: list[object], tmp_path: Path
) -> None:
    path = tmp_path / "prompts.jsonl"
    content = path.read_bytes()
    sentence = refusal(kvpolicy(*words, "--output", path, "--overwrite"))
    assert all(part in sentence for part in (str(path), "--output"))
    assert path.read_bytes() == content


@pytest.mark.needs_reasoner
@pytest.mark.parametrize("more", ["--overwrite", "--on ray", "--workers 2", "--ray-address auto"])
def test_options_of_an_output_need_one(kvpolicy: Shell, more: str) -> None:
    option = more if more == "--on ray" else more.split()[0]
    sentence = refusal(kvpolicy("run", "hi", *more.split()))
    assert all(part in sentence for part in (option, "--output"))
