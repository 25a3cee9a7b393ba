"""The clauses of the contract that `check_policy` checks, and its result: an error or a report."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import attrs

from kvpolicy.errors import KVPolicyError

#: What every policy promises, by name.
CLAUSES = {
    "building": "The factory builds a new policy each time, and the policy fits the hook specs.",
    "answers": "Every hook answers without an exception, in the type, shape and dtype of its spec.",
    "sizes": "That holds at small sizes, too: few rows, one token, one head, one slot.",
    "grouped_queries": "That holds when several query heads share a KV head, too.",
    "prompts": 'That holds for `prompt = "keep"`, too: hooks see the rows behind a prompt only.',
    "hybrid": "That holds in hybrid models, too: a layer without attention has no hooks.",
    "latent": "That holds for latent attention, too: keys that are larger than values.",
    "images": "That holds for prompts with images, too, whose rows leave or are protected.",
    "precision": "That holds in bfloat16, float16, float32 and float64.",
    "nan": "No score, annotation or change is NaN, also for keys that are zero, equal or large.",
    "read_only": "The tensors that a hook receives are not modified.",
    "budget": "At most `budget` rows stay after a compaction, and the slab never overflows.",
    "shared": "Where heads share a budget, all keep `budget * H_kv` rows at most, each at least 1.",
    "order": "Rows that stay are named once and in rising order of position.",
    "protected": "Rows that are protected, declared in `protects` or named by `protect`, stay.",
    "eviction": "`evict` leaves the chosen rows in place, each with its position.",
    "tracks": "Tracks move with their rows, and are assigned to, not changed in place.",
    "weights": "`bind` leaves the weights of the model as they are.",
    "annotations": "The annotations of a token do not depend on the other tokens of the call.",
    "in_step": "With `annotates_in_step`, `annotate` reads no value of a tensor on the host.",
    "determinism": "A new policy with the same knobs gives the same answers to the same calls.",
    "memory": "State that a policy keeps for a sequence ends with the sequence.",
    "snapshots": "A sequence that is written to a file, read and resumed goes on as it would have.",
    "prefixes": "A prompt goes on with the stored beginning of another one as it would alone.",
    "lookahead": "A lookahead is of 1 to `lookahead_size` tokens of the vocabulary.",
    "cancellation": "A cancelled request does not affect later requests.",
    "chunks": "Answers do not depend on the chunks in which a prompt is prefilled.",
    "slots": "Answers do not depend on the slot of a sequence.",
    "neighbours": "Answers do not depend on the sequences in the other slots.",
    "layers": "Layers that no hook tells apart get the same answers together as one by one.",
    "schedule": "`schedule` admits waiting requests as its spec says, until none is left.",
    "knobs": "Knobs written to a plan and read again make the same policy.",
}

_NOT_CHOOSING = "it does not choose which rows stay"
_SKIPPED = {
    "answers": "none of its hooks was called",
    "nan": "it implements none of score, annotate and steer",
    "read_only": "none of its hooks was called",
    "budget": _NOT_CHOOSING,
    "order": _NOT_CHOOSING,
    "protected": _NOT_CHOOSING,
    "shared": "it does not declare ragged, or does not choose which rows stay",
    "eviction": "it does not implement evict",
    "weights": "it does not implement bind",
    "annotations": "it does not implement annotate",
    "in_step": "it does not implement annotate with annotates_in_step",
    "tracks": "it has no tracks and does not implement evict",
    "prefixes": "it declares cuts_prompts = False",
    "lookahead": "it does not implement lookahead",
    "layers": "its hooks tell layers apart, or it does not choose which rows stay",
    "schedule": "it does not implement schedule",
    "knobs": "it is not an attrs class, so that its knobs cannot be read",
}


@attrs.frozen
class Example:
    """A minimal example, as text.

    Attributes:
        setup: Its sizes and its seed.
        code: Lines of Python that show the failure again.
    """

    setup: str
    code: str


class ConformanceError(KVPolicyError, AssertionError):
    """A policy breaks a clause of the contract.

    Attributes:
        clause: Name of the clause, a key of `CLAUSES`.
        expected: What was expected, as text.
        came: What happened instead, as text.
        policy: Name of the policy, if known.
        example: A minimal example, if there is one.
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
        """The clause, the expected and the actual behaviour, and the example."""
        policy = f"policy '{self.policy}'" if self.policy else "a policy"
        lines = [
            f"{policy} breaks the clause '{self.clause}': {CLAUSES[self.clause]}",
            f"expected: {self.expected}",
            f"came: {self.came}",
        ]
        if self.example is not None:
            lines += [f"minimal example: {self.example.setup}", "", self.example.code]
        return "\n".join(lines)


@attrs.frozen
class Report:
    """The clauses that a policy keeps, and how often each was checked.

    Attributes:
        policy: Its name.
        refused: Kinds of models, named as their clauses, that refuse the policy, each with the
            sentence.
        cases: Drawn cases. In each, an engine completes at least one request, and every
            request is generated once more alone.
        elapsed_s: Seconds it took.
        checked: How often each clause was checked.
    """

    policy: str
    cases: int
    elapsed_s: float
    checked: Counter[str]
    refused: Mapping[str, str] = attrs.field(factory=dict)

    @property
    def clauses(self) -> list[str]:
        """Clauses that were checked."""
        return [name for name in CLAUSES if self.checked[name]]

    @property
    def skipped(self) -> dict[str, str]:
        """Clauses that were not checked, and why."""
        return {
            name: self.refused.get(name, _SKIPPED.get(name, "no such case was drawn; ask for more"))
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
        """A summary, and a line for each clause."""
        checked, width = self.clauses, max(map(len, CLAUSES))
        lines = [
            f"policy '{self.policy}' keeps the contract: {len(checked)} clauses, "
            f"{self.cases:,} cases, {self.elapsed_s:.1f} s"
        ]
        lines += [f"  {name:<{width}}  {self.checked[name]:>9,} checks" for name in checked]
        lines += [f"  {name:<{width}}  skipped: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines)
