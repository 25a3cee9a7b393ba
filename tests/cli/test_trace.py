"""``kvpolicy trace``: a table, JSON lines, and a file that is complete after any failure."""

import json
from pathlib import Path

import pytest
from shell import Shell

PROMPT = " tea is 3. What is tea?"
H2O = ("--policy", "h2o+protect", "--budget", 16, "--buffer", 4, "--max-new-tokens", 30)
PLUGIN = """
import attrs
from kvpolicy import hookimpl


@attrs.define(eq=False)
class Stops:
    after: int = 3
    interrupts: bool = False
    calls = []

    @hookimpl
    def score(self, layer_idx, positions):
        self.calls.append(1)
        if len(self.calls) == self.after:
            raise KeyboardInterrupt if self.interrupts else IndexError("no such head")
        return positions.float()
"""


@pytest.fixture
def stops(tmp_path: Path) -> tuple[object, ...]:
    path = tmp_path / "stops.py"
    path.write_text(PLUGIN, encoding="utf-8")
    plan = ("--policy", "stops", "--budget", 16, "--buffer", 4, "--max-new-tokens", 30)
    return ("--plugin", path, *plan)


def test_the_table_and_the_json_lines_have_the_same_calls(
    kvpolicy: Shell, model_folder: Path
) -> None:
    words = ("trace", PROMPT, "--model", model_folder, *H2O, "--hook", "score", "--hook", "select")
    lines = kvpolicy(*words, "--json").json_lines
    calls = [line for line in lines if line["kind"] == "call"]
    totals = [line for line in lines if line["kind"] == "total"]
    assert {call["hook"] for call in calls} == {"score", "select"}
    assert [call["number"] for call in calls] == list(range(len(calls)))
    assert all(call["arguments"]["budget"] == 16 for call in calls if call["hook"] == "select")
    answer = kvpolicy(*words)
    assert answer.status == 0
    head, rule, *rows = answer.out.partition("\n\n")[0].splitlines()
    headers = "# request token hook layer answered by answer µs asked with"
    assert " ".join(head.split()) == headers
    assert set(rule) == {"─", " "}
    assert len(rows) == len(calls)
    for row, call in zip(rows, calls, strict=True):
        number, request, token, hook, layer = row.split()[:5]
        assert [int(number), int(request), int(token), hook, int(layer)] == [
            call["number"],
            *call["requests"],
            *call["tokens"],
            call["hook"],
            call["layer"],
        ]
    for total in totals:
        assert any(
            line.split()[:1] == [total["hook"]] and f" {total['policy']} " in line
            for line in answer.out.splitlines()
        )
        assert total["calls"] == sum(
            part["policy"] == total["policy"]
            for call in calls
            if call["hook"] == total["hook"]
            for part in call["parts"]
        )


@pytest.mark.nightly
def test_long_traces_are_truncated_with_a_note(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("trace", PROMPT, "--model", model_folder, *H2O)
    total = sum(line["kind"] == "call" for line in kvpolicy(*words, "--json").json_lines)
    answer = kvpolicy(*words, "--last", 4)
    assert len(answer.out.partition("\n\n")[0].splitlines()) == 2 + 4
    assert all(part in answer.err for part in (f"{total - 4} calls", f"--last {total}"))
    short = kvpolicy(*words, "--last", 4, "--json").json_lines
    assert [line["number"] for line in short if line["kind"] == "call"] == list(
        range(total - 4, total)
    )


def test_a_summary_shows_totals_only(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("trace", PROMPT, "--model", model_folder, *H2O, "--summary")
    answer = kvpolicy(*words)
    assert answer.out.startswith("hook ")
    assert "asked with" not in answer.out
    assert {line["kind"] for line in kvpolicy(*words, "--json").json_lines} == {"total"}


def test_evicted_rows_are_shown_with_their_texts(kvpolicy: Shell, model_folder: Path) -> None:
    words = ("trace", PROMPT, "--model", model_folder, "--policy", "streaming", "--budget", 10)
    words = (*words, "--buffer", 4, "--max-new-tokens", 12, "--hook", "select", "--layer", 1)
    plain = kvpolicy(*words)
    assert "rows leave" not in plain.out
    answer = kvpolicy(*words, "--kept", "--set", "streaming.n_sink=2")
    assert "4 rows leave head 0,1: 2-5 " in answer.out


def test_the_output_file_gets_every_call_and_must_be_new(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "calls.jsonl"
    words = ("trace", PROMPT, "--model", model_folder, *H2O, "--last", 2, "--output", path)
    assert kvpolicy(*words).status == 0
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(calls) > 2
    assert [call["number"] for call in calls] == list(range(len(calls)))
    before = path.read_bytes()
    again = kvpolicy(*words)
    assert (again.status, again.out) == (2, "")
    assert "exists" in again.err
    assert path.read_bytes() == before


@pytest.mark.parametrize("interrupts", [False, True])
def test_recorded_calls_are_shown_and_written_if_the_run_fails(
    interrupts: bool,
    kvpolicy: Shell,
    model_folder: Path,
    tmp_path: Path,
    stops: tuple[object, ...],
) -> None:
    path = tmp_path / "calls.jsonl"
    knob = ("--set", f"stops.interrupts={str(interrupts).lower()}", "--hook", "score")
    words = ("trace", PROMPT, "--model", model_folder, *stops, *knob, "--output", path)
    answer = kvpolicy(*words)
    assert answer.status == (130 if interrupts else 2)
    message = "interrupted after 3 calls." if interrupts else "'stops' raised IndexError in score()"
    assert message in answer.err.splitlines()[-1]
    assert "Traceback" not in answer.err
    assert "FAILED" in answer.out
    calls = [json.loads(line) for line in path.read_text().splitlines()]
    assert [bool(call["error"]) for call in calls] == [False, False, True]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hook", "scroe"), "no hook 'scroe' to record; the hooks are schedule"),
        (("--layer", 7), "no layer 7 to record; the model has layers 0 to 1"),
        (("--last", 0), "--last"),
        (("--output", "/nowhere/at/all"), "cannot be opened"),
        (("--policy", "h20"), "h2o"),
    ],
    ids=str,
)
def test_wrong_input_gives_one_sentence(
    words: tuple[object, ...], message: str, kvpolicy: Shell, model_folder: Path
) -> None:
    answer = kvpolicy("trace", PROMPT, "--model", model_folder, *H2O, *words)
    assert (answer.status, answer.out) == (2, "")
    assert message in answer.err
    assert "Traceback" not in answer.err


def test_a_run_with_keep_going_completes_the_other_requests(
    kvpolicy: Shell, model_folder: Path, tmp_path: Path, stops: tuple[object, ...]
) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = [[3, 4, 5], list(range(18)), [4, 5, 6]]
    path.write_text("\n".join(json.dumps({"prompt": p}) for p in prompts), encoding="utf-8")
    words = ("run", "--file", path, "--model", model_folder, *stops, "--set", "stops.after=1")
    assert kvpolicy(*words, "--max-new-tokens", 8, "--slots", 1).status == 2
    # The plugin counts its calls for as long as the process lives.
    words = (*words, "--set", "stops.after=2", "--keep-going", "--slots", 1, "--json")
    answer = kvpolicy(*words, "--max-new-tokens", 8)
    assert answer.status == 1
    results = [line for line in answer.json_lines if line["kind"] == "result"]
    assert sorted(line["id"] for line in results) == [0, 1, 2]
    by_id = {line["id"]: line for line in results}
    assert "IndexError" in by_id[1]["error"]
    assert by_id[0]["finish_reason"] != "error" != by_id[2]["finish_reason"]
    assert answer.json_lines[-1]["num_errors"] == 1
