"""Write the package that the tutorial builds, from the tutorial's code blocks."""

import re
import sys
from pathlib import Path

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial" / "your-first-policy.md"
FILES = {"key_norm.py": "key_norm.py", "kvpolicy-key-norm/pyproject.toml": "pyproject.toml"}


def main(folder: Path) -> None:
    """Write its files to ``folder``; of a file shown twice, the later version is used."""
    folder.mkdir()
    text = TUTORIAL.read_text(encoding="utf-8")
    shown = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.M | re.S))
    for title, name in FILES.items():
        (folder / name).write_text(shown[title], encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
