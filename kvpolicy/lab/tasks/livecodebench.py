"""LiveCodeBench (2403.07974): contest problems, answered with programs that are run on tests.

The hub's ``livecodebench/code_generation_lite`` is a loading script, which current `datasets`
does not run; its files ``test.jsonl`` to ``test6.jsonl`` are read directly. Release ``k`` consists
of the first ``k`` of them: release 1 has 400 problems. One file has up to 1.25 GB.

Half of the private tests are JSON that is pickled, compressed with zlib and encoded as base64.
Unpickling can execute code from the file, so the text in the pickle is extracted without it.
"""

import base64
import binascii
import json
import pickletools
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import TaskError, error_summary
from kvpolicy.files import parse_json
from kvpolicy.lab.sandbox.run import find_wall
from kvpolicy.lab.tasks.answers import extract_code
from kvpolicy.lab.tasks.code_grading import Test, passes
from kvpolicy.lab.tasks.datasets import JsonRows, Rows
from kvpolicy.lab.tasks.question_sets import draw
from kvpolicy.lab.tasks.task import Example, Graded, GradeError, Split, spell_fields
from kvpolicy.model.hub import hub_reachable

ID = "livecodebench/code_generation_lite"
RELEASES = range(1, 7)

# The benchmark's own prompt (lcb_runner/prompts/code_generation.py), which states the format of
# the answer; for DeepSeek-R1 it is part of the user's message.
_TASK = (
    "You will be given a question (problem specification) and will generate a correct Python "
    "program that matches the specification and passes all tests.\n\nQuestion: {question}\n\n"
)
_WITH_STARTER = (
    "You will use the following starter code to write the solution to the problem and enclose "
    "your code within delimiters.\n```python\n{starter}\n```\n"
)
_WITHOUT_STARTER = (
    "Read the inputs from stdin solve the problem and write the answer to stdout (do not "
    "directly test on the sample inputs). Enclose your code within delimiters as follows. "
    "Ensure that when the python program runs, it reads the inputs, runs the algorithm and "
    "writes output to STDOUT.\n```python\n# YOUR CODE HERE\n```\n"
)
_COLUMNS = ("question_content", "starter_code", "public_test_cases", "private_test_cases")


@attrs.frozen
class LiveCodeBench:
    """Contest problems; an answer is correct if its last code block passes all tests.

    Attributes:
        source: A hub id, a folder with the files of the data set, or one such file.
        release: Number of the release, 1 to 6; ignored if ``source`` is one file.
        time_s: Time limit of a program for each test, in seconds.
        chat: Whether questions are wrapped in the model's chat template.
    """

    source: str = ID
    release: int = attrs.field(default=1)
    time_s: float = attrs.field(default=6.0)
    chat: bool = True

    def __attrs_post_init__(self) -> None:
        if self.release not in RELEASES:
            msg = f"task 'livecodebench' has no release {self.release}; expected 1 to 6"
            raise TaskError(msg)
        if not self.time_s > 0:
            msg = f"task 'livecodebench' got time_s={self.time_s:g}; expected more than 0"
            raise TaskError(msg)

    @property
    def name(self) -> str:
        """Name of the task with its options."""
        return spell_fields("livecodebench", self)

    @property
    def metric(self) -> Graded:
        """Accuracy; raises `TaskError` on machines without a sandbox for programs."""
        find_wall()
        return Graded(self.grade, runs_code=True)

    def examples(self, n: int, *, seed: int, split: Split = "test") -> Sequence[Example]:
        """Draw ``n`` problems, or all if there are fewer, in random order."""
        if split != "test":
            msg = f"task '{self.name}' has no {split} split; it has test"
            raise TaskError(msg)
        rows = self._rows()
        return [self._item(index, rows[row]) for index, row in enumerate(draw(len(rows), n, seed))]

    def grade(self, text: str, example: Example) -> bool:
        """Run the last code block of ``text`` on the tests, each in a sandbox of its own.

        This executes a program that a model wrote.

        Raises:
            GradeError: The sandbox did not start the program.
        """
        tests = [Test(**one) for one in json.loads(example.answer)]
        try:
            return passes(extract_code(text), tests, time_s=self.time_s)
        except TaskError as error:
            raise GradeError(str(error)) from error

    def _rows(self) -> Rows:
        path = Path(self.source)
        if path.is_file() or path.suffix == ".jsonl":
            return JsonRows([path])
        names = ["test.jsonl", *(f"test{number}.jsonl" for number in RELEASES[1:])]
        return JsonRows([self._file(name) for name in names[: self.release]])

    def _file(self, name: str) -> Path:
        if Path(self.source).is_dir():
            return Path(self.source) / name
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        found = try_to_load_from_cache(self.source, name, repo_type="dataset")
        if isinstance(found, str):
            return Path(found)
        if not hub_reachable():
            msg = (
                f"data set '{self.source}' is not a file or folder, {name} has not been downloaded "
                "before, and the hub cannot be reached from here; give the task the option "
                "source=FILE"
            )
            raise TaskError(msg)
        try:
            return Path(hf_hub_download(self.source, name, repo_type="dataset"))
        except Exception as error:  # of the hub's client, or of its HTTP library
            msg = f"{name} of '{self.source}' cannot be downloaded: {error_summary(error)}"
            raise TaskError(msg) from error

    def _item(self, index: int, row: Mapping[str, Any]) -> Example:
        missing = [column for column in _COLUMNS if column not in row]
        if missing:
            msg = f"'{self.source}' has no column {missing[0]}, which LiveCodeBench has"
            raise TaskError(msg)
        starter = row["starter_code"]
        form = _WITH_STARTER.format(starter=starter) if starter else _WITHOUT_STARTER
        facets = {k: row[k] for k in ("difficulty", "platform") if row.get(k) is not None}
        return Example(
            index=index,
            prompt=_TASK.format(question=row["question_content"]) + form,
            answer=json.dumps([attrs.asdict(test) for test in tests_of(row)]),
            facets=facets,
            chat=self.chat,
        )


def livecodebench(
    source: str = ID, release: int = 1, time_s: float = 6.0, chat: bool = True
) -> LiveCodeBench:
    """Contest problems (2403.07974); executes programs, which needs --execute-code."""
    return LiveCodeBench(source, release, time_s, chat)


def tests_of(row: Mapping[str, Any]) -> list[Test]:
    """All tests of a problem, the public ones first.

    Args:
        row: A row of the data set.

    Raises:
        TaskError: The tests cannot be read, or there are none.
    """
    which = row.get("question_id", "?")
    try:
        found = parse_json(row["public_test_cases"]) + unpack(row["private_test_cases"])
        name = parse_json(row.get("metadata") or "{}").get("func_name")
        tests = [
            Test(one["input"], one["output"], name if one["testtype"] == "functional" else None)
            for one in found
        ]
    except (ValueError, TypeError, KeyError) as error:
        msg = f"the tests of problem {which} cannot be read: {error_summary(error)}"
        raise TaskError(msg) from error
    if not tests:
        msg = f"problem {which} has no tests, so that every program would pass"
        raise TaskError(msg)
    return tests


def unpack(text: str) -> list[dict[str, str]]:
    """Read private tests: JSON, or base64 of zlib of a pickled text of JSON.

    Args:
        text: Content of the column.

    Raises:
        ValueError: It is neither.
    """
    if text.lstrip().startswith("["):
        found: list[dict[str, str]] = parse_json(text)
        return found
    try:
        pickled = zlib.decompress(base64.b64decode(text, validate=True))
        # `genops` parses a pickle without executing it.
        texts = [arg for _, arg, _ in pickletools.genops(pickled) if isinstance(arg, str)]
    except (binascii.Error, zlib.error) as error:
        msg = f"no packed tests ({error})"
        raise ValueError(msg) from error
    if len(texts) != 1:
        msg = f"a pickle of {len(texts)} texts; expected one"
        raise ValueError(msg)
    found = parse_json(texts[0])
    return found
