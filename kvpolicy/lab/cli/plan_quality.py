"""What ``kvpolicy plan suggest --quality`` measures and prints of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs

from kvpolicy.cli.output import Progress, format_count, format_seconds, terminal_width
from kvpolicy.cli.text_table import format_table
from kvpolicy.engine.memory.footprint import Footprint
from kvpolicy.engine.memory.suggestion import PlanOf
from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.models import LoadedModel
from kvpolicy.lab.quality import Quality, QualityMeter, best, budgets_for, descend
from kvpolicy.lab.tasks.prose import PROSE, open_prose
from kvpolicy.lab.tasks.task import Split

_COMPARED = 64  # tokens at the end of each passage, of long ones


@attrs.frozen
class Measured:
    """What was measured, and how.

    Attributes:
        wanted: The quality that was asked for.
        best: The plan to use.
        found: All plans that were measured, each with what a slot allocates.
        text: The text.
        passages: Passages of it.
        compared: Tokens at the end of all passages that were compared.
        elapsed_s: Seconds, without those of loading the model.
    """

    wanted: float
    best: Quality
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
        headers = ["policy", "budget", "same token", "attention", "look-backs", "error", "of full"]
        rows = [
            [
                one.policy,
                f"{one.budget:,}",
                f"{one.match.value:.1%} ({100 * one.match.low:.0f}-{100 * one.match.high:.0f})",
                f"{one.retained_attention:.1%}",
                "-" if one.look_backs_held is None else f"{one.look_backs_held:.1%}",
                f"{one.output_error:.3f}",
                f"{of_one.bytes_per_slot / of_one.full_bytes_per_slot:.1%}",
                "chosen" if one == self.best else "",
            ]
            for one, of_one in self.found
        ]
        table = format_table([*headers, ""], rows, right=range(1, 7), width=terminal_width())
        return [
            f"quality     {self.best.match.value:.4g} of at least {self.wanted:.4g}: the share of "
            f"{self.compared:,} tokens for which the likeliest is that of the full cache",
            f"measured on {format_count(self.passages, 'passage')} of {self.text}, at the end of "
            f"each; {format_count(len(self.found), 'plan')} in {format_seconds(self.elapsed_s)}",
            "",
            *table.split("\n"),
        ]


def measure_candidates(
    open_model: Callable[[], LoadedModel],
    candidates: Mapping[str, PlanOf],
    footprint_of: Callable[[PlanOf, int], Footprint],
    *,
    length: int,
    quality: float,
    of: Path | None,
    passages: int,
) -> Measured:
    """Measure plans until the least budget is found that is good enough.

    Args:
        open_model: Loads the model.
        candidates: Makes the plan of some policies for a budget, by their name.
        footprint_of: What a plan allocates for one slot.
        length: Tokens of the longest sequence, and of each passage.
        quality: The quality that is enough.
        of: A text file; ``None``: the default text.
        passages: Number of passages.

    Raises:
        KVPolicyError: No plan is good enough, or something cannot be measured.
    """
    prose = open_prose(PROSE if of is None else str(of))
    budgets = budgets_for(length)
    evicting = [
        name
        for name, one in candidates.items()
        if footprint_of(one, budgets[0]).plan.compacting_layers()
    ]
    if not evicting:
        msg = f"{' and '.join(candidates)} evicts nothing, so there is no budget to choose."
        raise KVPolicyError(msg)
    loaded = open_model()
    begin = perf_counter()
    compared = min(_COMPARED, length // 4)
    split: Split = "tune" if "tune" in prose.splits else "test"
    drawn = prose.passages(
        passages, [length - compared, compared], loaded.tokenizer, seed=0, split=split
    )
    meter = QualityMeter(loaded, drawn)
    found: list[tuple[Quality, Footprint]] = []
    with Progress(len(budgets) * len(evicting)) as progress:

        def measure(name: str, budget: int) -> Quality:
            place = budgets.index(budget) * len(evicting) + evicting.index(name)

            def tell(num: int) -> None:
                doing = f"{name} with {budget:,} rows: {num:,} of {meter.num_tokens:,} tokens"
                progress.update(doing, place)

            return meter.measure(name, budget, candidates[name](budget), tell)

        for one in descend(measure, evicting, budgets, quality):
            found.append((one, footprint_of(candidates[one.policy], one.budget)))
            progress.log(f"{one.policy} with {one.budget:,} rows: {one.match.value:.1%}")
    chosen = best([one for one, _ in found], quality)
    if chosen is None:
        most = max((one for one, _ in found), key=lambda one: (one.match.value, -one.output_error))
        msg = (
            f"no policy has --quality {quality:g} with up to {budgets[0]:,} of {length:,} rows; "
            f"the best is {most.policy} with {most.budget:,} rows: {most.match.value:.4g} of "
            f"{most.num_tokens:,} tokens. Give a lower quality, or other policies: --policies."
        )
        raise KVPolicyError(msg)
    return Measured(
        wanted=quality,
        best=chosen,
        found=found,
        text=f"{length:,} tokens of {prose.name}",
        passages=len(drawn),
        compared=meter.num_tokens,
        elapsed_s=perf_counter() - begin,
    )
