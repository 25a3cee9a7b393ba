"""The clauses of the contract that `check_policy` checks, and what a broken one raises."""

import attrs

from kvpolicy.errors import KVPolicyError

#: What every policy promises, by name, in the order in which it is blamed.
CLAUSES = {
    "building": "The factory builds a new policy each time, and the policy fits the hook specs.",
    "answers": "Every hook answers without an exception, in the type, shape and dtype of its spec.",
    "sizes": "That holds at odd sizes, too: few rows, one token, one head, one slot.",
    "grouped_queries": "That holds when several query heads share a KV head, too.",
    "precision": "That holds in bfloat16, float16, float32 and float64.",
    "nan": "No score and no change is NaN, also for keys that are zero, equal or large.",
    "read_only": "The tensors that a hook receives are read and never written.",
    "budget": "At most `budget` rows stay after a compaction, and the slab never overflows.",
    "order": "Rows that stay are named once and in rising order of position.",
    "protected": "Rows that are promised in `protects`, or pinned with `inf`, stay.",
    "eviction": "`evict` leaves the chosen rows in place, each with its position.",
    "tracks": "Tracks move with their rows, and are assigned to, not changed in place.",
    "determinism": "Asked the same again, a new policy with the same knobs answers the same.",
    "memory": "What a policy remembers of a sequence ends with the sequence.",
    "cancellation": "A request that is cancelled leaves no trace in those that come after it.",
    "chunks": "It does not matter in what chunks a prompt comes in.",
    "slots": "It does not matter which slot a sequence has.",
    "neighbours": "It does not matter what stands in the other slots.",
    "schedule": "Waiting requests are admitted as `schedule` must, until none is left.",
    "knobs": "Knobs survive a plan: written to it and read again, they make the same policy.",
}


@attrs.frozen
class Example:
    """A minimal example, as text.

    Attributes:
        setup: Its sizes and its seed.
        code: A few lines that show the failure again.
    """

    setup: str
    code: str


class ConformanceError(KVPolicyError, AssertionError):
    """A policy breaks a clause of the contract.

    Attributes:
        clause: Name of the clause, a key of `CLAUSES`.
        expected: What was expected, in words.
        came: What came, in words.
        policy: Name of the policy, once it is known.
        example: A minimal example, once there is one.
    """

    def __init__(
        self,
        clause: str,
        expected: str,
        came: str,
        policy: str = "",
        example: Example | None = None,
    ) -> None:
        self.clause, self.expected, self.came = clause, expected, came
        self.policy, self.example = policy, example
        super().__init__(clause, expected, came)

    def __str__(self) -> str:
        """The clause, what was expected, what came, and the example."""
        who = f"policy '{self.policy}'" if self.policy else "a policy"
        lines = [
            f"{who} breaks the clause '{self.clause}': {CLAUSES[self.clause]}",
            f"expected: {self.expected}",
            f"came: {self.came}",
        ]
        if self.example is not None:
            lines += [f"minimal example: {self.example.setup}", "", self.example.code]
        return "\n".join(lines)
