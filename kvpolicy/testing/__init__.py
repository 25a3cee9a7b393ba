"""Testing a policy: on tensors of one's own, and against the whole contract.

Each name is fetched from its home when first used: `keep_rows` needs no transformers, and
only `check_policy` needs Hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.testing.bench import Shown, keep_rows, replay
    from kvpolicy.testing.check import check_policy
    from kvpolicy.testing.clauses import CLAUSES, ConformanceError
    from kvpolicy.testing.report import Report
    from kvpolicy.testing.trial import Trial

_HOMES = {
    "CLAUSES": "clauses",
    "ConformanceError": "clauses",
    "Report": "report",
    "Shown": "bench",
    "Trial": "trial",
    "check_policy": "check",
    "keep_rows": "bench",
    "replay": "bench",
}

__all__ = [
    "CLAUSES",
    "ConformanceError",
    "Report",
    "Shown",
    "Trial",
    "check_policy",
    "keep_rows",
    "replay",
]


def __getattr__(name: str) -> object:
    """Fetch a public name from its home (PEP 562)."""
    if name not in _HOMES:
        msg = f"module 'kvpolicy.testing' has no attribute '{name}'"
        raise AttributeError(msg)
    return getattr(import_module(f"kvpolicy.testing.{_HOMES[name]}"), name)
