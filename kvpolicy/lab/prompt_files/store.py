"""The answers of a file of prompts, on disk: resumable after any interruption, and then in order.

Beside the output ``OUT`` is a folder ``OUT.run``::

    manifest.json   {"format": 1, "run": ..., "sessions": [...]}
                    run: everything the answers depend on; another run is refused
                    sessions: when, and with which command and versions, the run was worked on
    answers.jsonl   one answer per line with the number of its prompt, in the order in which they
                    ended; it is removed when all are in the output

An answer is on the disk before it counts. The output is written when all prompts are answered, as a
whole, so it is there exactly if it is complete.
"""

import os
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from filelock import FileLock

from kvpolicy.errors import OutputError, ResultsError
from kvpolicy.files import atomic_writer, parse_json, read_json
from kvpolicy.lab.prompt_files.answering import Answer
from kvpolicy.lab.store.jsonl import JsonLinesWriter, as_stored, encode, iter_lines, lock_folder
from kvpolicy.lab.store.manifest import add_session, write_manifest
from kvpolicy.lab.store.store import differences

FORMAT = 1
_NUMBER = "index"  # of the prompt, in the journal only
_AGAIN = "--overwrite to begin again, or another file with --output"
_GIVE = f"give {_AGAIN}"


class AnswerStore:
    """The answers of one run, opened for writing by one process; holds 8 bytes for each.

    Attributes:
        output: The file that will have all answers.
        folder: The folder of what is kept until then.
        num_prompts: Prompts of the run.
        reasons: How many of the answers have ended for which reason.
        num_empty: How many of them show nothing: they have no text, or white space only.
        notes: Messages for the user about the state in which the files were found.
    """

    def __init__(
        self, output: Path, run: dict[str, Any], num_prompts: int, *, overwrite: bool = False
    ) -> None:
        """Open the answers of a run, or begin with none.

        Args:
            output: The file for the answers.
            run: Everything that the answers depend on, as plain data.
            num_prompts: Prompts of the run.
            overwrite: Whether answers of another run, or other content of the output, are replaced;
                those of this run, if it is not complete, are kept.

        Raises:
            OutputError: The output has other content, is in use, or cannot be written. Nothing was
                changed.
            ResultsError: What is kept is damaged.
        """
        run = as_stored(run)
        self.output, self.folder, self.num_prompts = output, run_folder(output), num_prompts
        self.reasons: Counter[str] = Counter()
        self.num_empty = 0
        self.notes: list[str] = []
        self._path = self.folder / "answers.jsonl"
        self._begins = array("q", [-1]) * num_prompts
        with ExitStack() as undo:
            if not overwrite:
                self._check_is_this_run_or_new(run)
            undo.callback(self._lock().release)
            if not overwrite:  # again: another process may have begun a run since the first check
                self._check_is_this_run_or_new(run)
            self._begin(run, overwrite=overwrite)
            self.is_complete = self.output.exists() and not self._path.exists()
            if self.is_complete:
                self._count_output()
            else:
                self._read_journal()
                self._journal = JsonLinesWriter(self._path)
                undo.callback(self._journal.close)
                if self._journal.was_torn:
                    self.notes.append(
                        f"the last line of {self._path} was incomplete (the previous run was "
                        "killed while writing it) and has been removed"
                    )
            self._undo = undo.pop_all()

    def begin_session(self, session: dict[str, Any]) -> None:
        """Add a session to the manifest.

        Args:
            session: When, how and with which versions work on this run begins.
        """
        manifest = read_manifest(self.folder)
        assert manifest is not None, "written when the answers were opened"
        self.notes += add_session(self.folder, manifest, session)

    @property
    def num_answered(self) -> int:
        """Prompts that have their answer."""
        return self.reasons.total()

    def left(self) -> "array[int]":
        """Numbers of the prompts that have no answer, ascending."""
        if self.is_complete:
            return array("q")
        return array("q", (i for i, begin in enumerate(self._begins) if begin < 0))

    def add(self, answers: Iterable[tuple[int, Answer]]) -> None:
        """Store answers. When this returns, they survive the end of this process.

        Args:
            answers: Number and answer of each prompt.

        Raises:
            OutputError: They cannot be written, for example because the disk is full.
        """
        new = {number: answer for number, answer in answers if self._begins[number] < 0}
        records = ({_NUMBER: number, **answer} for number, answer in new.items())
        begins = self._journal.append(*records)
        for (number, answer), begin in zip(new.items(), begins, strict=True):
            self._note(number, begin, answer)

    def publish(self) -> None:
        """Write all answers to the output, in the order of the prompts, and end what is kept.

        Raises:
            OutputError: The output cannot be written; the answers are kept.
        """
        if self.is_complete:
            return
        with self._path.open("rb") as journal, atomic_writer(self.output) as output:
            for begin in self._begins:
                journal.seek(begin)
                answer = parse_json(journal.readline())
                del answer[_NUMBER]
                output.write(encode(answer))
        # If the process ends here, the output is written once more.
        self._journal.close()
        self._path.unlink()
        self.is_complete = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _note(self, number: int, begin: int, answer: Answer) -> None:
        self._begins[number] = begin
        self._count(answer)

    def _count(self, answer: Answer) -> None:
        reason = str(answer.get("finish_reason"))
        self.reasons[reason] += 1
        self.num_empty += reason != "error" and not str(answer.get("text") or "").strip()

    def _lock(self) -> FileLock:
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)  # prompts and answers are private
            return lock_folder(self.folder)
        except OSError as error:
            msg = (
                f"output file {self.output} cannot be written: {error.strerror}; choose another "
                "one with --output."
            )
            raise OutputError(msg) from error

    def _check_is_this_run_or_new(self, run: dict[str, Any]) -> None:
        manifest = read_manifest(self.folder)
        if manifest is None:
            if self.output.exists():
                msg = f"output file {self.output} exists, and is of no run that is known; {_GIVE}."
                raise OutputError(msg)
            if self._path.exists() and self._path.stat().st_size:
                msg = f"{self._path} holds answers, and its manifest.json is missing; {_GIVE}."
                raise OutputError(msg)
        elif found := differences(manifest["run"], run):
            msg = (
                f"output file {self.output} is of another run ({'; '.join(found)}); nothing was "
                f"changed: give the same prompts and options, or {_AGAIN}."
            )
            raise OutputError(msg)

    def _begin(self, run: dict[str, Any], *, overwrite: bool) -> None:
        """Make the run that is kept this one."""
        try:
            manifest = read_manifest(self.folder)
        except ResultsError:
            if not overwrite:
                raise
            manifest = None
        is_same = manifest is not None and manifest["run"] == run
        if is_same and not (overwrite and not self._path.exists()):
            return
        # Without its answers first: those of another run would count as answers of this one.
        self._path.open("wb").close()
        write_manifest(self.folder, run, [], version=FORMAT)

    def _read_journal(self) -> None:
        for begin, record in iter_lines(self._path):
            number = record.pop(_NUMBER, None)
            if type(number) is not int or not 0 <= number < self.num_prompts:
                msg = f"{self._path} is damaged: byte {begin} begins no answer; {_GIVE}."
                raise ResultsError(msg)
            if self._begins[number] < 0:
                self._note(number, begin, record)

    def _count_output(self) -> None:
        try:
            for _, answer in iter_lines(self.output):
                self._count(answer)
        except ResultsError as error:
            msg = f"output file {self.output} was changed: a line is no answer; {_GIVE}."
            raise OutputError(msg) from error
        if self.num_answered != self.num_prompts:
            msg = (
                f"output file {self.output} was changed: it has {self.num_answered} answers to "
                f"{self.num_prompts} prompts; {_GIVE}."
            )
            raise OutputError(msg)


def run_folder(output: Path) -> Path:
    """The folder beside an output."""
    return output.with_name(f"{output.name}.run")


def check_output(output: Path, prompts: str) -> None:
    """Refuse an output that can never be written, before a model is loaded.

    Args:
        output: The file for the answers.
        prompts: The file of the prompts.

    Raises:
        OutputError: It is the file of the prompts, no file, or has no folder.
    """
    problem = None
    try:
        if output.exists() and output.samefile(prompts):
            problem = "is the file of the prompts"
        elif output.exists() and not output.is_file():
            problem = "is no regular file"
        elif not (parent := Path(os.path.realpath(output)).parent).is_dir():
            # Of the file that a symbolic link names: the answers are written there at the end.
            shown = parent if output.is_symlink() else output.parent
            problem = f"cannot be written: there is no folder {shown}"
        elif run_folder(output).exists() and not run_folder(output).is_dir():
            problem = f"cannot be written: {run_folder(output)} is a file"
        elif not run_folder(output).exists():
            run_folder(output).mkdir(mode=0o700, exist_ok=True)
            with suppress(OSError):  # another process has begun in it
                run_folder(output).rmdir()
    except (OSError, ValueError) as error:
        problem = f"cannot be written: {getattr(error, 'strerror', None) or error}"
    if problem is not None:
        msg = f"output file {output} {problem}; choose another one with --output."
        raise OutputError(msg)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a run, as plain data; ``None`` if there is none.

    Raises:
        ResultsError: It is damaged, or of another format.
    """
    path = folder / "manifest.json"
    if not path.is_file():
        return None
    manifest = read_json(path, str(path), error=ResultsError)
    kinds = {"run": dict, "sessions": list}
    is_ours = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    if not is_ours or not all(isinstance(manifest.get(key), kind) for key, kind in kinds.items()):
        msg = f"{path} is damaged, or of another version of kvpolicy; {_GIVE}."
        raise ResultsError(msg)
    return dict(manifest)
