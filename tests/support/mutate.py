"""Plants drawn defects one at a time, and reports those that no test notices.

    python tests/support/mutate.py -n 60 --seed 1 --package engine=3 serve --json mutants.json

A defect is a mutation (`mutations.py`) of a line of ``kvpolicy/``. It is planted in a copy of the
tree. The tests of the matching folder run first (``tests/engine/reuse`` for
``kvpolicy/engine/reuse/x.py``; those that import the module before the others), then those of the
folders above, then what else imports it, up to the first test that fails: it has noticed the
defect, if it passes without it. A test that takes longer than ``--seconds`` alone, hangs: it has,
too. Where that time, counted in seconds of processors so that other work on the machine does not
matter, passes without a failure, the defect is "not noticed".

Importing torch and what else is installed takes longer than most tests. So each defect has
processes that are forked from one that has imported these, and nothing of the tree.

Why no library: mutmut (3.8) wraps every function in one that chooses a version of it, whose
arguments pluggy cannot read, and runs all tests once before the first mutant; cosmic-ray (8.7)
starts Python anew for each mutant, with the same tests for every file, on the checkout itself.
"""

import argparse
import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import attrs
from mutations import Mutation, mutations_of

ROOT = Path(__file__).parents[2]
_PACKAGE = "kvpolicy"
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
_OPTIONS = (
    *("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb", "no"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # of plugins that were imported before
)
_WALL_FACTOR = 8  # wall seconds for a second of a processor, before a test counts as hanging


@attrs.frozen
class Outcome:
    """What became of a mutation.

    Attributes:
        verdict: ``"waiting"``, ``"killed"``, ``"survived"`` all, or ``"not noticed"`` in time.
        by: The test that has noticed it.
        seconds: Seconds of processors that its tests took.
    """

    verdict: str
    by: str = ""
    seconds: float = 0.0


# Drawing


def drawn(
    num: int, seed: int, packages: dict[str, float], without: Sequence[str] = ()
) -> list[Mutation]:
    """Mutations of distinct lines: a package by its weight, then one of its lines, then one there.

    Args:
        num: How many.
        seed: Of the random numbers.
        packages: Weights of folders of the package, the files of ``""`` are those in none.
        without: Patterns of paths that are left out.
    """
    rng = random.Random(seed)
    lines = {name: _lines(name, without) for name in packages}
    found: list[Mutation] = []
    while len(found) < num and any(lines.values()):
        names = [name for name in lines if lines[name]]
        (name,) = rng.choices(names, [packages[one] for one in names])
        line = lines[name].pop(rng.randrange(len(lines[name])))
        found.append(rng.choice(line))
    return found


def _lines(package: str, without: Sequence[str]) -> list[list[Mutation]]:
    """The mutations of a package, by line."""
    folder = ROOT / _PACKAGE / package
    found: dict[tuple[str, int], list[Mutation]] = {}
    for path in sorted(folder.rglob("*.py") if package else folder.glob("*.py")):
        file = PurePosixPath(path.relative_to(ROOT))
        if not any(file.match(pattern) for pattern in without):
            for one in mutations_of(file, path.read_text()):
                found.setdefault((one.file, one.line), []).append(one)
    return list(found.values())


# Tests


def stages(tree: Path, file: str) -> list[list[str]]:
    """Files of tests for a file of the package, the likeliest first."""
    path = PurePosixPath(file)
    module = ".".join(path.with_suffix("").parts)
    tests = {one: one.read_text() for one in sorted((tree / "tests").rglob("test_*.py"))}
    own = PurePosixPath("tests", *path.parent.parts[1:])
    folders = [own, *(one for one in own.parents if len(one.parts) > 1)]
    is_named = re.compile(rf"\b{re.escape(module)}\b")

    def inside(folder: PurePosixPath) -> list[Path]:
        if len(folder.parts) == 1:  # modules that are in no folder
            return [one for one in tests if one.parent == tree / folder]
        return [one for one in tests if (tree / folder) in one.parents]

    def is_importing(one: Path) -> bool:
        return is_named.search(tests[one]) is not None

    ordered: list[list[Path]] = []
    for folder in folders or [PurePosixPath("tests")]:
        near = inside(folder)
        named = [one for one in near if path.stem.removesuffix("s") in one.stem]
        ordered += [named, [one for one in near if is_importing(one)], near]
    ordered.append([one for one in tests if is_importing(one)])
    seen: set[Path] = set()
    found = []
    for group in ordered:
        found.append([str(one.relative_to(tree)) for one in group if one not in seen])
        seen.update(group)
    return [group for group in found if group]


# A process that is forked for each defect


class _Watched:
    """A plugin for pytest: tells which test runs, and ends the session when its time is up."""

    def __init__(self, pipe: int, left_s: float) -> None:
        self._pipe, self._left_s = pipe, left_s

    def _tell(self, **what: Any) -> None:
        os.write(self._pipe, (json.dumps(what) + "\n").encode())

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._tell(begins=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._tell(failed=report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._tell(failed=report.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        if _used_s() > self._left_s:
            self._tell(late=nodeid)
            os._exit(0)


def _used_s() -> float:
    """Seconds of processors of this process and those that it has waited for."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(one.ru_utime + one.ru_stime for one in map(resource.getrusage, kinds))


def _tests_in_child(tree: Path, tests: Sequence[str], left_s: float, pipe: int, log: Path) -> None:
    """Run tests in this process, which is a fork, and end it."""
    os.setsid()
    os.chdir(tree)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(output, number)
    import pytest

    temporary = f"--basetemp={tree.parent / 'tmp'}"
    status = pytest.main([*_OPTIONS, temporary, *tests], plugins=[_Watched(pipe, left_s)])
    os.write(pipe, (json.dumps({"status": int(status)}) + "\n").encode())
    os._exit(0)


def _run_tests(tree: Path, tests: Sequence[str], left_s: float, limit_s: float) -> Outcome:
    """Run tests in a fork of this process.

    Args:
        tree: The copy of the tree.
        tests: Files or ids.
        left_s: Seconds of processors that they may take.
        limit_s: Those after which a single test hangs.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            _tests_in_child(tree, tests, left_s, theirs, tree.parent / "log.txt")
        finally:
            os._exit(3)  # for example of a SystemExit of pytest
    os.close(theirs)
    hanging: list[str] = []
    news: dict[str, Any] = {}
    began = [time.monotonic(), 0.0]  # of the test under way: wall, processor

    def watch() -> None:
        while not done.wait(1):
            wall_s, used_s = time.monotonic() - began[0], _of_child_s(child) - began[1]
            if wall_s > limit_s * _WALL_FACTOR or used_s > limit_s:
                hanging.append(news.get("begins", "before the first test"))
                os.killpg(child, signal.SIGKILL)
                return

    done = threading.Event()
    watching = threading.Thread(target=watch)
    watching.start()
    with os.fdopen(ours) as lines:
        for line in lines:
            news |= json.loads(line)
            began[:] = time.monotonic(), _of_child_s(child)
    done.set()
    watching.join()
    _, _, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if "failed" in news:
        return Outcome("killed", news["failed"], seconds)
    if hanging:
        return Outcome("killed", f"{hanging[0]} (hangs)", seconds)
    if "late" in news:
        return Outcome("not noticed", "", seconds)
    status = news.get("status")
    if status in (0, 5):  # passed, or nothing to run
        return Outcome("survived", "", seconds)
    return Outcome("killed", f"{news.get('begins', tests[0])} (ended the process)", seconds)


def _of_child_s(child: int) -> float:
    try:
        fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


class Planter:
    """Plants mutations in a copy of the tree, and runs tests in forks of this process."""

    def __init__(self, tree: Path, seconds: float) -> None:
        self._tree, self._seconds = tree, seconds
        self._passes: dict[str, bool] = {}  # without a defect
        self._num_written = 0

    def outcome(self, mutation: Mutation) -> Outcome:
        """Run tests for a mutation, up to the first that fails for it alone."""
        path = self._tree / mutation.file
        source = path.read_text()
        mutated, used_s, leave_out = mutation.applied(source), 0.0, list[str]()
        for tests in stages(self._tree, mutation.file):
            while True:
                self._write(path, mutated)
                left_s = self._seconds - used_s
                chosen = [*tests, *(f"--deselect={one}" for one in leave_out)]
                found = _run_tests(self._tree, chosen, left_s, self._seconds)
                self._write(path, source)
                used_s += found.seconds
                if found.verdict != "killed" or self._is_sound(found.by):
                    break
                leave_out.append(found.by.partition(" (")[0])
            if found.verdict == "killed":
                return attrs.evolve(found, seconds=used_s)
            if used_s >= self._seconds or found.verdict == "not noticed":
                return Outcome("not noticed", "", used_s)
        return Outcome("survived", "", used_s)

    def _is_sound(self, test: str) -> bool:
        """Whether a test passes without a defect."""
        test = test.partition(" (")[0]
        if "::" not in test:
            return True
        if test not in self._passes:
            found = _run_tests(self._tree, [test], self._seconds, self._seconds)
            self._passes[test] = found.verdict != "killed"
        return self._passes[test]

    def _write(self, path: Path, source: str) -> None:
        path.write_text(source)
        self._num_written += 1  # another time than before: what was compiled is not used again
        stamp = time.time() + 2 * self._num_written
        os.utime(path, (stamp, stamp))


# What is imported once


def _libraries(tree: Path) -> list[str]:
    """Modules that the collection of tests imports, but for those of the tree, in order."""
    program = (
        "import sys, pytest\n"
        "pytest.main(['--collect-only', '-qq', '-n', '0', '-p', 'no:cacheprovider', 'tests'])\n"
        f"own = {str(tree)!r}\n"
        "print('@'.join(['', *(name for name, one in list(sys.modules.items())\n"
        "    if (path := getattr(one, '__file__', None)) and not path.startswith(own))]))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tree, capture_output=True, text=True, check=True
    )
    return found.stdout.rpartition("\n@")[2].strip().split("@")


def _import_libraries(names: Sequence[str]) -> None:
    for name in names:
        if name.partition(".")[0] not in ("pytest", "_pytest", "xdist", "__main__"):
            try:
                importlib.import_module(name)
            except BaseException:  # of a module that is made in another way
                sys.modules.pop(name, None)
    importlib.import_module("torch").set_num_threads(1)


def _serve(tree: Path, seconds: float) -> None:
    """Read mutations from the standard input and answer each with its outcome."""
    _import_libraries(_libraries(tree))
    planter = Planter(tree, seconds)
    for line in sys.stdin:
        found = planter.outcome(Mutation(**json.loads(line)))
        print(json.dumps(attrs.asdict(found)), flush=True)  # noqa: T201


# The command


def _copy(folder: Path) -> Path:
    """A copy of the tree: what git tracks and what is new."""
    tree = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, tree / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            shutil.copymode(source, target)
    return tree


def _worker(seconds: float) -> "Iterator[Any]":
    """A process with a copy of its own: send it a mutation for an outcome."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = _copy(Path(folder))
        paths = [tree, tree / "baselines", tree / "plugins"]
        environment = {
            **os.environ,
            **_ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        command = [sys.executable, __file__, "--serve", str(tree), "--seconds", str(seconds)]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            answer: Outcome | None = None
            while True:
                mutation = yield answer
                if mutation is None:
                    break
                process.stdin.write(json.dumps(attrs.asdict(mutation)) + "\n")
                process.stdin.flush()
                answer = Outcome(**json.loads(process.stdout.readline()))
            process.stdin.close()


def _run_all(found: dict[Mutation, Outcome], options: argparse.Namespace) -> None:
    """Find the outcomes of mutations that have none yet, and note them as they are known."""
    waiting = [one for one, outcome in found.items() if outcome.verdict == "waiting"]
    lock = threading.Lock()

    def work() -> None:
        worker = _worker(options.seconds)
        next(worker)
        while True:
            with lock:
                mutation = waiting.pop(0) if waiting else None
            if mutation is None:
                worker.close()
                return
            outcome = worker.send(mutation)
            with lock:
                found[mutation] = outcome
                verdict = outcome.verdict.upper() if outcome.verdict != "killed" else "killed"
                by = f"  by {outcome.by}" if outcome.by else ""
                print(  # noqa: T201
                    f"{len(found) - len(waiting)}/{len(found)} {verdict} {outcome.seconds:.0f} s  "
                    f"{mutation}{by}",
                    flush=True,
                )
                if options.json:
                    _save(options.json, found)

    threads = [threading.Thread(target=work) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _save(file: Path, found: dict[Mutation, Outcome]) -> None:
    rows = [attrs.asdict(one) | attrs.asdict(outcome) for one, outcome in found.items()]
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rows, indent=1) + "\n")
    unfinished.replace(file)


def _load(file: Path) -> dict[Mutation, Outcome]:
    fields = [one.name for one in attrs.fields(Mutation)]
    found = {}
    for row in json.loads(file.read_text()):
        mutation = Mutation(**{name: row.pop(name) for name in fields})
        found[mutation] = Outcome(**row)
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("-n", type=int, default=60, help="how many defects")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--package", nargs="*", help="folders of kvpolicy/, NAME or NAME=WEIGHT")
    parser.add_argument("--without", nargs="*", default=[], help="patterns of files to leave out")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=90, help="of processors, for each defect")
    parser.add_argument("--json", type=Path, help="what is drawn, and outcomes; goes on with it")
    parser.add_argument("--again", action="store_true", help="run those not killed again")
    parser.add_argument("--list", action="store_true", help="list what is drawn, and plant nothing")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        _serve(options.serve, options.seconds)
        return
    found = _load(options.json) if options.json and options.json.exists() else {}
    mutations = list(found)  # drawn before: those of a tree that has changed would be others
    if not mutations:
        names = options.package or [
            *(one.parent.name for one in sorted((ROOT / _PACKAGE).glob("*/__init__.py"))),
            "",
        ]
        parted = (one.partition("=") for one in names)
        packages = {name: float(weight or 1) for name, _, weight in parted}
        mutations = drawn(options.n, options.seed, packages, options.without)
    if options.list:
        print(*mutations, sep="\n")  # noqa: T201
        return
    for one in mutations:
        verdict = found.setdefault(one, Outcome("waiting")).verdict
        if options.again and verdict != "killed":
            found[one] = Outcome("waiting")
    _run_all(found, options)
    left = [(one, found[one]) for one in mutations if found[one].verdict != "killed"]
    print(f"\n{len(left)} of {len(mutations)} were not noticed")  # noqa: T201
    for mutation, outcome in left:
        how = f"within {outcome.seconds:.0f} s" if outcome.verdict == "not noticed" else ""
        print(f"  {outcome.verdict} {how}  {mutation}")  # noqa: T201


if __name__ == "__main__":
    main()
