"""A sweep command that tests interrupt and run again, and its samples."""

import json
import time
from pathlib import Path
from typing import Any

from child_process import Ended, run_in_child
from kill_plugin import Fuse

NUM_CELLS, N = 3, 6


class Bench:
    """One command that can run several times on the same output folder."""

    def __init__(self, folder: Path, model: Path, name: str = "out") -> None:
        self.folder = folder
        self.output = folder / name
        self.fuse = Fuse(folder)
        self._words = [
            *("ablate", "--model", model, "--policies", "full,fused", "--budgets", "12,24"),
            *("--buffer", 6, "--n", N, "--slots", 2, "--max-new-tokens", 40),
            *("--plugin", self.fuse.plugin, "--output", self.output),
        ]

    def __call__(self, *more: object, **limits: Any) -> Ended:
        return run_in_child(self.folder, *self._words, *more, **limits)

    def samples(self) -> list[dict[str, Any]]:
        text = (self.output / "samples.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()]

    def kept(self) -> dict[str, dict[str, Any]]:
        """The records of kept rows by the key of their sample; each occurs once."""
        text = (self.output / "kept.jsonl").read_text(encoding="utf-8")
        whole = text[
            : text.rfind("\n") + 1
        ]  # the run may have been killed while writing the last line
        records = [json.loads(line) for line in whole.splitlines()]
        found = {record["key"]: record for record in records}
        assert len(found) == len(records)
        return found

    def table(self) -> list[dict[str, Any]]:
        return json.loads((self.output / "table.json").read_text(encoding="utf-8"))


def untimed(samples: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Samples by key, without their times."""
    timed = ("prefill_s", "decode_s")
    return {s["key"]: {k: v for k, v in s.items() if k not in timed} for s in samples}


def wait_for_orphans(ended: Ended) -> None:
    """Workers whose parent was killed end at their next message."""
    deadline = time.monotonic() + 60
    while _is_running(ended.group) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_running(ended.group), "a worker outlived its parent"


def _is_running(group: int) -> bool:
    """Whether a process of a group is running."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group, *_ = path.read_text("utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        if int(its_group) == group and state != "Z":
            return True
    return False
