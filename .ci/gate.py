"""Stages of checks: all run, whatever fails; the end names each failure and runs it alone again.

A stage is a function that runs commands. A command that fails ends its stage; a test that fails
ends nothing. Each command has the time that is left of its stage's limit, which is there to end
what hangs. Stages that use one core run side by side, and what they print appears when they end.
Only the standard library is used, because nothing is installed yet.
"""

import contextlib
import io
import itertools
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO
from xml.etree import ElementTree

KILL_AFTER_S = 30.0  # what pytest has to write its results after it was interrupted
NUM_CORES = os.cpu_count() or 1
RERUN_S = 300.0  # for all failed tests together, one after the other
NO_TESTS = 5  # pytest's exit status


class StageError(Exception):
    """A command of a stage failed; the rest of the stage makes no sense."""


@dataclass(frozen=True)
class Stage:
    """Checks with a name.

    Attributes:
        name: What the summary says.
        check: Runs the commands.
        minutes: After this long, the running command is ended: it hangs, on the slowest machine.
        chain: Stages with the same name of a chain run one after the other, beside the other chains
            that are listed next to them. Those without one run alone.
    """

    name: str
    check: Callable[["Gate"], object]
    minutes: float = 30.0
    chain: str = ""


@dataclass(frozen=True)
class Pytest:
    """How pytest was called, so that one test of it can be run again."""

    command: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]


@dataclass
class Failure:
    """What failed: a test, or a command."""

    stage: Stage
    name: str
    error: str
    call: Pytest | None = None
    passes_alone: bool | None = None

    def verdict(self) -> str:
        """What its second run said; empty for a command."""
        if self.call is None:
            return ""
        if self.passes_alone is None:
            return "was not run again"
        return "passes alone" if self.passes_alone else "fails alone, too"


@dataclass
class _Current(threading.local):
    """The stage of a thread."""

    stage: Stage = field(default_factory=lambda: Stage("start", lambda gate: None))
    end: float = float("inf")
    out: TextIO = field(default_factory=lambda: sys.stdout)


@dataclass
class Gate:
    """Runs stages and keeps what they found.

    Attributes:
        root: Where commands run unless they say otherwise.
        work: A folder for environments, logs and results.
        hangs_after_s: A test that takes longer fails, with the stacks of all threads.
    """

    root: Path
    work: Path
    hangs_after_s: float = 300.0
    failures: list[Failure] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: {"passed": 0, "failed": 0, "skipped": 0})
    _current: _Current = field(default_factory=_Current)
    _lines: list[str] = field(default_factory=list)
    _result_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    # What stages call.

    @property
    def has_one_core(self) -> bool:
        """Whether the stage of this thread runs beside others."""
        return bool(self._current.stage.chain)

    def print(self, text: str) -> None:
        """Print something of a stage, with what its commands print."""
        self._current.out.write(text)
        self._current.out.flush()

    def run(
        self, *command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> str:
        """Run a command and return what it printed.

        Raises:
            StageError: It did not end with status 0.
        """
        words = [str(word) for word in command]
        status, output = self._execute(words, cwd or self.root, env or {})
        if status != 0:
            end = output.strip().splitlines()[-15:]
            raise StageError("\n".join([f"status {status}: {shlex.join(words)}", *end]))
        return output

    def pytest(
        self,
        *command: str | Path,
        tests: Sequence[str] = (),
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        may_skip: bool = True,
    ) -> None:
        """Run tests; those that fail are collected, and the stage goes on.

        Args:
            command: pytest with its options.
            tests: Paths and node ids.
            cwd: Where it runs.
            env: Variables beside those of this process.
            may_skip: Whether a test may be skipped.

        Raises:
            StageError: It ended early, found no test, or skipped one that it may not skip.
        """
        call = Pytest(tuple(str(word) for word in command), cwd or self.root, env or {})
        results = self.work / f"results-{next(self._result_numbers)}.xml"
        found: list[tuple[str, str, str]] = []
        try:
            words = [*self._with_results(call, results), *tests]
            status, output = self._execute(words, call.cwd, call.env)
        finally:  # also when it was ended
            if results.exists():
                found = _outcomes(results, call.cwd)
            with self._lock:
                for name, outcome, error in found:
                    self.counts[outcome] += 1
                    if outcome == "failed":
                        self.failures.append(Failure(self._current.stage, name, error, call))
        if status == NO_TESTS:
            raise StageError(f"no test ran: {shlex.join(call.command)} {shlex.join(tests)}")
        if status != 0 and not any(outcome == "failed" for _, outcome, _ in found):
            end = output.strip().splitlines()[-15:]
            raise StageError("\n".join([f"status {status}: {shlex.join(call.command)}", *end]))
        skipped = [f"{name}: {error}" for name, outcome, error in found if outcome == "skipped"]
        if skipped and not may_skip:
            raise StageError("\n".join(["these may not be skipped here:", *skipped]))

    # What the program calls.

    def run_stages(self, stages: Sequence[Stage]) -> None:
        """Run stages in order, and chains next to each other side by side."""
        for in_chains, group in itertools.groupby(stages, key=lambda stage: bool(stage.chain)):
            if in_chains:
                self._run_chains(group)
            else:
                for stage in group:
                    self.run_stage(stage)

    def _run_chains(self, stages: Iterable[Stage]) -> None:
        chains: dict[str, list[Stage]] = {}
        for stage in stages:
            chains.setdefault(stage.chain, []).append(stage)
        waiting = deque(chains.values())

        def run_chains() -> None:
            while True:
                try:
                    chain = waiting.popleft()
                except IndexError:
                    return
                for stage in chain:
                    self._run_stage_quietly(stage)

        # One more than cores, because chains wait, too: for packages, for nodes of a cluster.
        # Daemons: a signal ends this process although they wait for theirs.
        threads = [threading.Thread(target=run_chains, daemon=True) for _ in range(NUM_CORES + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _run_stage_quietly(self, stage: Stage) -> None:
        self._current.out = io.StringIO()
        with self._lock:
            sys.stdout.write(f"\n== {stage.name} begins; what it prints follows when it ends\n")
            sys.stdout.flush()
        self.run_stage(stage)
        with self._lock:
            sys.stdout.write(self._current.out.getvalue())
            sys.stdout.flush()

    def run_stage(self, stage: Stage) -> None:
        """Run one stage; its failures are kept for the summary."""
        begun = time.monotonic()
        self._current.stage, self._current.end = stage, begun + stage.minutes * 60
        self.print(f"\n== {stage.name}\n")
        try:
            stage.check(self)
        except StageError as error:
            first, *rest = str(error).splitlines()
            self.failures.append(Failure(stage, first, "\n".join(rest)))
        except Exception:  # a mistake in a stage is a failure of that stage only
            self.failures.append(Failure(stage, "the stage itself", traceback.format_exc()))
        num = sum(failure.stage is stage for failure in self.failures)
        state = "ok" if num == 0 else f"{num} failed"
        self._lines.append(f"{time.monotonic() - begun:6.0f} s  {state:>10}  {stage.name}")

    def rerun_failures(self) -> None:
        """Run each failed test alone, as long as the time for that lasts."""
        end = time.monotonic() + RERUN_S
        for failure in self.failures:
            if failure.call is None or time.monotonic() >= end:
                continue
            self.print(f"\n== alone: {failure.name}\n")
            self._current.end = end
            call = failure.call
            # The last -n and -m count: one process, whatever the test is marked with.
            alone = [*call.command, "-n", "0", "-m", "", failure.name]
            with contextlib.suppress(StageError):
                failure.passes_alone = self._execute(alone, call.cwd, call.env)[0] == 0

    def summary(self) -> str:
        """The time of each stage, each failure, and how many tests ran."""
        lines = ["", "== Summary", *self._lines, ""]
        for number, failure in enumerate(self.failures, 1):
            lines.append(f"{number}. {failure.stage.name}: {failure.name}")
            lines += [f"     {line}" for line in failure.error.splitlines()]
            if failure.verdict():
                lines.append(f"     ({failure.verdict()})")
        counts = ", ".join(f"{num} {outcome}" for outcome, num in self.counts.items())
        return "\n".join([*lines, f"Tests: {counts}"])

    @property
    def has_failed(self) -> bool:
        return bool(self.failures)

    @contextlib.contextmanager
    def ending_what_runs(self) -> Iterator[None]:
        """End the running command with this process, also when that is ended by a signal."""

        def on_signal(number: int, frame: object) -> None:
            raise SystemExit(128 + number)

        signal.signal(signal.SIGTERM, on_signal)
        try:
            yield
        finally:
            for process in list(self._running):
                _kill_group(process)

    def _with_results(self, call: Pytest, path: Path) -> list[str]:
        hanging = ("-p", "timeout", f"--timeout={self.hangs_after_s:.0f}")
        return [*call.command, f"--junitxml={path}", *hanging]

    def _execute(self, words: list[str], cwd: Path, env: Mapping[str, str]) -> tuple[int, str]:
        """Run a command, print what it prints, and return its status and output.

        Raises:
            StageError: It did not end in time, or cannot be started.
        """
        self.print(f"$ {shlex.join(words)}\n")
        try:
            process = subprocess.Popen(
                words,
                cwd=cwd,
                env={**os.environ, **env},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that it can be ended with all that it started
            )
        except OSError as error:
            raise StageError(f"{words[0]}: {error.strerror}") from None
        self._running.add(process)
        output: deque[str] = deque(maxlen=2_000)
        copied = (process, output, self._current.out)
        reader = threading.Thread(target=_copy_lines, args=copied, daemon=True)
        reader.start()
        try:
            status = process.wait(timeout=max(0.0, self._current.end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # pytest writes its results
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=KILL_AFTER_S)
            _kill_group(process)
            end = "\n".join(list(output)[-15:])
            raise StageError(f"did not end in time: {shlex.join(words)}\n{end}") from None
        finally:
            _kill_group(process)  # what it left running
            reader.join(timeout=5.0)
            self._running.discard(process)
        return status, "".join(output)


def _copy_lines(process: subprocess.Popen[str], output: deque[str], out: TextIO) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            output.append(line)
            out.write(line)
            out.flush()


def _kill_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outcomes(results: Path, cwd: Path) -> list[tuple[str, str, str]]:
    """Each test of a JUnit file: node id, outcome, and the first line of its error or reason."""
    found = []
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        reports = {report.tag: report for report in case}
        broken = reports.get("failure", reports.get("error"))
        skipped = reports.get("skipped")
        if broken is not None:
            found.append((_node_id(case, cwd), "failed", _first_error(broken)))
        elif skipped is not None:
            found.append((_node_id(case, cwd), "skipped", skipped.get("message", "")))
        else:
            found.append((_node_id(case, cwd), "passed", ""))
    return found


def _node_id(case: ElementTree.Element, cwd: Path) -> str:
    """The id that pytest takes: file, classes and name."""
    # A module that cannot be imported has its name where others have that of a test.
    dotted, name = case.get("classname", ""), case.get("name", "")
    parts = (dotted or name).split(".")
    for size in range(len(parts), 0, -1):
        file = "/".join(parts[:size]) + ".py"
        if (cwd / file).exists():
            return "::".join([file, *parts[size:], *([name] if dotted else [])])
    return f"{dotted}::{name}"


def _first_error(report: ElementTree.Element) -> str:
    lines = (report.text or "").splitlines()
    errors = [line for line in lines if line.startswith("E ")]
    first = errors[0].removeprefix("E").strip() if errors else report.get("message", "")
    return first.strip().split("\n")[0]
