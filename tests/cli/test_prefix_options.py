"""`kvpolicy run --prefix-cache`: prompts of a file share their beginnings."""

from pathlib import Path

import pytest
from shell import Shell, refusal

H2O = ("--policy", "h2o", "--budget", "16", "--buffer", "8", "--max-new-tokens", "5")
CACHE = ("--prefix-cache", "1MiB", "--prefix-block", "4")


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    file = tmp_path / "questions.txt"
    file.write_text("".join(f"3 + 4 = 7, 7 + 5 = 12, 12 + 6 = 18, {n} + 3 = ?\n" for n in range(3)))
    return file


def test_what_was_reused_is_printed_and_the_answers_are_the_same(
    kvpolicy: Shell, model_folder: Path, questions: Path
) -> None:
    words = ("run", "--file", questions, "--model", model_folder, *H2O, "--in-order")
    plain, cached = kvpolicy(*words), kvpolicy(*words, *CACHE)
    assert cached.status == 0, cached.err
    assert cached.out == plain.out
    assert "prompt tokens (" in cached.err
    assert "reused" not in plain.err
    *results, run = kvpolicy(*words, *CACHE, "--json").json_lines
    assert run["reused_tokens"] == sum(one["reused_tokens"] for one in results) > 0
    assert run["prefix_store"]["reused_tokens"] == run["reused_tokens"]
    assert run["prefix_store"]["hits"] > 0
    reused = f"reused {run['reused_tokens']} of {run['prompt_tokens']} prompt tokens"
    assert reused in cached.err
    assert "prefix_store" not in kvpolicy(*words, "--json").json_lines[-1]


@pytest.mark.nightly
def test_a_folder_is_found_by_the_next_command(
    kvpolicy: Shell, model_folder: Path, questions: Path, tmp_path: Path
) -> None:
    words = ("run", "--file", questions, "--model", model_folder, *H2O, *CACHE, "--json")
    spill = ("--prefix-spill", tmp_path / "spill", "--prefix-spill-bytes", "1MB")
    first, second = (kvpolicy(*words, *spill).json_lines for _ in range(2))
    assert [one["tokens"] for one in first[:-1]] == [one["tokens"] for one in second[:-1]]
    assert first[-1]["prefix_store"]["spilled_blocks"] > 0
    assert second[-1]["prefix_store"]["spill_loads"] > 0
    assert second[-1]["reused_tokens"] > first[-1]["reused_tokens"]


def test_ends_of_answers_are_left_out_if_that_is_asked_for(
    kvpolicy: Shell, model_folder: Path, questions: Path
) -> None:
    words = ("run", "--file", questions, "--model", model_folder, *H2O, *CACHE, "--json")
    *usual, with_ends = kvpolicy(*words).json_lines
    *others, without = kvpolicy(*words, "--prefix-prompts-only").json_lines
    assert [one["tokens"] for one in others] == [one["tokens"] for one in usual]
    assert without["reused_tokens"] == with_ends["reused_tokens"] > 0
    blocks = [run["prefix_store"]["num_blocks"] for run in (with_ends, without)]
    assert blocks[0] - blocks[1] == 3, "one end for each question"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefix-cache", "much"), "--prefix-cache was given 'much'; give bytes with a unit"),
        (("--prefix-block", "8"), "--prefix-block was given without --prefix-cache; add"),
        (("--prefix-prompts-only",), "--prefix-prompts-only was given without --prefix-cache"),
        (("--prefix-spill", "a"), "--prefix-spill was given without --prefix-cache; add"),
        ((*CACHE, "--prefix-spill-bytes", "1MB"), "given without --prefix-spill; add"),
        ((*CACHE, "--prefix-eviction", "lro"), "no block eviction is named 'lro'"),
        ((*CACHE, "--prefix-spill", "/dev/null/a"), "cannot be used: Not a directory; choose"),
        ((*CACHE, "--prefix-spill", "a", "--tensor-parallel"), "--prefix-spill is for one process"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    kvpolicy: Shell, options: tuple[str, ...], message: str
) -> None:
    answer = kvpolicy("run", "a prompt", "--model", "no/such/model", *H2O, *options)
    assert message in refusal(answer)
