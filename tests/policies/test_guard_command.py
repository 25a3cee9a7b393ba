"""``kvpolicy guard``: traces from files and tasks, misses in a table, JSON and a picture."""

import json
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from golden_cases import FOLDER
from hypothesis import given
from hypothesis import strategies as st
from kvpolicy_plugins.guard.requests import BlockIds, interleaved
from kvpolicy_plugins.guard.traces import Trace, parse, to_text
from shell import Shell, refusal

RECORDED = FOLDER / "related"
NOISY = ["--predictor", "lognormal", "--sigma", 6]


@pytest.fixture
def kvpolicy(capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(capsys)


def misses(answer: dict, algorithm: str) -> list[int]:
    (row,) = [row for row in answer["rows"] if row["algorithm"] == algorithm]
    found: list[int] = row["misses"]
    return found


@pytest.mark.parametrize(
    ("file", "options", "algorithm", "name"),
    [
        ("guard_03", ["--predictor", "normal", "--sigma", 50], "guard", "Guard"),
        ("guard_03", ["--predictor", "normal", "--sigma", 50], "lmarker", "LMarker"),
        ("guard_16", NOISY, "unguarded", "BlindOracle"),
        ("guard_16", [*NOISY, "--relax-times", 3], "guard", "Guard_relax_times_3"),
        ("guard_16", [*NOISY, "--relax-prob", 0.5], "guard", "Guard_relax_prob_05"),
        ("guard_13", ["--predictor", "labels", "--flip", 0.3], "guard", "Guard_OracleBin_flip03"),
        ("guard_13", ["--predictor", "labels", "--flip", 0.3], "unguarded", "LRB_OracleBin_flip03"),
        ("guard_13", ["--predictor", "pleco"], "guard", "Guard_PLECO"),
        ("guard_13", ["--predictor", "perfect"], "marker", "Marker"),
    ],
)  # fmt: skip
def test_recorded_misses_are_reached_from_the_command(
    kvpolicy: Shell, file: str, options: list[object], algorithm: str, name: str
) -> None:
    with np.load(RECORDED / f"{file}.npz") as stored:
        expected = stored[f"miss_{name}"].tolist()
    capacity = 4 if file == "guard_03" else 8
    answer = kvpolicy(
        "guard", "replay", RECORDED / f"{file}.npz", "--capacity", capacity, *options,
        "--algorithm", algorithm, "--seeds", "1000-1004", "--json",
    )  # fmt: skip
    assert misses(answer.json, algorithm) == expected


def test_given_predictions_are_followed_in_every_format(kvpolicy: Shell, tmp_path: Path) -> None:
    blocks, times = [1, 2, 3, 1, 2, 3, 1], [9, 5, 9, 6, 9, 9, 9]
    pairs = list(zip(blocks, times, strict=True))
    (tmp_path / "a.txt").write_text("# ids\n" + "".join(f"{b} {t}\n" for b, t in pairs))
    (tmp_path / "a.csv").write_text("block,prediction\n" + "".join(f"{b}, {t}\n" for b, t in pairs))
    (tmp_path / "a.json").write_text(json.dumps({"trace": blocks, "predictions": times}))
    lines = [json.dumps({"blocks": blocks[:3], "predictions": times[:3]})]
    lines += [json.dumps({"blocks": blocks[3:], "predictions": times[3:]})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    np.savez(tmp_path / "a.npz", trace=np.array(blocks), predictions=np.array(times, float))
    found = [
        kvpolicy("guard", "replay", path, "--capacity", 2, "--predictor", "given", "--json").json
        for path in sorted(tmp_path.iterdir())
    ]
    assert len(found) == 5
    # 3 pushes 1 out, 1 pushes 3 out, 2 stays, 3 pushes 2 out (9 as 1 has 6), then 1 is there.
    assert [misses(one, "unguarded") for one in found] == [[5]] * 5


def test_the_table_shows_each_algorithm_at_each_capacity(kvpolicy: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "ids.txt"
    trace.write_text("".join(f"{i * i % 23}\n" for i in range(200)))
    answer = kvpolicy("guard", "replay", trace, "--capacity", "3,6", "--seeds", "0,1")
    assert answer.status == 0
    rows = [line.split() for line in answer.out.splitlines()[4:]]
    names = ["opt", "lru", "marker", "unguarded", "guard"]
    assert [row[0] for row in rows] == names * 2
    assert {row[1] for row in rows if row[0] == "opt"} == {"3", "6"}


def test_a_picture_is_drawn(kvpolicy: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "ids.txt"
    trace.write_text("".join(f"{i * i % 23}\n" for i in range(200)))
    plot = tmp_path / "misses.png"
    answer = kvpolicy("guard", "replay", trace, "--capacity", "3,6,9", "--plot", plot)
    assert answer.status == 0
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("content", "suffix", "words"),
    [
        ("", ".txt", "holds no request"),
        ("1\nx\n", ".txt", "line 2, has the block id 'x'; ids are whole numbers"),
        ("1.5\n", ".txt", "line 1, has the block id '1.5'"),
        ("1 2 3\n", ".txt", "has 3 fields"),
        ("1\n2 5\n", ".txt", "1 predictions for 2 requests"),
        ("1 nan\n", ".txt", "no numbers (NaN)"),
        ('["a"]', ".json", "has the block id 'a'"),
        ("{", ".json", "is not JSON"),
        ('{"format": "other", "version": 1}\n[1]\n', ".jsonl", "expected 'kvpolicy block trace'"),
        ("PK", ".npz", "cannot be read as .npz"),
    ],
)
def test_a_file_that_is_no_trace_is_refused_in_one_sentence(
    kvpolicy: Shell, tmp_path: Path, content: str, suffix: str, words: str
) -> None:
    path = tmp_path / f"trace{suffix}"
    path.write_text(content)
    assert words in refusal(kvpolicy("guard", "replay", path, "--capacity", 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--capacity", 0], "--capacity was given '0'"),
        (["--predictor", "pelco"], "did you mean pleco"),
        (["--algorithm", "gaurd"], "did you mean guard"),
        (["--predictor", "normal"], "needs its noise"),
        (["--sigma", 3], "--sigma needs --predictor"),
        (["--flip", 0.5], "--flip needs --predictor"),
        (["--predictor", "given"], "needs a trace with predictions"),
        (["--seed", 1, "--seeds", "1,2"], "give one of them"),
        (["--seeds", "5-2"], "FIRST-LAST"),
        (["--relax-times", 2, "--relax-prob", 0.5], "give one of them"),
        (["--plot", "a.bmp"], ".svg, .pdf, .png"),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(
    kvpolicy: Shell, tmp_path: Path, options: list[object], words: str
) -> None:
    trace = tmp_path / "ids.txt"
    trace.write_text("1\n2\n1\n")
    assert words in refusal(kvpolicy("guard", "replay", trace, *options))


def test_a_missing_trace_is_refused(kvpolicy: Shell, tmp_path: Path) -> None:
    assert "nowhere.jsonl" in refusal(kvpolicy("guard", "replay", tmp_path / "nowhere.jsonl"))


def test_the_blow_up_is_shown(kvpolicy: Shell) -> None:
    (row,) = kvpolicy("guard", "blow-up", "--capacity", 4, "--json").json
    assert row == {
        "capacity": 4, "num_requests": 4003, "unguarded": 4003, "guard": 6, "opt": 5, "lru": 6,
    }  # fmt: skip


@pytest.mark.needs_reasoner
def test_a_recorded_trace_says_how_to_record_it_again(kvpolicy: Shell, tmp_path: Path) -> None:
    first, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    options = ["--n", 6, "--shared", 2, "--seed", 3]
    assert kvpolicy("guard", "record", *options, "--output", first).status == 0
    words = json.loads(first.read_text().splitlines()[0])["command"].split()[1:]
    assert kvpolicy(*words, "--output", again).status == 0
    assert first.read_text() == again.read_text()
    trace = parse(first.read_bytes(), ".jsonl", "trace")
    assert len(trace.prompts) == 6
    assert len(set(trace.blocks)) < len(trace.blocks), "beginnings are shared"
    assert "exists" in refusal(kvpolicy("guard", "record", "--output", first))


@pytest.mark.needs_reasoner
def test_a_conversation_grows_from_question_to_question(kvpolicy: Shell, tmp_path: Path) -> None:
    output = tmp_path / "a.jsonl"
    options = ["--task", "conversation", "--n", 4, "--open", 1]
    assert kvpolicy("guard", "record", *options, "--output", output).status == 0
    prompts = parse(output.read_bytes(), ".jsonl", "trace").prompts
    for before, after in pairwise(prompts):
        shared = [one for one, other in zip(before, after, strict=False) if one == other]
        assert len(after) > len(before)
        # The history so far; the last block of a prompt may hold a part of its question.
        assert len(shared) >= len(before) - 1


def test_the_committed_traces_are_those_of_the_figures() -> None:
    folder = Path(__file__).parents[2] / "docs" / "benchmarks" / "traces"
    found = {}
    for path in folder.iterdir():
        blocks = parse(path.read_bytes(), path.suffix, path.name).blocks
        found[path.stem] = len(blocks), len(set(blocks))
    assert found == {"multikey": (14800, 8090), "conversation": (2676, 770)}


@given(st.lists(st.lists(st.integers(0, 50), min_size=1), min_size=1))
def test_a_trace_reads_back_as_it_was_written(prompts: list[list[int]]) -> None:
    trace = Trace(prompts, header={"command": "kvpolicy guard record"})
    assert parse(to_text(trace).encode(), ".jsonl", "trace") == trace


@given(st.lists(st.lists(st.integers(0, 1), max_size=12), max_size=6), st.integers(1, 4))
def test_prompts_share_the_blocks_of_their_common_prefix(
    prompts: list[list[int]], size: int
) -> None:
    ids = BlockIds(size)
    found = [ids.of_prompt(prompt) for prompt in prompts]
    for prompt, blocks in zip(prompts, found, strict=True):
        assert len(blocks) == len(prompt) // size
        for other, others in zip(prompts, found, strict=True):
            for number, block in enumerate(blocks):
                end = (number + 1) * size
                same = len(other) >= end and other[:end] == prompt[:end]
                assert (block in others) is same


@given(st.lists(st.integers(0, 5), max_size=8), st.integers(1, 4), st.integers(0, 99))
def test_conversations_take_turns_in_their_order(lengths: list[int], n: int, seed: int) -> None:
    turns = list(interleaved(lengths, n, Random(seed)))
    for number, length in enumerate(lengths):
        assert [turn for one, turn in turns if one == number] == list(range(length))
    for place in range(len(turns)):
        begun = {one for one, _ in turns[:place]}
        ended = {one for one in begun if turns[:place].count((one, lengths[one] - 1))}
        assert len(begun - ended) <= n
