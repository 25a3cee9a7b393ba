"""The command line in this process: status, stdout, stderr."""

import json
from typing import Any

import attrs
import pytest

from kvpolicy.cli.app import run


@attrs.frozen
class Answer:
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def words(self) -> str:
        """The output with single spaces: widths of columns are nobody's business."""
        return " ".join(self.out.split())

    @property
    def json_lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


def refusal(answer: Answer) -> str:
    """The error message for wrong input: status 2, one line on stderr, nothing on stdout."""
    assert answer.status == 2, answer.err
    assert answer.out == ""
    assert "Traceback" not in answer.err
    message = answer.err.splitlines()[-1]
    assert message.startswith("kvpolicy: ")
    assert message.endswith((".", "?")), message
    return message


class Shell:
    """Runs commands and collects their output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: object) -> Answer:
        self._capsys.readouterr()
        status = run([str(word) for word in args])
        captured = self._capsys.readouterr()
        return Answer(status, captured.out, captured.err)
