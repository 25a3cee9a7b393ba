"""What a hook is lent, and what became of it when it has answered."""

from typing import Any

import torch
from torch import Tensor

from kvpolicy.cache.rows import LayerRows, Tracks

# What was expected and what came; None if nothing is wrong.
Problem = tuple[str, str] | None


class CopyingTracks:
    """Tracks whose numbers are always copies, so that a change in place is noticed."""

    def __init__(self, tracks: Tracks) -> None:
        self._tracks = tracks
        self._lent: list[tuple[str, Tensor, Tensor]] = []
        self._assigned: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        numbers = self._tracks[name].clone()
        self._lent.append((name, numbers, numbers.clone()))
        return numbers

    def __setitem__(self, name: str, values: Tensor) -> None:
        self._assigned.add(name)
        self._tracks[name] = values

    def problem(self) -> Problem:
        """A track that was changed where it is, and not assigned to."""
        for name, now, before in self._lent:
            if name not in self._assigned and not torch.equal(now, before):
                came = f'tracks["{name}"] was changed in place, which is lost for some batches'
                return f'tracks["{name}"] = NEW', came
        return None


class RowsSnapshot:
    """The rows of a compaction before `evict`, to see what became of them.

    What travels with them is looked at when the policy calls `LayerRows.keep`: before that, it
    may give the rows new numbers.
    """

    def __init__(self, rows: LayerRows, keep: Tensor) -> None:
        self._rows, self._keep = rows, keep
        self._positions = rows.positions.gather(2, keep)
        self._tracks: dict[str, Tensor] = {}
        self._go_on = rows.keep
        rows.keep = self._note_and_keep  # type: ignore[method-assign]

    def _note_and_keep(self, keep: Tensor, **replaced: Tensor | None) -> None:
        names = self._rows._layer.tracks
        self._tracks = {name: self._rows.track(name).gather(2, keep).clone() for name in names}
        self._go_on(keep, **replaced)

    def problems(self) -> dict[str, Problem]:
        """What is wrong, by clause."""
        rows, num = self._rows, self._keep.shape[2]
        problems: dict[str, Problem] = {"eviction": None}
        now = rows.positions[:, :, :num]
        if not torch.equal(now, self._positions):
            expected = f"positions {self._positions[0].tolist()} after evict()"
            problems["eviction"] = (expected, f"{now[0].tolist()}")
        elif not (rows.keys.isfinite().all() and rows.values.isfinite().all()):
            problems["nan"] = ("finite keys and values after evict()", "NaN or inf among them")
        for name, before in self._tracks.items():
            now = rows.track(name)[:, :, :num]
            problem = None
            if not torch.equal(now, before):
                expected = (
                    f"track '{name}' {before[0].tolist()} after evict(), as before rows.keep()"
                )
                problem = (expected, f"{now[0].tolist()}")
            problems["tracks"] = problems.get("tracks") or problem
        return problems


def nan_in(change: Tensor | list[Tensor] | None) -> Problem:
    """NaN among the changes that `steer` answered with."""
    changes = change if isinstance(change, list) else [change]
    bad = any(one is not None and bool(one.isnan().any()) for one in changes)
    return ("a change without NaN", "NaN in the answer to steer()") if bad else None


def clause_of(hook: str, answer: object, arguments: dict[str, Any]) -> str:
    """Which clause a forbidden answer breaks."""
    if hook == "schedule":
        return "schedule"
    if hook == "evict":
        return "eviction"
    if hook == "score" and isinstance(answer, Tensor) and answer.is_floating_point():
        same = answer.shape == arguments["positions"].shape
        return "nan" if same and bool(answer.isnan().any()) else "answers"
    if hook == "select" and isinstance(answer, Tensor) and answer.dtype == torch.int64:
        scores = arguments["scores"]
        if answer.ndim == 3 and answer.shape[:2] == scores.shape[:2]:
            if answer.shape[2] > min(arguments["budget"], scores.shape[2]):
                return "budget"
            rising = bool((answer.diff(dim=2) > 0).all())
            return "answers" if rising else "order"
    return "answers"
