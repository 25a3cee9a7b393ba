"""No bundled policy makes the host wait in a compaction; waits elsewhere are counted."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from strategies import SMALL_KNOBS
from tiny import shared_model
from torch import Tensor
from waits import Waits

from kvpolicy import Engine, Plan, hookimpl, installed_policies
from kvpolicy.cache.kv_cache import KVCache
from kvpolicy.cache.shape import LayerShape
from kvpolicy.engine.compaction import DueSlot
from kvpolicy.engine.evictor import Evictor
from kvpolicy.engine.requests.isolation import ErrorScope
from kvpolicy.engine.requests.request import Request
from kvpolicy.engine.requests.sequence import Sequence
from kvpolicy.hooks.stack import Stack
from kvpolicy.hooks.timing import PolicyTimings
from kvpolicy.plan.spec import PolicySpec
from kvpolicy.state import Bound, LayerWeights

BUDGET, BUFFER, NUM_LAYERS, NUM_SLOTS = 14, 6, 3, 4
META = torch.device("meta")  # no tensor has values: what reads one raises

# Policies that evict; seal and the batches only steer and schedule.
CASES = [
    (policy.name, knobs)
    for policy in installed_policies()
    for knobs in SMALL_KNOBS.get(policy.name, ({},))
    if policy.name not in ("seal", "full", "skipkv_batches")
]


def compaction(
    *stack: str | PolicySpec | object,
    slots: list[int],
    window: int | None = None,
    prepare: Callable[[Stack, list[Sequence]], None] = lambda *_: None,
) -> Waits:
    """Compact slots of all layers of a cache whose tensors are on a device without values."""
    specs = [PolicySpec.of(one) for one in stack]
    policies = Stack([(spec.policy, spec.build()) for spec in specs])
    shape = LayerShape(4, 2, 8, torch.bfloat16, META, window)
    rows = BUDGET + BUFFER
    cache = KVCache([shape] * NUM_LAYERS, [policies.slab(rows)] * NUM_LAYERS, NUM_SLOTS)
    cache.rotate = lambda layer_idx, keys, by: keys
    cache.rows[:], cache.seq_len[:] = rows, 50
    eviction = Evictor(cache, (), (), PolicyTimings(), ErrorScope("raise"), bound=bound(policies))
    assert eviction.defers
    prompt = (0,) * 9
    sequences = [
        Sequence(slot, Request(prompt), prompt, 99, frozenset(), slot=slot) for slot in slots
    ]
    due = [
        DueSlot(layer_idx, seq, policies, BUDGET)
        for layer_idx in range(NUM_LAYERS)
        for seq in sequences
    ]
    prepare(policies, sequences)
    with Waits("meta") as waits:
        eviction.compact(due)
    assert (cache.rows[:, slots] == BUDGET).all()
    assert eviction._late, "no answer was kept for a later check"
    return waits


def bound(policies: Stack) -> list[Bound]:
    """What policies make of a layer's weights, of every layer; the rotation is none."""
    weights = LayerWeights(
        q=torch.empty(4, 8, 32, device=META),
        k=torch.empty(2, 8, 32, device=META),
        v=torch.empty(2, 8, 32, device=META),
        o=torch.empty(4, 32, 8, device=META),
        scaling=8**-0.5,
        rotate=lambda heads, by: heads,
    )
    return [policies.bind(layer_idx, weights) for layer_idx in range(NUM_LAYERS)]


@pytest.mark.few(12)
@pytest.mark.parametrize("slots", [[2], [0, 1, 3]])
@pytest.mark.parametrize(("name", "knobs"), CASES, ids=str)
def test_a_compaction_of_a_bundled_policy_does_not_wait(
    name: str, knobs: dict[str, Any], slots: list[int]
) -> None:
    assert compaction(PolicySpec(name, knobs), slots=slots).total == 0


@pytest.mark.parametrize("add_on", ["merge", "rerotate", "protect"])
def test_a_compaction_with_an_add_on_in_a_sliding_window_does_not_wait(add_on: str) -> None:
    assert compaction("h2o", add_on, slots=[0, 2], window=30).total == 0


def test_skipkv_with_sentences_does_not_wait() -> None:
    def prepare(stack: Stack, sequences: list[Sequence]) -> None:
        (policy,) = stack.policies
        for seq in sequences:
            state = policy._new_state(None, len(seq.prompt))
            state._penalty = torch.zeros(40, device=META)  # of redundant sentences, by position
            seq.memory.of(policy)["state"] = state

    knobs = {"delimiters": (3, 7), "window_size": 4, "protect_prompt": True}
    assert compaction(PolicySpec("skipkv", knobs), slots=[0, 2], prepare=prepare).total == 0


class Reads:
    """Scores in a way that makes the host wait."""

    def __init__(self, read: Any) -> None:
        self.read = read

    @hookimpl
    def score(self, keys: Tensor) -> Tensor:
        scores = keys.float().norm(dim=-1)
        self.read(scores)
        return scores


WAITING = {
    "a number": lambda scores: scores.sum().item(),
    "a truth value": lambda scores: bool(scores.any()),
    "a mask": lambda scores: scores[scores > 1],
    "places": lambda scores: (scores > 1).nonzero(),
    "assigning by a mask": lambda scores: scores.__setitem__(scores > 1, 0.0),
    "a copy to the device": lambda scores: torch.arange(3).to(scores.device),
}


@pytest.mark.parametrize("read", WAITING.values(), ids=WAITING)
def test_what_waits_is_counted(read: Any) -> None:
    # There is no value to read.
    with suppress(RuntimeError, NotImplementedError), Waits("meta") as waits:
        read(torch.ones(2, 3, device=META))
    assert waits.total == 1, waits.counted


def test_copies_for_which_nobody_waits_are_not_counted() -> None:
    with Waits("meta") as waits:
        index = torch.arange(3).to(META, non_blocking=True)
        rows = torch.ones(5, 4, device=META)
        rows.index_select(0, index)
        rows[index] = 0
        rows[1:3].masked_fill(rows[1:3] > 1, 0).sort()
        torch.ones(3).add(1).sum().item()  # of the host
    assert waits.total == 0, waits.counted


def test_a_compaction_on_a_cpu_reads_what_it_checks() -> None:
    engine = Engine(shared_model(), plan=Plan.uniform("rkv", budget=16, buffer=4))
    run = engine.generate([list(range(16))], max_new_tokens=9, stop_ids=())
    counted = []
    while not run.done:
        before = run.evictor.num_compactions
        with Waits("cpu") as waits:
            run.step()
        counted.append((run.evictor.num_compactions - before, waits.total))
    plain = [total for num, total in counted[1:] if not num]
    compacting = [total for num, total in counted[1:] if num]
    assert compacting
    assert min(compacting) > max(plain)
