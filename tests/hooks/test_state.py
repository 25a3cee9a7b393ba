"""State belongs to a sequence: memory is freed with it, tracks move with its rows."""

import gc
import weakref

import attrs
import torch
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder
from strategies import costly, prompts
from tiny import shared_model
from torch import Tensor

from kvpolicy import Engine, Plan, hookimpl
from kvpolicy.state import Memory


class Note:
    """An object that supports weak references."""


@attrs.define(eq=False)
class Remembers:
    """Stores a note in the memory of every sequence and counts the new sequences."""

    notes: list[weakref.ref] = attrs.field(factory=list)
    num_sequences: int = 0

    @hookimpl
    def score(self, layer_idx: int, positions: Tensor, memory: Memory) -> Tensor:
        for notes_of_sequence in memory.of(self):
            if "note" not in notes_of_sequence:
                self.num_sequences += 1
                notes_of_sequence["note"] = Note()
                self.notes.append(weakref.ref(notes_of_sequence["note"]))
        return positions.float()

    def alive(self) -> int:
        gc.collect()
        return sum(note() is not None for note in self.notes)


def test_memory_is_freed_with_its_sequence() -> None:
    policy = Remembers()
    plan = Plan.uniform(policy, budget=6, buffer=2)
    run = Engine(shared_model(), plan=plan, slots=1).generate([[1] * 9] * 3, max_new_tokens=5)
    most = 0
    while not run.done:
        run.step()
        most = max(most, policy.alive())
    assert policy.num_sequences == 3
    assert most == 1, "with one slot, only one sequence may have memory at a time"
    assert policy.alive() == 0


def test_memory_of_a_cancelled_sequence_is_freed() -> None:
    policy = Remembers()
    plan = Plan.uniform(policy, budget=6, buffer=2)
    run = Engine(shared_model(), plan=plan).generate([[1] * 9] * 2, max_new_tokens=50)
    for _ in range(2):  # the prompts, and what they have made due
        run.step()
    assert policy.alive() == 2
    run.cancel(0)
    run.step()
    assert policy.alive() == 1
    run.cancel(1)
    run.step()
    assert policy.alive() == 0


def test_memory_does_not_persist_between_runs() -> None:
    policy = Remembers()
    engine = Engine(shared_model(), plan=Plan.uniform(policy, budget=6, buffer=2))
    for _ in range(2):
        engine.generate([[1] * 9], max_new_tokens=5).results()
    assert policy.num_sequences == 2


@attrs.define(eq=False)
class Counts:
    """Counts in memory; two instances in one stack must not share it."""

    step: int

    @hookimpl(wrapper=True)
    def score(self, layer_idx: int, memory: Memory):
        for notes_of_sequence in memory.of(self):
            notes_of_sequence[layer_idx] = notes_of_sequence.get(layer_idx, 0) + self.step
            assert notes_of_sequence[layer_idx] % self.step == 0
        return (yield)


def test_two_policies_of_one_class_have_separate_memories() -> None:
    plan = Plan.uniform("streaming", Counts(2), Counts(3), budget=6, buffer=2)
    engine = Engine(shared_model(), plan=plan)
    engine.generate([[1] * 9] * 2, max_new_tokens=12).results()


@attrs.define(eq=False)
class Marks:
    """Writes each row's position to a track and checks it at the next compaction."""

    tracks: tuple[str, ...] = ("mark",)
    num_marked: int = 0

    @hookimpl
    def score(self, positions: Tensor, tracks: object, seq_len: Tensor, memory: Memory) -> Tensor:
        marks = tracks["mark"]
        assert marks.shape == positions.shape
        assert marks.dtype == torch.float32
        for b, notes_of_sequence in enumerate(memory.of(self)):
            # Rows from the last compaction have their mark; new rows have 0.
            is_old = positions[b] < notes_of_sequence.get("seq_len", 0)
            expected = torch.where(is_old, positions[b] + 1, 0)
            assert torch.equal(marks[b], expected.float())
            self.num_marked += int(is_old.sum())
            notes_of_sequence["seq_len"] = int(seq_len[b])
        tracks["mark"] = positions.float() + 1
        # Keeps scattered rows, different ones in every head.
        heads = torch.arange(positions.shape[1])[:, None]
        return ((positions * 7 + heads * 3) % 11).float()


@costly
@given(prompts(count=4, max_len=30), st.integers(1, 4), st.integers(1, 5))
def test_tracks_move_with_their_rows(prompts: list[list[int]], slots: int, buffer: int) -> None:
    policy = Marks()
    plan = Plan.uniform(policy, Recorder(), budget=7, buffer=buffer)
    # One layer, because the memory of this policy is not per layer.
    engine = Engine(shared_model(num_layers=1), plan=plan, slots=slots, chunk=5)
    engine.generate(prompts, max_new_tokens=14).results()
    assert policy.num_marked > 0
