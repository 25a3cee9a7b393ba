"""Update `docs/reference/cli.md`: ``python tests/support/refresh_help.py``.

Replaces the block after every ``kvpolicy ... --help`` by the output of the command.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
_HELP = re.compile(r"(```sh\nkvpolicy ([^\n]*--help)\n```\n\n```text\n).*?^```$", re.M | re.S)


def _printed(found: re.Match[str]) -> str:
    command = [sys.executable, "-m", "kvpolicy", *found[2].split()]
    width = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=width)
    lines = [line.rstrip() for line in done.stdout.strip().splitlines()]
    return "\n".join([found[1] + lines[0], *lines[1:], "```"])


if __name__ == "__main__":
    PAGE.write_text(_HELP.sub(_printed, PAGE.read_text(encoding="utf-8")), encoding="utf-8")
