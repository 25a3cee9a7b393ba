"""State belongs to the sequence: memory ends with it, tracks travel with its rows."""

import gc
import weakref

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder
from strategies import prompts
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.state import Memory


class Note:
    """Something weakly referable to keep in a memory."""


@attrs.define(eq=False)
class Remembers:
    """Puts a note into the memory of every sequence, and counts how often it met it."""

    notes: list[weakref.ref] = attrs.field(factory=list)
    first_meetings: int = 0

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor, memory: Memory) -> Tensor:
        for mine in memory.of(self):
            if "note" not in mine:
                self.first_meetings += 1
                mine["note"] = Note()
                self.notes.append(weakref.ref(mine["note"]))
        return positions.float()

    def alive(self) -> int:
        gc.collect()
        return sum(note() is not None for note in self.notes)


def test_memory_ends_with_its_sequence_and_not_with_the_run() -> None:
    policy = Remembers()
    plan = Plan.uniform(policy, budget=6, buffer=2)
    run = Engine(shared_model(), plan=plan, slots=1).generate([[1] * 9] * 3, max_new_tokens=5)
    most = 0
    while not run.done:
        run.step()
        most = max(most, policy.alive())
    assert policy.first_meetings == 3
    assert most == 1, "with one slot, one sequence at a time has a memory"
    assert policy.alive() == 0


def test_memory_of_a_cancelled_sequence_ends_too() -> None:
    policy = Remembers()
    plan = Plan.uniform(policy, budget=6, buffer=2)
    run = Engine(shared_model(), plan=plan).generate([[1] * 9] * 2, max_new_tokens=50)
    run.step()
    assert policy.alive() == 2
    run.cancel(0)
    run.step()
    assert policy.alive() == 1
    run.cancel(1)
    run.step()
    assert policy.alive() == 0


def test_nothing_is_remembered_from_one_run_to_the_next() -> None:
    policy = Remembers()
    engine = Engine(shared_model(), plan=Plan.uniform(policy, budget=6, buffer=2))
    for _ in range(2):
        engine.generate([[1] * 9], max_new_tokens=5).results()
    assert policy.first_meetings == 2


@attrs.define(eq=False)
class Counts:
    """Two of these in one stack must not see each other's notes."""

    step: int

    @hookimpl(wrapper=True)
    def score(self, layer_idx: int, memory: Memory):
        for mine in memory.of(self):
            mine[layer_idx] = mine.get(layer_idx, 0) + self.step
            assert mine[layer_idx] % self.step == 0
        return (yield)


def test_two_policies_of_one_class_have_memories_of_their_own() -> None:
    plan = Plan.uniform("streaming", Counts(2), Counts(3), budget=6, buffer=2)
    engine = Engine(shared_model(), plan=plan)
    engine.generate([[1] * 9] * 2, max_new_tokens=12).results()


@attrs.define(eq=False)
class Marks:
    """Writes each token's position beside its row, and checks what it finds there."""

    tracks: tuple[str, ...] = ("mark",)
    num_marked: int = 0

    @hookimpl
    def score(self, positions: Tensor, tracks: object, seq_len: Tensor, memory: Memory) -> Tensor:
        marks = tracks["mark"]
        assert marks.shape == positions.shape
        assert marks.dtype == torch.float32
        for b, mine in enumerate(memory.of(self)):
            # A row that was here at the last compaction carries its mark, a new one none.
            is_old = positions[b] < mine.get("seq_len", 0)
            expected = torch.where(is_old, positions[b] + 1, 0)
            assert torch.equal(marks[b], expected.float())
            self.num_marked += int(is_old.sum())
            mine["seq_len"] = int(seq_len[b])
        tracks["mark"] = positions.float() + 1
        # Scattered rows stay, others in every head.
        heads = torch.arange(positions.shape[1])[:, None]
        return ((positions * 7 + heads * 3) % 11).float()


@given(prompts(count=4, max_len=30), st.integers(1, 4), st.integers(1, 5))
def test_tracks_travel_with_their_rows(prompts: list[list[int]], slots: int, buffer: int) -> None:
    policy = Marks()
    plan = Plan.uniform(policy, Recorder(), budget=7, buffer=buffer)
    # One layer: the memory of this policy does not tell layers apart.
    engine = Engine(shared_model(num_layers=1), plan=plan, slots=slots, chunk=5)
    engine.generate(prompts, max_new_tokens=20).results()
    assert policy.num_marked > 0
