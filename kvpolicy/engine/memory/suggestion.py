"""Which budget and how many slots fit into a memory, counted as the engine allocates them."""

from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache

import attrs
from transformers import PreTrainedModel

from kvpolicy.engine.memory.footprint import Footprint, footprint
from kvpolicy.errors import BudgetError, KVPolicyError
from kvpolicy.model.adapter import ModelAdapter
from kvpolicy.plan.plan import Plan

MOST_SLOTS = 256  # that are suggested; more can be asked for

# Makes the plan for a number of rows.
PlanOf = Callable[[int], Plan]


@attrs.frozen
class Suggestion:
    """What fits into a memory.

    Attributes:
        chosen: The plan to use, and what it allocates.
        alternatives: The largest budget for each other number of slots, in order of slots; the
            chosen one is among them.
        enough: Rows that were wanted at least, if the number of slots was to be chosen.
    """

    chosen: Footprint
    alternatives: tuple[Footprint, ...]
    enough: int | None = None


def budget_of(found: Footprint) -> int:
    """The budget of the plan: the mean over its layers, among which policies may distribute it."""
    budgets = [layer.plan.budget or 0 for layer in found.layers if layer.plan.has_rows]
    return sum(budgets) // len(budgets)


def is_whole(found: Footprint) -> bool:
    """Whether every row of the longest sequence stays, so that nothing is ever evicted."""
    longest = found.tokens
    return all(
        layer.rows_per_slot >= min(longest, layer.sliding_window or longest)
        for layer in found.layers
        if layer.plan.has_rows
    )


def suggest(
    plan_of: PlanOf,
    model: PreTrainedModel,
    *,
    longest: int,
    longest_prompt: int | None = None,
    memory: int,
    slots: int | None = None,
    budget: int | None = None,
    keep: float = 0.25,
) -> Suggestion:
    """Choose what fits.

    With slots, the largest budget; with a budget, the most slots; with neither, the most slots
    (a power of two up to `MOST_SLOTS`) at which enough rows stay, and the largest budget for them.

    Args:
        plan_of: Makes the plan for a budget.
        model: The model; it may be on the device ``meta``.
        longest: Tokens of the longest sequence.
        longest_prompt: Tokens of the longest prompt, for plans that keep the rows of prompts.
        memory: Bytes for the cache.
        slots: Sequences decoded together.
        budget: Rows that stay after a compaction.
        keep: The share of the longest sequence that is enough, above 0 and up to 1.

    Raises:
        KVPolicyError: Nothing fits, or the plan or the model is refused.
    """
    fit = _Fit(plan_of, model, longest, longest_prompt, memory)
    if budget is not None:
        most = fit.most_slots(budget) if slots is None else slots
        if not most or not fit.fits(budget, most):
            fit.refuse(fit.footprint(budget, max(most, 1)))
        return Suggestion(fit.footprint(budget, most), fit.alternatives(most))
    if slots is not None:
        return Suggestion(fit.largest(slots), fit.alternatives(slots))
    enough = max(int(keep * longest), 1)
    found = fit.alternatives(1)
    chosen = [one for one in found if is_whole(one) or budget_of(one) >= enough] or [found[0]]
    return Suggestion(chosen[-1], found, enough)


@attrs.frozen
class Fitting:
    """What fits into a memory beside another suggestion, such as with rows in fewer bits.

    Attributes:
        largest: The plan with the largest budget for as many slots; ``None``: none fits.
        most_slots: The most slots with the same budget.
    """

    largest: Footprint | None
    most_slots: int


def in_equal_bytes(
    plan_of: PlanOf,
    model: PreTrainedModel,
    *,
    longest: int,
    longest_prompt: int | None = None,
    memory: int,
    slots: int,
    budget: int,
) -> Fitting:
    """What other plans have in a memory for as many slots, and with the same budget.

    Args:
        plan_of: Makes the plan for a budget.
        model: The model; it may be on the device ``meta``.
        longest: Tokens of the longest sequence.
        longest_prompt: Tokens of the longest prompt.
        memory: Bytes for the cache.
        slots: As many slots.
        budget: The same budget.

    Raises:
        KVPolicyError: The plan or the model is refused.
    """
    fit = _Fit(plan_of, model, longest, longest_prompt, memory)
    try:
        largest = fit.largest(slots)
    except BudgetError:
        return Fitting(None, fit.most_slots(budget))
    return Fitting(largest, fit.most_slots(budget))


class _Fit:
    """Finds what a plan can have within a memory."""

    def __init__(
        self,
        plan_of: PlanOf,
        model: PreTrainedModel,
        longest: int,
        longest_prompt: int | None,
        memory: int,
    ) -> None:
        self._plan_of = plan_of
        self._longest_prompt = longest_prompt
        self._adapter = ModelAdapter(model)
        self._longest = longest
        self._memory = memory
        most = self._adapter.max_positions
        if longest > most:
            msg = (
                f"sequences of {longest:,} tokens were asked for; the model has positions for "
                f"{most:,}"
            )
            raise KVPolicyError(msg)
        self._of_one_slot = lru_cache(maxsize=None)(self._count)
        # The least budget that the policies accept.
        whole = self._of_one_slot(longest)
        if whole.plan.keeps_prompts and longest_prompt is None:
            msg = (
                "the plan keeps the rows of prompts, and how long these are was not told; give "
                "--prompt-tokens, in Python longest_prompt"
            )
            raise KVPolicyError(msg)
        self._least = max(1, *(layer.plan.num_protected for layer in whole.layers))

    def footprint(self, budget: int, slots: int = 1) -> Footprint:
        """What a plan with this budget allocates."""
        return attrs.evolve(self._of_one_slot(budget), slots=slots)

    def fits(self, budget: int, slots: int) -> bool:
        """Whether so many slots fit with this budget."""
        return self.footprint(budget, slots).num_bytes <= self._memory

    def most_slots(self, budget: int) -> int:
        """The most slots that fit with this budget; 0: none."""
        most = self._memory // self._of_one_slot(budget).bytes_per_slot
        return bisect_left(range(1, most + 1), True, key=lambda num: not self.fits(budget, num))

    def largest(self, slots: int) -> Footprint:
        """The plan with the largest budget that fits so many slots."""
        low, high = self._least, self._longest + 1
        if low >= high or not self.fits(low, slots):
            self.refuse(self.footprint(min(low, self._longest), slots))
        while high - low > 1:  # low fits, and high does not, or is longer than any sequence
            middle = (low + high) // 2
            if self.fits(middle, slots):
                low = middle
            else:
                high = middle
        return self.footprint(low, slots)

    def alternatives(self, slots: int) -> tuple[Footprint, ...]:
        """The largest budgets for powers of two, and for the given number, as far as any fits."""
        counts = sorted({2**i for i in range(MOST_SLOTS.bit_length())} | {slots})
        least = min(self._least, self._longest)
        fitting = [one for one in counts if self.fits(least, one)]
        if not fitting:
            self.refuse(self.footprint(least))
        return tuple(self.largest(one) for one in fitting)

    def refuse(self, one: Footprint) -> None:
        """Raise an error: a plan does not fit."""
        what = "1 sequence takes" if one.slots == 1 else f"{one.slots:,} sequences take"
        msg = (
            f"{what} {one.num_bytes:,} bytes with a budget of {budget_of(one):,} rows "
            f"and a buffer of {one.first.plan.buffer:,}, and the "
            f"memory for the cache has {self._memory:,}; give more memory, a smaller budget, "
            "fewer slots or a shorter length"
        )
        raise BudgetError(msg)

    def _count(self, budget: int) -> Footprint:
        return footprint(
            self._plan_of(budget),
            self._adapter,
            slots=1,
            longest=self._longest,
            longest_prompt=self._longest_prompt,
        )
