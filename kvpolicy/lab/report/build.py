"""Building the report of some runs."""

import itertools
from collections.abc import Sequence

from kvpolicy.lab.looks import looks_of, policy_of
from kvpolicy.lab.report.content import group_content, labels_of, run_content
from kvpolicy.lab.report.gather import GroupView, gather
from kvpolicy.lab.report.kept_rows import PackedKept, number_records, pack_recorded
from kvpolicy.lab.report.page import render
from kvpolicy.lab.report.texts import (
    Packed,
    item_ranges,
    pack_within,
    text_block,
    text_lengths,
)
from kvpolicy.lab.steer.thoughts import ThoughtRules, load_rules, rules_for
from kvpolicy.lab.store.read import RunFolder

MAX_BYTES = 20_000_000
_NOTE_BYTES = 2_000  # reserved for the notes of a group


def build(
    runs: Sequence[RunFolder], *, rules: str | None = None, max_bytes: int = MAX_BYTES
) -> str:
    """Build the page for some runs.

    Args:
        runs: The runs.
        rules: Name or file of the rules that classify thoughts; by default those named like the
            task, or like the model, or the published ones.
        max_bytes: Size limit of the page. If texts are too long for it, the longest lose their
            middles. The page says so, and also if it is larger than the limit all the same.

    Returns:
        The HTML; the same for the same runs.

    Raises:
        KVPolicyError: No run has a sample, a run is damaged, or the rules do not exist.
    """
    views = gather(runs)
    view_rules = [_rules(view, rules) for view in views]
    names = labels_of(views)
    policies = _policies(views)
    series = list(policies)
    looks = [look.to_dict() for look in looks_of(policies).values()]
    groups = [
        group_content(view, its_rules, series, name)
        for view, its_rules, name in zip(views, view_rules, names, strict=True)
    ]
    ranges = [item_ranges(view) for view in views]
    numbers = itertools.count()
    for group, items in zip(groups, ranges, strict=True):
        group["blocks"] = [{"first": one.start, "block": next(numbers)} for one in items]
    data = {
        "series": series,
        "looks": looks,
        "groups": groups,
        "runs": [run_content(run) for run in runs],
    }
    title = names[0] if len(names) == 1 else ", ".join(dict.fromkeys(run.name for run in runs))
    without_texts = render(title=title, data=data, blocks=[])
    free = max_bytes - len(without_texts.encode()) - _NOTE_BYTES * len(groups)

    def blocks(cap: int | None) -> list[object]:
        return [
            text_block(view, items, its_rules, cap)
            for view, its_rules, view_ranges in zip(views, view_rules, ranges, strict=True)
            for items in view_ranges
        ]

    lengths = [length for view in views if not view.is_pooled for length in text_lengths(view)]
    packed = pack_within(blocks, lengths, free)
    recorded = pack_recorded(runs, views, free - packed.num_bytes)
    records = number_records(views, groups, recorded, len(packed.blocks))
    notes = _size_notes(packed, recorded, is_larger=packed.num_bytes > free)
    for view, group in zip(views, groups, strict=True):
        group["notes"] = [*_incomplete_notes(view), *notes]
    return render(title=title, data=data, blocks=[*packed.blocks, *records])


def _policies(views: Sequence[GroupView]) -> dict[str, str]:
    """All series, each with the policy that gives it its colour."""
    policies: dict[str, str] = {}
    for record in (cell.record for view in views for cell in view.cells):
        policies.setdefault(record.series, policy_of(record.resolved))
    return policies


def _rules(view: GroupView, name: str | None) -> ThoughtRules:
    return load_rules(name or rules_for(view.group.task, view.group.model))


def _incomplete_notes(view: GroupView) -> list[str]:
    num_done = len(view.samples)
    if num_done >= view.num_expected:
        return []
    return [
        f"{num_done:,} of {view.num_expected:,} samples are done: the run was interrupted or is "
        "still running. The page shows these samples."
    ]


def _size_notes(packed: Packed, recorded: PackedKept, *, is_larger: bool) -> list[str]:
    notes = []
    if packed.cap is not None:
        notes.append(
            f"The middle of texts longer than {packed.cap:,} characters is left out to keep this "
            "page small; the run's samples.jsonl has the whole texts."
        )
    if is_larger:
        notes.append(
            "This page is larger than its limit, because it has too many samples. Make one page "
            "for each run, or raise the limit with --max-megabytes."
        )
    if recorded.num_left_out:
        notes.append(
            f"{recorded.num_left_out:,} records of kept tokens did not fit into this page; the "
            "run's kept.jsonl has them."
        )
    return notes
