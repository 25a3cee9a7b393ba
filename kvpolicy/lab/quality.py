"""What quality plans keep on passages of a text, and the least budget at which it is enough.

The full cache reads each passage to its end, once, and every plan is led along the same tokens:
the last of each passage one by one, in decode steps, as if the model had written them. What is
measured there is `retention`, and the share of tokens for which the plan and the full cache have
the same likeliest token, which is called the quality.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import attrs

from kvpolicy.engine.requests.encoding import following
from kvpolicy.engine.requests.request import Request
from kvpolicy.errors import BudgetError, KVPolicyError
from kvpolicy.lab.models import LoadedModel
from kvpolicy.lab.statistics import Interval, wilson
from kvpolicy.lab.tasks.held_attention import FullRun, HeldAttention
from kvpolicy.lab.tasks.held_shares import ERROR, LOOK_BACKS_HELD, RETAINED, LookBack
from kvpolicy.lab.tasks.likelihood import MATCH
from kvpolicy.lab.tasks.prose import Passage
from kvpolicy.plan.plan import Plan

#: Budgets that are tried, as shares of the length, in this order.
SHARES = (0.7, 0.5, 0.35, 0.25, 0.175, 0.125, 0.09, 0.06)

# Budgets are multiples of so many rows, where they are larger.
_MULTIPLE = 8


@attrs.frozen
class Quality:
    """What a plan keeps.

    Attributes:
        policy: Name of its policies.
        budget: Its budget; ``None``: nothing is evicted.
        plan: The plan.
        num_tokens: Tokens that were compared.
        match: Share of them for which plan and full cache have the same likeliest token. The
            interval takes tokens for independent, which those of one passage are not.
        retained_attention: As `retention` measures it; mean over passages, as the next two.
        look_backs_held: ``None`` if there were no look-backs.
        output_error: Relative error of the attention output.
    """

    policy: str
    budget: int | None
    plan: Plan = attrs.field(repr=False)
    num_tokens: int
    match: Interval
    retained_attention: float
    look_backs_held: float | None
    output_error: float


class QualityMeter:
    """Measures plans on passages; the full cache's run is computed once, and kept.

    It holds the rows of a full cache of each passage, and the same again while a plan is measured.

    Attributes:
        num_tokens: Tokens of each passage that are compared.
    """

    def __init__(self, loaded: LoadedModel, passages: Sequence[Passage]) -> None:
        """Set up; nothing is computed.

        Args:
            loaded: The model.
            passages: Passages of two parts: what is read first, and what is compared.
        """
        self._loaded, tokenizer = loaded, loaded.tokenizer
        prompts = [tokenizer(one.parts[0])["input_ids"] for one in passages]
        self._texts = [
            following(tokenizer, prompt, one.parts[1])
            for prompt, one in zip(prompts, passages, strict=True)
        ]
        self._requests = [
            Request(prompt, len(text), stop_ids=())
            for prompt, text in zip(prompts, self._texts, strict=True)
        ]
        self.num_tokens = sum(map(len, self._texts))
        self._full: FullRun | None = None

    def measure(
        self,
        policy: str,
        budget: int | None,
        plan: Plan,
        told: Callable[[int], None] = lambda _: None,
    ) -> Quality:
        """Measure a plan.

        Args:
            policy: Name of its policies.
            budget: Its budget; ``None``: nothing is evicted.
            plan: The plan.
            told: Is told of every step how many tokens were compared.

        Raises:
            KVPolicyError: The plan does not fit the model, or a request has failed.
        """
        engine = self._loaded.engine(plan, slots=len(self._requests))
        if self._full is None:
            self._full = FullRun(engine, self._requests, texts=self._texts, keep_bytes=math.inf)
        trial = HeldAttention(engine, self._requests, LookBack(), self._full)
        found, num_done = [], 0
        while not trial.run.done:
            events = trial.run.step()
            num_done += len(events.tokens)
            told(num_done)
            for result in events.results:
                if result.error is not None:
                    rows = "all" if budget is None else f"{budget:,}"
                    msg = f"{policy} with {rows} rows has failed on a passage: {result.error}"
                    raise KVPolicyError(msg)
                outcome = trial.outcome(result)
                found.append((len(result.tokens), outcome.values))
        num = sum(num for num, _ in found)
        matching = round(sum(num * values[MATCH] for num, values in found))
        held = [values[LOOK_BACKS_HELD] for _, values in found if LOOK_BACKS_HELD in values]
        return Quality(
            policy,
            budget,
            plan,
            num,
            wilson(matching, num),
            fmean(values[RETAINED] for _, values in found),
            fmean(held) if held else None,
            fmean(values[ERROR] for _, values in found),
        )


def budgets_for(length: int) -> list[int]:
    """The budgets that are tried for sequences of a length, largest first."""
    rows = [int(share * length) for share in SHARES]
    rows = [one - one % _MULTIPLE if one > _MULTIPLE else one for one in rows]
    return list(dict.fromkeys(one for one in rows if one))


def descend(
    measure: Callable[[str, int], Quality],
    policies: Sequence[str],
    budgets: Sequence[int],
    enough: float,
) -> Iterator[Quality]:
    """Measure policies at smaller and smaller budgets, each until it is not good enough.

    Args:
        measure: Measures a policy at a budget.
        policies: Names of policies.
        budgets: Budgets, largest first.
        enough: The quality that is enough. A policy that does not have it at a budget is taken
            not to have it at smaller ones.
    """
    left = list(policies)
    for budget in budgets:
        found = []
        for policy in left:
            try:
                found.append(measure(policy, budget))
            except BudgetError:
                if budget == budgets[0]:
                    raise
                continue  # policies have rows that they need
            yield found[-1]
        left = [one.policy for one in found if one.match.value >= enough]


def best(
    found: Sequence[Quality], enough: float, num_bytes: Callable[[Quality], int]
) -> Quality | None:
    """The plan to use: of the fewest bytes that are enough, the one with the least output error.

    Args:
        found: What was measured.
        enough: The quality that is enough.
        num_bytes: Bytes that a plan allocates for a sequence.

    Returns:
        ``None`` if none is good enough.
    """
    passing = [one for one in found if one.match.value >= enough]
    return min(passing, key=lambda one: (num_bytes(one), one.output_error), default=None)
