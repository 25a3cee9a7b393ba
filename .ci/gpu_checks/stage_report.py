"""What a stage is asked for, and what it reports: lines as they are known, and a JSON file."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Report:
    """A stage's arguments and findings."""

    name: str
    out: Path
    device: str
    quick: bool
    found: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        """Print a line now."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def note(self, key: str, value: Any, line: str | None = None) -> None:
        """Add a finding, write the file anew, and print a line."""
        self.found[key] = value
        self._write()
        if line is not None:
            self.say(line)

    def fail(self, reason: str) -> None:
        """Note that something is wrong; the stage goes on and fails at its end."""
        self.failures.append(reason)
        self._write()
        self.say(f"FAILED: {reason}")

    def _write(self) -> None:
        # At once or not at all: a stage may be ended at any time.
        file = self.out / f"{self.name}.json"
        partial = file.with_suffix(".partial")
        partial.write_text(
            json.dumps({**self.found, "failures": self.failures}, indent=1), encoding="utf-8"
        )
        os.replace(partial, file)


def main(name: str, stage: Callable[[Report], None]) -> None:
    """Run a stage as a program; the status is 1 if anything failed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("device")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    report = Report(name, asked.out, asked.device, asked.quick)
    stage(report)
    sys.exit(int(bool(report.failures)))
