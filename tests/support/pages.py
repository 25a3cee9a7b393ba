"""Markdown pages as programs: code blocks run as printed, and their output is compared.

The info string of a block states its kind:

    ```python                   runs; a ``text`` block right after it is its output
    ```python continued         the same, with the names of the previous block
    ```python title="NAME"      is saved as NAME first (``test_*`` is saved only)
    ```text signature           is not compared
    ```toml title="NAME"        is saved as NAME; a plan must resolve, a sweep must be valid
    ```sh                       each line runs if it is a command named in `Page._run_line`;
                                ``kvpolicy serve`` runs until the end of the page, or the next one
    ```sh slow                  runs only with ``slow=True``
    ```sh tasks                 runs only if the extra ``tasks`` is installed
    ```python results           runs only if pandas, duckdb and pyarrow are installed
    ```sh tensor-parallel       the same for another extra

``...`` in a ``text`` block matches anything, including lines.
"""

import contextlib
import doctest
import importlib.util
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
from served_command import served_command

from kvpolicy import Plan
from kvpolicy.compat import cache_argument
from kvpolicy.hooks import discovery
from kvpolicy.lab.sweep.sweep_file import load_preset

# As `generate` of this release calls it; pages say how older ones do.
(_CACHE,) = cache_argument(None)

_FENCE = re.compile(r"^```(\w+)?[ ]*(.*?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_ELLIPSIS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
# Extras that a block may require, and the packages to look for.
_EXTRAS = {
    "tasks": ("math_verify",),
    "results": ("pandas", "duckdb", "pyarrow"),
    "tensor-parallel": ("accelerate",),
    "lm-eval": ("lm_eval",),
    "serve": ("fastapi", "openai", "uvicorn"),
    "ray": ("ray", "mmh3"),
}
_NUM_LAYERS = 4  # of the bundled reasoner, which the plans of the pages are for
_SERVED_AT = "http://127.0.0.1:8000"  # what pages write for the address of their server


@attrs.frozen
class Block:
    """One fenced block."""

    language: str
    options: str
    text: str
    line: int

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]+)"', self.options)
        return found[1] if found else None


def blocks_of(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [
        Block(found[1] or "", found[2], found[3], text.count("\n", 0, found.start()) + 1)
        for found in _FENCE.finditer(text)
    ]


class Page:
    """Runs the blocks of a page in a folder."""

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path, self.folder = path, folder
        self._names: dict[str, object] = {}
        self._monkeypatch = monkeypatch
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("COLUMNS", "80")  # the width of help texts
        self._serving = contextlib.ExitStack()
        self._url = _SERVED_AT

    def follow(self, *, slow: bool = False) -> None:
        """Run every block and compare its output with the page."""
        with self._serving:
            self._follow(slow)

    def _follow(self, slow: bool) -> None:
        printed: str | None = None
        for block in blocks_of(self.path):
            if block.language == "text":
                if printed is not None and "signature" not in block.options:
                    self._compare(block, printed)
                printed = None
            else:
                try:
                    printed = self._run(block, slow)
                except Exception as error:
                    error.add_note(f"in the block at {self._place(block)}")
                    raise

    def _place(self, block: Block) -> str:
        return f"{self.path.name}:{block.line}"

    def _compare(self, block: Block, printed: str) -> None:
        if not doctest.OutputChecker().check_output(block.text, printed, _ELLIPSIS):
            pytest.fail(f"{self._place(block)} expects\n{block.text}\nbut the output is\n{printed}")

    def _run(self, block: Block, slow: bool) -> str | None:
        if block.title is not None:
            self._save(block.title, block.text)
        if any(
            importlib.util.find_spec(package) is None
            for extra, packages in _EXTRAS.items()
            if extra in block.options.split()
            for package in packages
        ):
            return None
        if block.language == "python":
            return self._run_python(block)
        if block.language == "toml":
            _check_toml(block)
        if block.language == "sh" and (slow or "slow" not in block.options):
            return "".join(self._run_line(line) for line in _command_lines(block.text))
        return None

    def _save(self, title: str, text: str) -> None:
        file = self.folder / title
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
        # A page may replace a file that it has shown before.
        sys.modules.pop(file.stem, None)

    def _run_python(self, block: Block) -> str | None:
        title = block.title
        if title is not None and title.startswith("test_"):
            return None
        with contextlib.redirect_stdout(io.StringIO()) as out:
            if title is None:
                text = block.text.replace(_SERVED_AT, self._url)
                text = text.replace("past_key_values=", f"{_CACHE}=")
                code = compile(text, self._place(block), "exec")
                if "continued" not in block.options:
                    self._names = {"__name__": "__main__"}
                exec(code, self._names)
            else:
                runpy.run_path(title, run_name="__main__")
        return out.getvalue()

    def _run_line(self, line: str) -> str:
        args = shlex.split(line)
        if args[0] == "export":
            name, _, value = args[1].partition("=")
            self._monkeypatch.setenv(name, value)
            return ""
        if args[:2] == ["kvpolicy", "serve"] and not {"--help", "--write-deployment"} & {*args}:
            return self._serve(args[2:])
        if args[0] == "curl":
            return self._curl(line)
        if args[0] == "kvpolicy":
            return run_command(args[1:])
        if args[0] == "pytest":
            return _run_pytest(args[1:])
        if args[0] == "torchrun":
            return _run_torchrun(args[1:])
        if args[0] in ("mkdir", "cp"):
            return subprocess.run(args, check=True, capture_output=True, text=True).stdout
        if args[:2] == ["pip", "install"] and args[2].startswith("./"):
            self._install(self.folder / args[2])
            return ""
        # CI runs the set-up lines from a fresh clone.
        assert args[0] in ("python3", ".venv/bin/pytest", ".venv/bin/ruff", ".venv/bin/mypy"), line
        return ""

    def _serve(self, options: list[str]) -> str:
        """Start a server on a free port, in place of the one before."""
        self._serving.close()
        served = self._serving.enter_context(served_command(self.folder / "served", *options))
        self._serving.callback(served.end)
        self._url = served.url
        return "\n".join([*served.out, ""]).replace(self._url, _SERVED_AT)

    def _curl(self, line: str) -> str:
        if shutil.which("curl") is None:
            pytest.skip("curl is not installed")
        command = line.replace(_SERVED_AT, self._url)
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, f"{line}: {done.stderr}"
        return done.stdout + "\n"

    def _install(self, package: Path) -> None:
        """Like pip without the network: build a wheel, and put its contents on the path."""
        site = self.folder / "site-packages"
        shutil.rmtree(site, ignore_errors=True)
        with zipfile.ZipFile(build_wheel(package, self.folder / "dist")) as wheel:
            wheel.extractall(site)
        for name in {path.stem for path in site.iterdir()} & sys.modules.keys():
            del sys.modules[name]
        self._monkeypatch.syspath_prepend(str(site))
        # From here on, only installed policies are available, not those of --plugin.
        discovery.forget_files()


def build_wheel(package: Path, folder: Path) -> Path:
    """Build the wheel of a package with the build backend that it names, without the network."""
    project = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["build-system"]["build-backend"] == "hatchling.build"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=package, check=True, capture_output=True)
    (wheel,) = folder.glob(f"*-{project['project']['version']}-*.whl")
    return wheel


def run_command(args: list[str]) -> str:
    """Run ``kvpolicy`` in this process and return its output. It must succeed."""
    from kvpolicy.cli.app import run

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = run(args)
    assert status == 0, f"kvpolicy {shlex.join(args)} exited with {status}: {err.getvalue()}"
    return out.getvalue()


def _run_torchrun(args: list[str]) -> str:
    """Run torchrun over the loopback interface only."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--local-addr", "127.0.0.1", *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _run_pytest(args: list[str]) -> str:
    # Without this project's pytest configuration.
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir=.", *args]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=outer)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _command_lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def _check_toml(block: Block) -> None:
    data = tomllib.loads(block.text)
    if "slots" in data:
        assert block.title is not None, "a sweep block needs a title"
        load_preset(block.title)
    elif "project" not in data:
        Plan.from_dict(data).resolve(_NUM_LAYERS)
