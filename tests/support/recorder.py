"""Policies for tests: one records and checks hook arguments, others return given answers."""

from collections.abc import Generator
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from kvpolicy import hookimpl
from kvpolicy.state import Memory, Registers


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
    """Records all compactions. Last in a stack, it wraps all other policies and changes nothing.

    Every sequence gets a `Record`, in the order of first compactions. Each compaction is checked
    against the previous one of its sequence and layer.
    """

    records: list[Record] = attrs.field(factory=list)
    follows: bool = True  # whether to check that rows are unchanged; some policies rewrite them

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
    """Check that the rows are the kept ones, unchanged, and every token since, and no others."""
    new_positions = torch.arange(0 if before is None else before.seq_len, now.seq_len)
    new_positions = new_positions.expand(len(now.positions), -1)
    expected = new_positions if before is None else torch.cat([before.kept, new_positions], dim=1)
    assert torch.equal(now.positions, expected)
    if before is not None:
        kept_index = torch.searchsorted(before.positions, before.kept)[..., None]
        kept_index = kept_index.expand(-1, -1, before.keys.shape[-1])
        num = kept_index.shape[1]
        assert torch.equal(now.keys[:, :num], before.keys.gather(1, kept_index))
        assert torch.equal(now.values[:, :num], before.values.gather(1, kept_index))


@attrs.define(eq=False)
class Scores:
    """Implements `score` by a function of the positions."""

    of: object

    @hookimpl
    def score(self, positions: Tensor) -> object:
        return self.of(positions)


@attrs.define(eq=False)
class Selects:
    """Implements `select` by a function of the scores and the budget."""

    of: object

    @hookimpl
    def select(self, scores: Tensor, budget: int) -> object:
        return self.of(scores, budget)


@attrs.define(eq=False)
class RecordsAndSteers:
    """Steers by the observed tokens; records tokens and states of each sequence."""

    registers: ClassVar[tuple[str, ...]] = ("sum",)
    seen: dict[tuple[int, ...], list[Any]] = attrs.field(factory=dict)

    @hookimpl
    def observe(
        self,
        token_ids: Tensor,
        hidden_states: Tensor,
        start: int,
        prompt_len: int,
        tokenizer: Any,
        registers: Registers,
        memory: Memory,
    ) -> None:
        (notes,) = memory.of(self)
        tokens = notes.setdefault("tokens", [])
        assert start == len(tokens)
        assert len(hidden_states) == len(token_ids)
        tokens += token_ids.tolist()
        self.seen.setdefault(tuple(tokens[:prompt_len]), notes)
        notes["text"] = tokenizer.decode(tokens)
        notes.setdefault("states", []).append(hidden_states.double().norm(dim=-1))
        registers.of(self)["sum"][:] = float(sum(tokens) % 7) - 3

    @hookimpl
    def steer(self, hidden_states: Tensor, token_ids: Tensor, registers: Registers) -> Tensor:
        strength = registers.of(self)["sum"] + token_ids % 2
        return 0.3 * strength[:, None].to(hidden_states.dtype) * hidden_states.sin()


class InterruptsResuming:
    """Remembers something of each sequence, and interrupts the program when it is restored."""

    @hookimpl
    def observe(self, token_ids: Tensor, memory: Memory) -> None:
        (notes,) = memory.of(self)
        notes["seen"] = len(token_ids)

    def pack_memory(self, memory: dict[str, int]) -> dict[str, int]:
        return memory

    def unpack_memory(self, packed: dict[str, int], tokenizer: Any) -> dict[str, int]:
        raise KeyboardInterrupt
