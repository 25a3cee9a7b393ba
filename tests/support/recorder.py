"""Policies for tests: one notes and checks what the hooks see, others misbehave on request."""

from collections.abc import Generator

import attrs
import torch
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.state import Memory


@attrs.define(eq=False)
class Compaction:
    """One compaction of one sequence in one layer."""

    layer_idx: int
    seq_len: int
    budget: int
    positions: Tensor  # [H_kv, T]
    keys: Tensor  # [H_kv, T, D]
    values: Tensor
    kept: Tensor | None = None  # positions, [H_kv, K]


@attrs.define(eq=False)
class Record:
    """All compactions of one sequence, in order."""

    compactions: list[Compaction] = attrs.field(factory=list)

    def of_layer(self, layer_idx: int) -> list[Compaction]:
        return [one for one in self.compactions if one.layer_idx == layer_idx]


@attrs.define(eq=False)
class Recorder:
    """List it last in a stack: it wraps all others and changes nothing.

    Every sequence gets a `Record`, in the order of their first compactions. At each
    compaction it checks what must hold between this one and the one before it.
    """

    records: list[Record] = attrs.field(factory=list)
    follows: bool = True  # whether rows stay what they were, which some policies see to

    @hookimpl(wrapper=True)
    def score(
        self,
        layer_idx: int,
        keys: Tensor,
        values: Tensor,
        positions: Tensor,
        seq_len: Tensor,
        budget: int,
        memory: Memory,
    ) -> Generator[None, Tensor, Tensor]:
        for b, notes in enumerate(memory.of(self)):
            if "record" not in notes:
                notes["record"] = Record()
                self.records.append(notes["record"])
            seen = Compaction(
                layer_idx,
                int(seq_len[b]),
                budget,
                positions[b].clone(),
                keys[b].clone(),
                values[b].clone(),
            )
            before = notes["record"].of_layer(layer_idx)
            if self.follows:
                check_follows(before[-1] if before else None, seen)
            notes["record"].compactions.append(seen)
        scores = yield
        return scores

    @hookimpl(wrapper=True)
    def select(
        self, layer_idx: int, positions: Tensor, memory: Memory
    ) -> Generator[None, Tensor, Tensor]:
        keep = yield
        kept = positions.gather(2, keep)
        for b, notes in enumerate(memory.of(self)):
            newest = notes["record"].of_layer(layer_idx)[-1]
            assert newest.kept is None
            newest.kept = kept[b].clone()
        return keep


def check_follows(before: Compaction | None, now: Compaction) -> None:
    """Rows are those that stayed, unchanged, and every token since: no more and no less."""
    joined = torch.arange(0 if before is None else before.seq_len, now.seq_len)
    joined = joined.expand(len(now.positions), -1)
    expected = joined if before is None else torch.cat([before.kept, joined], dim=1)
    assert torch.equal(now.positions, expected)
    if before is not None:
        stayed = torch.searchsorted(before.positions, before.kept)[..., None]
        stayed = stayed.expand(-1, -1, before.keys.shape[-1])
        num = stayed.shape[1]
        assert torch.equal(now.keys[:, :num], before.keys.gather(1, stayed))
        assert torch.equal(now.values[:, :num], before.values.gather(1, stayed))


@attrs.define(eq=False)
class Scores:
    """Answer `score` with what a function of the positions says."""

    of: object

    @hookimpl
    def score(self, positions: Tensor) -> object:
        return self.of(positions)


@attrs.define(eq=False)
class Selects:
    """Answer `select` with what a function of the scores and the budget says."""

    of: object

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> object:
        return self.of(scores, budget)
