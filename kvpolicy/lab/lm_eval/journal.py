"""Answers kept as they come, so that an evaluation that was ended goes on where it stopped.

The harness makes its record from all answers at once, at the end. Until then they are in a file
of JSON lines: the first says what was run, each of the others holds an answer under the digest of
everything else it depends on. A task whose file is mended meanwhile is asked anew only where its
prompts are other ones.
"""

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.engine.results import Result
from kvpolicy.errors import OutputError
from kvpolicy.lab.store.jsonl import JsonLines, lock_file

FORMAT = 1


@attrs.frozen
class Answer:
    """What is kept of one sequence.

    Attributes:
        result: How it ended.
        scores: Where likelihoods were asked: ``(log-likelihood, is_greedy)`` of each
            continuation that the sequence scored.
    """

    result: Result
    scores: tuple[tuple[float, bool], ...] = ()


class Journal:
    """Answers by their keys, in a file; without a file it keeps none.

    Attributes:
        path: The file.
        num_found: Answers that were in the file when it was opened.
        num_kept: Answers that have come since.
        was_torn: Whether its last line was incomplete, and has been cut off.
    """

    def __init__(self, path: Path | None = None, run: dict[str, Any] | None = None) -> None:
        """Open the file, or make it.

        Args:
            path: The file; nothing outlives the process without one.
            run: What all answers depend on, as plain data.

        Raises:
            OutputError: The file holds answers of another run or something else, is in use, or
                cannot be written. It has not been changed then.
        """
        self.path = path
        self.num_kept = 0
        self.was_torn = False
        self._head = {"format": FORMAT, "run": run or {}}
        self._answers: dict[str, Answer] = {}
        self._file: JsonLines | None = None
        if path is not None:
            self._open(path)
        self.num_found = len(self._answers)

    def _open(self, path: Path) -> None:
        self._check(path)
        with ExitStack() as undo:
            try:
                self._lock = lock_file(path, name=str(path))
            except OSError as error:
                msg = f"{path} cannot be written: {error.strerror}; choose another --output."
                raise OutputError(msg) from error
            undo.callback(self._lock.release)
            self._check(path)  # once more: somebody else may have begun in the meantime
            self._file = JsonLines(path)
            undo.pop_all()
        self.was_torn = self._file.was_torn
        self._is_new = not self._file.records
        for record in self._file.records[1:]:
            self._answers[record["key"]] = _answer_in(record)
        self._file.records.clear()

    def _check(self, path: Path) -> None:
        """Before anything is touched: whether the file is empty, or one of this run."""
        try:
            with path.open("rb") as file:
                first = file.readline()
        except FileNotFoundError:
            return
        except OSError as error:
            msg = f"{path} cannot be read: {error.strerror}; choose another --output."
            raise OutputError(msg) from error
        try:
            is_ours = not first or json.loads(first) == self._head
        except ValueError:
            is_ours = False
        if not is_ours:
            msg = (
                f"{path} holds something else than answers of this plan, model and version of "
                "kvpolicy; choose another --output, or delete that file."
            )
            raise OutputError(msg)

    def recall(self, key: str) -> Answer | None:
        """The answer that was kept under a key."""
        return self._answers.get(key)

    def keep(self, key: str, answer: Answer) -> None:
        """Keep an answer; when this returns it survives the end of this process.

        Raises:
            OutputError: The file cannot be written.
        """
        self.num_kept += 1
        if self._file is None:
            return
        if self._is_new:
            self._file.append(self._head)
            self._is_new = False
        result = answer.result.to_dict()
        self._file.append({"key": key, "result": result, "scores": list(answer.scores)})

    def close(self) -> None:
        """Let go of the file; one without answers is deleted."""
        if self._file is None or self.path is None:
            return
        self._file.close()
        if self._is_new:
            self.path.unlink(missing_ok=True)
        self._lock.release()
        self._file = None


def key_of(*what: object) -> str:
    """Digest of all that an answer depends on besides its run, 24 hexadecimal digits."""
    return hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest()


def _answer_in(record: dict[str, Any]) -> Answer:
    result = record["result"]
    return Answer(
        Result(**result | {"tokens": tuple(result["tokens"])}),
        tuple((likelihood, is_greedy) for likelihood, is_greedy in record["scores"]),
    )
