"""Take the bundled reasoners out of an installed wheel: their package and their entry points."""

import shutil
import sys
from importlib.metadata import distribution
from pathlib import Path

PACKAGE = "kvpolicy_reasoner"


def main() -> None:
    """Change the installation of the Python that runs this."""
    installed = distribution("kvpolicy")
    folder = Path(str(installed.locate_file(PACKAGE)))
    if not folder.is_dir():
        sys.exit(f"{folder} is missing; is kvpolicy installed from a wheel?")
    shutil.rmtree(folder)
    (file,) = [path for path in installed.files or () if path.name == "entry_points.txt"]
    path = Path(str(installed.locate_file(file)))
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not line.partition("=")[2].strip().startswith(PACKAGE)]
    path.write_text("".join(kept), encoding="utf-8")
    sys.stdout.write(f"{len(lines) - len(kept)} entry points removed\n")


if __name__ == "__main__":
    main()
