"""Bytes that plans take for each sequence, and the largest budget within a number of bytes."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable

import attrs

from kvpolicy.errors import BudgetError
from kvpolicy.lab.models import Lengths, ModelProvider
from kvpolicy.plan.resolved import ResolvedPlan
from kvpolicy.quantities import format_bytes, format_count

# Resolves a plan with a budget.
Resolve = Callable[[int], ResolvedPlan]


class TooFewBytesError(BudgetError):
    """A plan takes more bytes with its least budget.

    Attributes:
        least: The bytes that it takes then.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message)
        self.least = least


@attrs.frozen(eq=False)
class Sizes:
    """What plans allocate for the sequences of a model and a task.

    Attributes:
        models: Counts what a plan allocates.
        model: Name of the model, as typed.
        lengths: Sequences decoded together, and their tokens.
    """

    models: ModelProvider
    model: str
    lengths: Lengths
    _found: dict[str, int] = attrs.field(factory=dict, init=False, repr=False)

    def bytes_of(self, plan: ResolvedPlan) -> int:
        """Bytes that the cache allocates for each sequence, rows beside the slots included."""
        digest = plan.digest()
        if digest not in self._found:
            self._found[digest] = self.models.bytes_per_sequence(self.model, plan, self.lengths)
        return self._found[digest]

    def largest_budget(self, name: str, resolve: Resolve, num_bytes: int) -> int:
        """The largest budget with which a plan fits; at most the longest sequence.

        Args:
            name: What the plan is called, for the message.
            resolve: Resolves the plan; raises `BudgetError` for a budget below its least.
            num_bytes: Bytes for each sequence.

        Raises:
            TooFewBytesError: No budget is small enough.
        """
        longest = self.lengths.longest
        if self.bytes_of(resolve(longest)) <= num_bytes:
            return longest  # nothing is evicted; a little less may take more: rows beside slots

        def is_valid(budget: int) -> bool:
            try:
                resolve(budget)
            except BudgetError:
                return False
            return True

        least = 1 + bisect_left(range(1, longest), True, key=is_valid)
        above = bisect_right(
            range(least, longest), num_bytes, key=lambda budget: self.bytes_of(resolve(budget))
        )
        if not above:
            needed = self.bytes_of(resolve(least))
            msg = (
                f"{name} takes {needed:,} bytes ({format_bytes(needed)}) for each sequence with "
                f"its least budget, {format_count(least, 'row')}, and --bytes gives "
                f"{num_bytes:,}; give at least {needed:,}"
            )
            raise TooFewBytesError(msg, needed)
        return least + above - 1
