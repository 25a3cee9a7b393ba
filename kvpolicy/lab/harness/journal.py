"""Answers kept as they come, so that an evaluation that was ended goes on where it stopped.

The harness makes its record from all answers at once, at the end. Until then they are in a file
of JSON lines: the first says what was run, each of the others holds an answer under the digest of
everything it depends on. A task whose file is mended meanwhile is asked anew only where its
prompts are other ones.
"""

import hashlib
from pathlib import Path
from typing import Any

import attrs

from kvpolicy.errors import OutputError
from kvpolicy.lab.jsonl import JsonLines
from kvpolicy.results import Result

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
    """Answers by their keys; in a file, or in memory only.

    Attributes:
        path: The file.
        num_found: Answers that were in the file when it was opened.
        was_torn: Whether its last line was incomplete, and has been cut off.
    """

    def __init__(self, path: Path | None = None, run: dict[str, Any] | None = None) -> None:
        """Open the file, or make it.

        Args:
            path: The file; nothing outlives the process without one.
            run: What all answers depend on, as plain data.

        Raises:
            OutputError: The file holds answers of another run or something else, or cannot be
                written. It has not been changed then.
        """
        self.path = path
        self._answers: dict[str, Answer] = {}
        self._file = None if path is None else JsonLines(path)
        self.was_torn = self._file is not None and self._file.was_torn
        if self._file is not None:
            self._begin(self._file, {"format": FORMAT, "run": run or {}})
        self.num_found = len(self._answers)

    def _begin(self, file: JsonLines, head: dict[str, Any]) -> None:
        found = file.records[:1]
        if not found:
            file.append(head)
        elif found[0] != head:
            file.close()
            msg = (
                f"{file.path} holds answers of another plan, model or version of kvpolicy; "
                "choose another --output, or delete that file."
            )
            raise OutputError(msg)
        for record in file.records[1:]:
            self._answers[record["key"]] = Answer(
                Result(**record["result"] | {"tokens": tuple(record["result"]["tokens"])}),
                tuple((likelihood, is_greedy) for likelihood, is_greedy in record["scores"]),
            )
        file.records.clear()

    def recall(self, key: str) -> Answer | None:
        """The answer that was kept under a key."""
        return self._answers.get(key)

    def keep(self, key: str, answer: Answer) -> None:
        """Keep an answer; when this returns it survives the end of this process.

        Raises:
            OutputError: The file cannot be written.
        """
        if self._file is not None:
            result = answer.result.to_dict()
            self._file.append({"key": key, "result": result, "scores": list(answer.scores)})

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def remove(self) -> None:
        """Take the file away: what it held is in the record now."""
        self.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def key_of(*what: object) -> str:
    """Digest of all that an answer depends on besides its run, 24 hexadecimal digits."""
    return hashlib.blake2b(repr(what).encode(), digest_size=12).hexdigest()
