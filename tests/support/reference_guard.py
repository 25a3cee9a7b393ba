"""Guard and Belady in plain loops over lists, from the paper's description; nothing of kvpolicy."""

from collections.abc import Sequence
from random import Random

NEVER = 10**9


def next_request(trace: Sequence[int], now: int) -> int:
    """When the block of request ``now`` is asked for again."""
    for later in range(now + 1, len(trace)):
        if trace[later] == trace[now]:
            return later
    return NEVER


def belady_misses(trace: Sequence[int], capacity: int) -> int:
    """The fewest misses there can be."""
    stored: list[int] = []
    misses = 0
    for now, block in enumerate(trace):
        if block in stored:
            continue
        misses += 1
        if len(stored) == capacity:
            rest = list(trace[now:])
            gone = max(stored, key=lambda one: rest.index(one) if one in rest else NEVER)
            stored.remove(gone)
        stored.append(block)
    return misses


def guard_hits(
    trace: Sequence[int], predictions: Sequence[float], capacity: int, seed: int
) -> list[bool]:
    """Guard around an eviction of the latest prediction; the first place among equals."""
    rng = Random(seed)
    places: list[int] = []  # the block of each place
    latest: dict[int, float] = {}
    old: list[int] = []  # places from before the phase that have not been asked for
    guarded: list[int] = []
    evicted: list[int] = []
    hits = []
    for now, block in enumerate(trace):
        hits.append(block in places)
        if block in places:
            place = places.index(block)
        elif len(places) < capacity:
            places.append(block)
            place = len(places) - 1
        else:
            if not old:
                old, guarded, evicted = list(range(capacity)), [], []
            if block in evicted:
                rng.random()  # drawn for relaxation, which there is none of
                place = rng.choice(old)
                guarded.append(place)
            else:
                place = -1
                for candidate in range(capacity):
                    if candidate in guarded:
                        continue
                    if place < 0 or latest[places[candidate]] > latest[places[place]]:
                        place = candidate
            evicted.append(places[place])
            places[place] = block
        if place in old:
            old.remove(place)
        latest[block] = predictions[now]
    return hits
