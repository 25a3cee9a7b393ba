"""Write the package that the tutorial builds, from the tutorial's code blocks."""

import re
import sys
from pathlib import Path

TUTORIAL = Path(__file__).parents[1] / "docs" / "tutorial" / "your-first-policy.md"
PACKAGE = "kvpolicy-key-norm/"
COPIED = {"key_norm.py": "kvpolicy_key_norm/key_norm.py"}  # by a command of the tutorial


def main(folder: Path) -> None:
    """Write its files to ``folder``; of a file shown twice, the later version is used."""
    (folder / "kvpolicy_key_norm").mkdir(parents=True)
    text = TUTORIAL.read_text(encoding="utf-8")
    shown = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', text, re.M | re.S))
    names = {title: title.removeprefix(PACKAGE) for title in shown if title.startswith(PACKAGE)}
    for title, name in (COPIED | names).items():
        (folder / name).write_text(shown[title], encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
