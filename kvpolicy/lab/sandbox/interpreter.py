"""What the Python interpreter reads: the only files that a confined program can see."""

import json
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import attrs

from kvpolicy.errors import TaskError

# Packages besides the standard library that programs may import, if they are installed here.
PACKAGES = ("numpy",)

# Run by the interpreter: imports its extension modules, and prints where modules lie and which
# shared libraries are mapped. A module whose library is missing cannot be imported by programs.
_PROBE = """
import glob, json, os, sys
for file in sorted(glob.glob(os.path.join(sys.path[-1], "*.so"))):
    name = os.path.basename(file).partition(".")[0]
    if not name.startswith(("_test", "_xx", "xx", "_ctypes_test")):
        try:
            __import__(name)
        except ImportError:
            pass
with open("/proc/self/maps") as maps:
    mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
libraries = {os.path.dirname(path) for path in mapped if ".so" in os.path.basename(path)}
print(json.dumps([[path for path in sys.path if os.path.isdir(path)], sorted(libraries)]))
"""


@attrs.frozen
class Interpreter:
    """The interpreter of this process without its virtual environment.

    Attributes:
        executable: Its file, without symbolic links.
        folders: Its standard library, the shared libraries that it maps, and `PACKAGES`, each
            with all that is below it.
        loader: Files outside of them that the dynamic loader is found by.
        links: Symbolic links at the root, with their targets, which paths of libraries contain.
        packages: Folders of `PACKAGES` by name.
    """

    executable: str
    folders: list[str]
    loader: list[str]
    links: dict[str, str]
    packages: dict[str, str]

    @property
    def readable(self) -> list[str]:
        """All files and folders."""
        return [self.executable, *self.folders, *self.loader]


@cache
def describe_interpreter() -> Interpreter:
    """Find out what the interpreter of this process reads; runs it once.

    Raises:
        TaskError: It cannot be run.
    """
    executable = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    command = [executable, "-I", "-S", "-B", "-c", _PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, check=True, timeout=60)
        modules, libraries = json.loads(probe.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        msg = f"the interpreter {executable} cannot be run by itself ({error})"
        raise TaskError(msg) from error
    roots = [Path("/", name) for name in ("lib", "lib32", "lib64", "libx32")]
    loaders = [file for root in roots for file in root.resolve().glob("ld-*.so*")]
    packages = _packages()
    return Interpreter(
        executable=executable,
        folders=_outermost([*modules, *libraries, *_folders_of(packages)]),
        loader=[*map(str, loaders), *(f for f in ["/etc/ld.so.cache"] if Path(f).exists())],
        links={str(root): str(root.readlink()) for root in roots if root.is_symlink()},
        packages=packages,
    )


def _packages() -> dict[str, str]:
    found = {name: find_spec(name) for name in PACKAGES}
    return {
        name: str(Path(spec.origin).resolve().parent)
        for name, spec in found.items()
        if spec is not None and spec.origin is not None
    }


def _folders_of(packages: dict[str, str]) -> list[str]:
    """Folders of packages, and of the shared libraries that their wheels put beside them."""
    beside = [f"{folder}.libs" for folder in packages.values()]
    return [*packages.values(), *(folder for folder in beside if Path(folder).is_dir())]


def _outermost(folders: list[str]) -> list[str]:
    """Folders that do not lie in another one, without symbolic links."""
    resolved = {Path(folder).resolve() for folder in folders}
    return sorted(str(one) for one in resolved if resolved.isdisjoint(one.parents))
