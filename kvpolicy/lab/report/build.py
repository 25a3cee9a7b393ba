"""A report made of runs."""

from collections.abc import Sequence

from kvpolicy.lab.report import texts
from kvpolicy.lab.report.content import group_content, labels_of, run_content
from kvpolicy.lab.report.gather import GroupView, gather
from kvpolicy.lab.report.kept_rows import PackedKept
from kvpolicy.lab.report.packing import Packed, pack_within
from kvpolicy.lab.report.page import render
from kvpolicy.lab.report.recorded import name_records, pack_recorded
from kvpolicy.lab.report.sentences import rules_for
from kvpolicy.lab.steer.rules import ThoughtRules, load_rules
from kvpolicy.lab.store.read import RunFolder

MOST_BYTES = 20_000_000
_NOTES = 2_000  # bytes kept free for the notes of a group


def build(
    runs: Sequence[RunFolder], *, rules: str | None = None, most_bytes: int = MOST_BYTES
) -> str:
    """Make the page for some runs.

    Args:
        runs: What it shows.
        rules: Name or file of the rules that tell kinds of thoughts apart; by default those of
            the task's name, or of the model's, or the published ones.
        most_bytes: What the page may take. If the texts are too long for it, the longest lose
            their middles, and the page says so; as it does if it is larger even then.

    Returns:
        The HTML; the same for the same runs.

    Raises:
        KVPolicyError: Nothing is there to show, a run is damaged, or there are no such rules.
    """
    views = gather(runs)
    chosen = [_rules(view, rules) for view in views]
    names = labels_of(views)
    series = _series(views)
    groups = [
        group_content(view, its_rules, series, name)
        for view, its_rules, name in zip(views, chosen, names, strict=True)
    ]
    _name_blocks(views, groups)
    data = {"series": series, "groups": groups, "runs": [run_content(run) for run in runs]}
    title = names[0] if len(names) == 1 else ", ".join(dict.fromkeys(run.name for run in runs))
    bare = render(title=title, data=data, blocks=[])
    room = most_bytes - len(bare.encode()) - _NOTES * len(groups)
    packed = _pack(views, chosen, room)
    recorded = pack_recorded(runs, views, room - packed.num_bytes)
    records = name_records(views, groups, recorded, len(packed.blocks))
    notes = _notes_on_size(packed, recorded, is_larger=packed.num_bytes > room)
    for view, group in zip(views, groups, strict=True):
        group["notes"] = [*_notes_on(view), *notes]
    return render(title=title, data=data, blocks=[*packed.blocks, *records])


def _series(views: Sequence[GroupView]) -> list[str]:
    """All series, those of plots first: they get the colours that plots give them."""
    cells = [cell.cell for view in views for cell in view.cells]
    ordered = sorted(cells, key=lambda cell: cell.budget is None)
    return list(dict.fromkeys(cell.series for cell in ordered))


def _rules(view: GroupView, name: str | None) -> ThoughtRules:
    return load_rules(name or rules_for(view.group.task, view.group.model))


def _pack(views: Sequence[GroupView], rules: Sequence[ThoughtRules], most_bytes: int) -> Packed:
    places = [texts.places_of(view) for view in views]

    def blocks(cap: int | None) -> list[object]:
        return [
            texts.block(view, place, its_rules, cap)
            for view, its_rules, its_places in zip(views, rules, places, strict=True)
            for place in its_places
        ]

    lengths = [length for view in views if not view.is_pooled for length in texts.lengths(view)]
    return pack_within(blocks, lengths, most_bytes)


def _name_blocks(views: Sequence[GroupView], groups: Sequence[dict[str, object]]) -> None:
    """Tell each group which blocks have its texts."""
    number = 0
    for view, group in zip(views, groups, strict=True):
        places = texts.places_of(view)
        group["blocks"] = [
            {"first": place.first, "block": number + i} for i, place in enumerate(places)
        ]
        number += len(places)


def _notes_on(view: GroupView) -> list[str]:
    num_done = len(view.samples)
    if num_done >= view.num_expected:
        return []
    return [
        f"{num_done:,} of {view.num_expected:,} samples are done: the run was interrupted, or goes "
        "on. What is shown is of these."
    ]


def _notes_on_size(packed: Packed, recorded: PackedKept, *, is_larger: bool) -> list[str]:
    notes = []
    if packed.cap is not None:
        notes.append(
            f"Of texts longer than {packed.cap:,} characters the middle is left out, so that "
            "this page stays small; the run's samples.jsonl has all of them."
        )
    if is_larger:
        notes.append(
            "This page is larger than it was to be all the same: it has too many samples. Make "
            "one page for each run, or allow more with --max-megabytes."
        )
    if recorded.num_left_out:
        notes.append(
            f"{recorded.num_left_out:,} records of kept tokens found no room in this page; the "
            "run's kept.jsonl has them."
        )
    return notes
