"""What a check has come to."""

from collections import Counter
from typing import Any

import attrs

from kvpolicy.testing.clauses import CLAUSES

_ROWS = "it has no say in what stays"
_WHY = {
    "answers": "no question came up that it answers",
    "nan": "it answers neither score nor steer",
    "read_only": "no question came up that it answers",
    "budget": _ROWS,
    "order": _ROWS,
    "protected": _ROWS,
    "eviction": "it does not implement evict",
    "tracks": "it has no tracks and does not implement evict",
    "schedule": "it does not implement schedule",
    "knobs": "it is no attrs class, so that its knobs cannot be read",
}


@attrs.frozen
class Report:
    """Which clauses a policy has kept, and on how many cases.

    Attributes:
        policy: Its name.
        cases: Drawn cases: each an engine that serves at least one request to its end, and
            each request once more alone.
        elapsed_s: Seconds it took.
        checked: How often each clause was checked.
    """

    policy: str
    cases: int
    elapsed_s: float
    checked: Counter[str]

    @property
    def clauses(self) -> list[str]:
        """Clauses that were checked, at least once."""
        return [name for name in CLAUSES if self.checked[name]]

    @property
    def skipped(self) -> dict[str, str]:
        """Clauses that were not, and why."""
        return {
            name: _WHY.get(name, "no such case was drawn; ask for more")
            for name in CLAUSES
            if not self.checked[name]
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "policy": self.policy,
            "cases": self.cases,
            "elapsed_s": round(self.elapsed_s, 3),
            "checked": {name: self.checked[name] for name in self.clauses},
            "skipped": self.skipped,
        }

    def __str__(self) -> str:
        """A line, and a line for each clause."""
        kept, wide = self.clauses, max(map(len, CLAUSES))
        lines = [
            f"policy '{self.policy}' keeps the contract: {len(kept)} clauses, "
            f"{self.cases:,} cases, {self.elapsed_s:.1f} s"
        ]
        lines += [f"  {name:<{wide}}  {self.checked[name]:>9,} checks" for name in kept]
        lines += [f"  {name:<{wide}}  skipped: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)
