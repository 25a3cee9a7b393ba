"""Annotations of a sequence that is resumed."""

from typing import Any, ClassVar

import attrs
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, Request, hookimpl


@attrs.define(eq=False)
class NotesAnnotations:
    """Notes which positions it annotates."""

    tracks: ClassVar[tuple[str, ...]] = ("age",)

    annotates_in_step: bool = False
    seen: list[int] = attrs.field(factory=list, repr=False)

    @hookimpl
    def annotate(self, layer_idx: int, positions: Tensor, keys: Tensor) -> dict[str, Tensor]:
        if layer_idx == 0:
            self.seen.extend(positions.tolist())
        return {"age": positions[:, None].expand(keys.shape[:2]).float()}

    @hookimpl
    def score(self, tracks: Any) -> Tensor:
        return tracks["age"]


def test_a_resumed_sequence_is_not_annotated_again() -> None:
    policy = NotesAnnotations()
    plan = Plan.uniform(policy, budget=30, buffer=20)
    engine = Engine(shared_model(), plan=plan)
    (before,) = engine.generate([Request([5, 9, 40], 6, stop_ids=(), snapshot=True)]).results()
    assert before.snapshot is not None
    num_seen = before.snapshot.seq_len
    assert policy.seen == list(range(num_seen))
    policy.seen.clear()
    rest = Request(resume=before.snapshot, max_new_tokens=4, stop_ids=(), snapshot=True)
    (after,) = engine.generate([rest]).results()
    assert after.snapshot is not None
    assert policy.seen == list(range(num_seen, after.snapshot.seq_len))
