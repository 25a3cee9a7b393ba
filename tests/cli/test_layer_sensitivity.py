"""``kvpolicy layers``: a table from a task, and what it refuses."""

from pathlib import Path

import pytest
from shell import Shell, refusal

from kvpolicy.toolkit import load_layer_table

pytestmark = pytest.mark.needs_reasoner


def test_command_measures_and_shows_a_table(kvpolicy: Shell, tmp_path: Path) -> None:
    file = tmp_path / "t.json"
    command = ["layers", "measure", "--task", "conversation:length=160", "--n", "2"]
    done = kvpolicy(*command, "--block", "32", "--output", str(file), "--json")
    found = done.json
    assert found["measured"] == {
        "block": 32,
        "task": "conversation:length=160",
        "seed": 0,
        "texts": 2,
        "tokens": 320,
    }
    assert tuple(found["values"]) == load_layer_table(file).values
    assert "sensitivity" in kvpolicy("layers", "show", str(file)).out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --text FILE or --task NAME"),
        (
            ["--task", "reasoner-needle", "--text", "a.txt"],
            "give either --text FILE or --task NAME",
        ),
        (["--text", "missing.txt"], "text 'missing.txt' cannot be read"),
        (
            ["--task", "reasoner-needle:length=60", "--n", "1"],
            "no text is longer than a block of 64",
        ),
    ],
)
def test_foolish_commands_are_refused_in_one_sentence(
    kvpolicy: Shell, tmp_path: Path, arguments: list[str], message: str
) -> None:
    file = str(tmp_path / "t.json")
    done = kvpolicy("layers", "measure", "--output", file, *arguments)
    assert message in refusal(done)
