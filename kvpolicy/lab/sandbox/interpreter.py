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
libraries = {path for path in mapped if ".so" in os.path.basename(path)}
print(json.dumps([[path for path in sys.path if os.path.isdir(path)], sorted(libraries)]))
"""


@attrs.frozen
class Interpreter:
    """The interpreter of this process without its virtual environment.

    Attributes:
        executable: Its file, without symbolic links.
        files: Files by which shared libraries are found, and those beside the standard library.
        folders: The standard library and folders of shared libraries, with all that is below them.
        hidden: Folders in `folders` that hold other installed packages.
        links: Symbolic links at the root, with their targets, which paths of libraries contain.
        packages: Folders of `PACKAGES`, by name.
        beside: Folders of shared libraries that wheels of `PACKAGES` put beside them.
    """

    executable: str
    files: list[str]
    folders: list[str]
    hidden: list[str]
    links: dict[str, str]
    packages: dict[str, str]
    beside: list[str]

    @property
    def readable(self) -> list[str]:
        """All files and folders, packages last, because they may lie in hidden folders."""
        folders = [*self.folders, *self.packages.values(), *self.beside]
        return [self.executable, *self.files, *folders]


@cache
def describe_interpreter() -> Interpreter:
    """Find out what the interpreter of this process reads; runs it once.

    Raises:
        TaskError: It cannot be run.
    """
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    modules, libraries = _probe(executable)
    # A folder of libraries that holds the standard library, too, holds more than libraries.
    holding = {parent for folder in modules for parent in folder.parents}
    beside = {library.parent for library in libraries} & holding
    roots = [Path("/", name) for name in ("lib", "lib32", "lib64", "libx32")]
    files = [
        *(file for folder in sorted(beside) for file in _named(folder, libraries)),
        *(file for root in roots for file in sorted(root.resolve().glob("ld-*.so*"))),
        *(file for file in [Path("/etc/ld.so.cache")] if file.exists()),
    ]
    folders = _outermost({*modules, *({one.parent for one in libraries} - beside)})
    hidden = [one / name for one in folders for name in ("site-packages", "dist-packages")]
    packages = _packages()
    wheels = [folder.with_name(f"{folder.name}.libs") for folder in packages.values()]
    return Interpreter(
        executable=str(executable),
        files=[str(file) for file in files if file.is_file()],
        folders=[str(folder) for folder in folders],
        hidden=[str(folder) for folder in hidden if folder.is_dir()],
        links={str(root): str(root.readlink()) for root in roots if root.is_symlink()},
        packages={name: str(folder) for name, folder in packages.items()},
        beside=[str(folder) for folder in wheels if folder.is_dir()],
    )


def _probe(executable: Path) -> tuple[set[Path], set[Path]]:
    """Folders of modules, and the shared libraries outside of them."""
    command = [str(executable), "-I", "-S", "-B", "-c", _PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, check=True, timeout=60)
        found = json.loads(probe.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        msg = f"the interpreter {executable} cannot be run by itself ({error})"
        raise TaskError(msg) from error
    modules, libraries = ({Path(path).resolve() for path in paths} for paths in found)
    return modules, {one for one in libraries if modules.isdisjoint(one.parents)}


def _named(folder: Path, libraries: set[Path]) -> list[Path]:
    """Libraries in a folder, under all names by which they may be looked up."""
    return [file for file in sorted(folder.glob("*.so*")) if file.resolve() in libraries]


def _packages() -> dict[str, Path]:
    found = {name: find_spec(name) for name in PACKAGES}
    return {
        name: Path(spec.origin).resolve().parent
        for name, spec in found.items()
        if spec is not None and spec.origin is not None
    }


def _outermost(folders: set[Path]) -> list[Path]:
    """Folders that do not lie in another one."""
    return sorted(one for one in folders if folders.isdisjoint(one.parents))
