"""Rings keep the states of tokens that nobody has taken, wherever steps are run."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import seeds

from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.rings import LAST_STATES, StateRing
from kvpolicy.cache.shape import LayerShape, Slab
from kvpolicy.cache.static_step import Continuation, StaticStep
from kvpolicy.engine.requests.request import Sampling

SLOTS, SIZE, HIDDEN = 3, 4, 5
CPU = torch.device("cpu")


def ring_of_slots() -> tuple[KVCache, StateRing]:
    cache = KVCache([LayerShape(2, 2, 4, torch.float32, CPU)] * 2, [Slab(50)] * 2, SLOTS)
    places = {1: CPU, LAST_STATES: CPU}
    return cache, StateRing(cache, SIZE, HIDDEN, torch.float32, places)


@given(seeds, st.lists(st.sampled_from(["static", "eager", "take"]), max_size=30))
def test_states_come_in_the_order_of_their_tokens(seed: int, actions: list[str]) -> None:
    cache, ring = ring_of_slots()
    step = StaticStep(cache, rings=[ring])
    rng = torch.Generator().manual_seed(seed)
    going_on = [Continuation(1000, frozenset(), Sampling())] * SLOTS
    taken = [0] * SLOTS
    wanted: dict[int, list[list[torch.Tensor]]] = {
        place: [[] for _ in range(SLOTS)] for place in ring.tensors
    }
    for action in actions:
        width = int(torch.randint(1, SLOTS + 1, (), generator=rng))
        if action == "take" or any(len(one) == SIZE for one in wanted[LAST_STATES]):
            for slot in range(SLOTS):
                for place, states in wanted.items():
                    found = ring.take(slot, len(states[slot]), place)
                    assert found.tolist() == [state.tolist() for state in states[slot]]
                    states[slot].clear()
                taken[slot] = int(cache.seq_len[slot])
            continue
        new = {place: torch.randn(width, HIDDEN, generator=rng) for place in wanted}
        if action == "static":
            step.begin([7] * width, going_on[:width], [taken[:width]])
            step.keep_states(1, new[1])
            step.keep_states(0, new[1])  # of which no ring wants states
            step.finish(torch.zeros(width, 10), new[LAST_STATES][:, None])
            step.count([True] * width)
            step.note_tokens([0] * width, [True] * width)
        else:
            pending = [int(cache.seq_len[slot]) - taken[slot] for slot in range(width)]
            for place, states in new.items():
                ring.note(range(width), pending, states, place)
            cache.count(range(width), 1)
        for place, states in new.items():
            for slot in range(width):
                wanted[place][slot].append(states[slot])


def test_what_takes_no_part_in_a_step_keeps_its_states() -> None:
    cache, ring = ring_of_slots()
    ring.put(1, torch.ones(2, HIDDEN))
    before = ring.tensors[LAST_STATES].clone()
    step = StaticStep(cache, rings=[ring])
    with step.idle(SLOTS):
        step.finish(torch.zeros(SLOTS, 10), torch.full((SLOTS, 1, HIDDEN), 9.0))
    assert torch.equal(ring.tensors[LAST_STATES], before)


def test_states_move_and_leave_with_their_slot() -> None:
    cache, ring = ring_of_slots()
    ring.put(2, torch.ones(2, HIDDEN), 1)
    cache.move(2, 0)
    assert ring.take(0, 2, 1).tolist() == [[1] * HIDDEN] * 2
    assert not ring.tensors[1][1:].any()
