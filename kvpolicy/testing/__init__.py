"""Tests of a policy: single calls on given tensors, and `check_policy` for the contract.

Names are imported on first use: `keep_rows` does not need transformers, and only `check_policy`
needs Hypothesis.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpolicy.testing.clauses import CLAUSES, ConformanceError, Report
    from kvpolicy.testing.conformance import check_policy
    from kvpolicy.testing.single_call import Shown, keep_rows, replay
    from kvpolicy.testing.trial import Trial

_MODULES = {
    "CLAUSES": "clauses",
    "ConformanceError": "clauses",
    "Report": "clauses",
    "Shown": "single_call",
    "Trial": "trial",
    "check_policy": "conformance",
    "keep_rows": "single_call",
    "replay": "single_call",
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
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        msg = f"module 'kvpolicy.testing' has no attribute '{name}'"
        raise AttributeError(msg)
    return getattr(import_module(f"kvpolicy.testing.{_MODULES[name]}"), name)
