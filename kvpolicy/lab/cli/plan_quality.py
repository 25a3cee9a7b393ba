"""What ``kvpolicy plan suggest --quality`` measures and prints of it."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs

from kvpolicy.cli.output import Progress, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.engine.memory.footprint import Footprint
from kvpolicy.engine.memory.suggestion import PlanOf
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.models import LoadedModel
from kvpolicy.lab.quality import Quality, QualityMeter, best, budgets_for, descend
from kvpolicy.lab.tasks.prose import PROSE, open_prose
from kvpolicy.lab.tasks.task import Split
from kvpolicy.plan.plan import Plan
from kvpolicy.plan.spec import PLAIN_ROWS
from kvpolicy.quantities import format_count, format_seconds

_COMPARED = 64  # tokens at the end of each passage, of long ones


@attrs.frozen
class Measured:
    """What was measured, and how.

    Attributes:
        wanted: The quality that was asked for.
        best: The plan to use.
        plan_of: Makes it, and others for other budgets.
        in_precision: Makes such plans in another precision of rows.
        found: All plans that were measured, each with what a slot allocates: first the full cache
            in other precisions than the model's.
        text: The text.
        passages: Passages of it.
        compared: Tokens at the end of all passages that were compared.
        elapsed_s: Seconds, without those of loading the model.
    """

    wanted: float
    best: Quality
    plan_of: PlanOf
    in_precision: Callable[[str | None], PlanOf]
    found: Sequence[tuple[Quality, Footprint]]
    text: str
    passages: int
    compared: int
    elapsed_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "wanted": self.wanted,
            "text": self.text,
            "passages": self.passages,
            "tokens": self.compared,
            "elapsed_s": round(self.elapsed_s, 3),
            "measured": [
                {
                    "policy": one.policy,
                    "rows": str(one.plan.rows),
                    "budget": one.budget,
                    "match": attrs.asdict(one.match),
                    "retained_attention": one.retained_attention,
                    "look_backs_held": one.look_backs_held,
                    "output_error": one.output_error,
                    "bytes_per_slot": of_one.bytes_per_slot,
                    "full_bytes_per_slot": of_one.full_bytes_per_slot,
                }
                for one, of_one in self.found
            ],
        }

    def lines(self) -> list[str]:
        """A table of what was measured, and what it was measured on."""
        headers = ["policy", "rows", "budget", "same token", "attention", "look-backs", "error"]
        rows = [
            [
                one.policy,
                str(one.plan.rows),
                "all" if one.budget is None else f"{one.budget:,}",
                f"{one.match.value:.1%} ({100 * one.match.low:.0f}-{100 * one.match.high:.0f})",
                f"{one.retained_attention:.1%}",
                "-" if one.look_backs_held is None else f"{one.look_backs_held:.1%}",
                f"{one.output_error:.3f}",
                f"{of_one.bytes_per_slot / of_one.full_bytes_per_slot:.1%}",
                "chosen" if one == self.best else "",
            ]
            for one, of_one in self.found
        ]
        width = terminal_width()
        table = format_table([*headers, "of full", ""], rows, right=range(2, 8), width=width)
        return [
            f"quality     {self.best.match.value:.4g} of at least {self.wanted:.4g}: the share of "
            f"{self.compared:,} tokens for which the likeliest is that of the full cache",
            f"measured on {format_count(self.passages, 'passage')} of {self.text}, at the end of "
            f"each; {format_count(len(self.found), 'plan')} in {format_seconds(self.elapsed_s)}",
            "",
            *table.split("\n"),
        ]


@attrs.frozen
class Candidates:
    """What plans are chosen from.

    Attributes:
        precisions: How rows may be stored; ``None``: as the plans themselves say.
        evicting: Names of policies.
        plans_of: Makes the plans of some policies in some precision, for any budget.
        full: The plan that evicts nothing, in some precision.
    """

    precisions: Sequence[str | None]
    evicting: Sequence[str]
    plans_of: Callable[[str, str | None], PlanOf]
    full: Callable[[str], Plan]

    def in_precision(self, like: Quality, form: str | None) -> PlanOf:
        """Plans like one that was measured, in some precision."""
        if like.budget is None and form is not None:
            return _always(self.full(form))
        return self.plans_of(like.policy, form)


def measure_candidates(
    open_model: Callable[[], LoadedModel],
    candidates: Candidates,
    footprint_of: Callable[[PlanOf, int], Footprint],
    *,
    length: int,
    quality: float,
    of: Path | None,
    passages: int,
) -> Measured:
    """Measure plans until the one of the fewest bytes is found that is good enough.

    The full cache is measured in each precision but the model's, in which it is what the others are
    compared with. Then policies are, at smaller and smaller budgets: in the precision of the fewest
    bytes in which the full cache is good enough.

    Args:
        open_model: Loads the model.
        candidates: The plans.
        footprint_of: What a plan allocates for one slot.
        length: Tokens of the longest sequence, and of each passage.
        quality: The quality that is enough.
        of: A text file; ``None``: the default text.
        passages: Number of passages.

    Raises:
        KVPolicyError: No plan is good enough, or something cannot be measured.
    """
    prose = open_prose(PROSE if of is None else str(of))
    budgets, precisions = budgets_for(length), list(candidates.precisions)
    evicting = [
        name
        for name in candidates.evicting
        if footprint_of(
            candidates.plans_of(name, precisions[0]), budgets[0]
        ).plan.compacting_layers()
    ]
    if not evicting:
        msg = (
            f"{' and '.join(candidates.evicting)} evicts nothing, so there is no budget to choose."
        )
        raise KVPolicyError(msg)
    loaded = open_model()
    begin = perf_counter()
    compared = min(_COMPARED, length // 4)
    split: Split = "tune" if "tune" in prose.splits else "test"
    drawn = prose.passages(
        passages, [length - compared, compared], loaded.tokenizer, seed=0, split=split
    )
    meter = QualityMeter(loaded, drawn)
    found: list[tuple[Quality, Footprint, PlanOf]] = []
    with Progress(len(precisions) + len(budgets) * len(evicting)) as progress:

        def measure(name: str, budget: int | None, plan_of: PlanOf, place: int) -> Quality:
            plan = plan_of(budget or length)
            what = f"{name} with {_rows_of(budget, plan)}"

            def tell(num: int) -> None:
                progress.update(f"{what}: {num:,} of {meter.num_tokens:,} tokens", place)

            one = meter.measure(name, budget, plan, tell)
            found.append((one, footprint_of(plan_of, budget or length), plan_of))
            progress.log(f"{what}: {one.match.value:.1%}")
            return one

        good: list[tuple[int, str | None]] = []
        for place, form in enumerate(precisions):
            if form is None:
                good.append((0, form))
                continue
            plan = candidates.full(form)
            num_bytes = _kv_bytes(footprint_of(_always(plan), length))
            if plan.rows == PLAIN_ROWS:
                good.append((num_bytes, form))
            else:
                name = "+".join(spec.policy for spec in plan.stack)
                one = measure(name, None, _always(plan), place)
                good += [(num_bytes, form)] if one.match.value >= quality else []
        form = min(good)[1] if good else precisions[-1]

        def measure_evicting(name: str, budget: int) -> Quality:
            place = len(precisions) + budgets.index(budget) * len(evicting) + evicting.index(name)
            return measure(name, budget, candidates.plans_of(name, form), place)

        list(descend(measure_evicting, evicting, budgets, quality))
    measured = [one for one, *_ in found]
    sizes = {id(one): _kv_bytes(allocated) for one, allocated, _ in found}
    chosen = best(measured, quality, lambda one: sizes[id(one)])
    if chosen is None:
        most = max(measured, key=lambda one: (one.match.value, -one.output_error))
        msg = (
            f"no policy has --quality {quality:g} with up to {budgets[0]:,} of {length:,} rows; "
            f"the best is {most.policy} with {_rows_of(most.budget, most.plan)}: "
            f"{most.match.value:.4g} of {most.num_tokens:,} tokens. Give a lower quality, or other "
            "policies: --policies."
        )
        raise KVPolicyError(msg)
    return Measured(
        wanted=quality,
        best=chosen,
        plan_of=next(plan_of for one, _, plan_of in found if one is chosen),
        in_precision=partial(candidates.in_precision, chosen),
        found=[(one, allocated) for one, allocated, _ in found],
        text=f"{length:,} tokens of {prose.name}",
        passages=len(drawn),
        compared=meter.num_tokens,
        elapsed_s=perf_counter() - begin,
    )


def _always(plan: Plan) -> PlanOf:
    """The same plan for any budget."""
    return lambda _: plan


def _rows_of(budget: int | None, plan: Plan) -> str:
    """Rows that a plan keeps, and in which precision if not that of the model."""
    rows = "all rows" if budget is None else f"{budget:,} rows"
    return rows if plan.rows == PLAIN_ROWS else f"{rows} in {plan.rows}"


def _kv_bytes(one: Footprint) -> int:
    """Bytes of keys and values of a slot."""
    return sum(
        layer.rows_per_slot * layer.kv_bytes_per_row + layer.exact_bytes_per_slot
        for layer in one.layers
    )
