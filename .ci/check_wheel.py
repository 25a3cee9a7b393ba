"""Check a wheel: it holds the sources of its packages, byte for byte, and nothing else; its size.

Run from the repository root. That the sources are right is what the tests check; after this, a
test with the wheel fails only where something reads what is around the installed packages.
"""

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

LEFT_OUT = Path("plugins/kvpolicy_reasoner/train")  # training needs a checkout
MAX_BYTES = 28 << 20  # the weights take up to 24 MiB of it


def sources() -> Iterator[tuple[str, Path]]:
    """Every file that belongs into the wheel: its name there, and the file."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    for package in map(Path, project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]):
        for file in package.rglob("*"):
            is_left_out = "__pycache__" in file.parts or file.is_relative_to(LEFT_OUT)
            if file.is_file() and not is_left_out:
                yield str(file.relative_to(package.parent)), file


def main(path: str) -> None:
    """Exit with a message if the wheel at ``path`` has other contents than the sources."""
    expected = dict(sources())
    with ZipFile(path) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        size = sum(info.compress_size for info in wheel.infolist())
        problems = [
            *(f"does not contain {name}" for name in expected.keys() - names),
            *(f"contains {name}, which is no source file" for name in names - expected.keys()),
            *(
                f"contains another {name} than the sources"
                for name in expected.keys() & names
                if wheel.read(name) != expected[name].read_bytes()
            ),
        ]
    if problems:
        sys.exit("\n".join(f"{path} {problem}" for problem in sorted(problems)))
    if size > MAX_BYTES:
        sys.exit(f"{path} has {size:,} bytes; the limit is {MAX_BYTES:,}")
    sys.stdout.write(f"{len(names)} files, {size:,} bytes\n")


if __name__ == "__main__":
    main(sys.argv[1])
