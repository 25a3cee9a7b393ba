"""Testing a policy: on tensors of one's own, and against the whole contract."""

from kvpolicy.testing.bench import Shown, keep_rows, replay

__all__ = ["Shown", "keep_rows", "replay"]
