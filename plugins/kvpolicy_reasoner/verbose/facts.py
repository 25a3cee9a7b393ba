"""Draw the facts of one problem of the second task: second operands may be derived themselves.

A chain ``c0 .. cD`` starts at a leaf fact; every later member is its predecessor plus or minus a
constant, a side leaf, or a side value that a step of its own works out. A name that is derived is
either in the chain or a side value, and never both, so that what a step waits for can be told from
its definition alone.
"""

import random

from kvpolicy_reasoner.facts import (
    CONSTANTS,
    MAX_VALUE,
    NAMES,
    Difficulty,
    Fact,
    FactSheet,
    derive,
    draw_distractor,
    draw_leaf,
)

MAX_SIDE_STEPS = 2

_KINDS = {"constant": 40, "leaf": 25, "derived": 25, "shared": 10}


def draw_sheet_with_side_steps(rng: random.Random, difficulty: Difficulty) -> FactSheet:
    """Draw the facts of one problem.

    Args:
        rng: Source of all randomness.
        difficulty: Ranges of depth and number of facts, both drawn uniformly.

    Returns:
        The chain, its sides (leaves and derived) and the distractors, all with distinct names.
    """
    names = rng.sample(NAMES, len(NAMES))
    depth = rng.randint(difficulty.min_depth, difficulty.max_depth)
    num_facts = rng.randint(difficulty.min_facts, difficulty.max_facts)

    chain = [draw_leaf(rng, names.pop())]
    sides: list[Fact] = []
    for _ in range(depth):
        chain.append(_chain_step(rng, names, chain[-1], sides))

    distractors: list[Fact] = []
    while len(chain) + len(sides) + len(distractors) < num_facts:
        needed = [*chain, *sides]
        distractors.append(draw_distractor(rng, names.pop(), needed, distractors))
    return FactSheet(tuple(chain), tuple(sides), tuple(distractors))


def _chain_step(rng: random.Random, names: list[str], previous: Fact, sides: list[Fact]) -> Fact:
    """Draw the next member of the chain; facts that it needs are added to ``sides``."""
    name = names.pop()
    worked_out = [(side.name, side.value) for side in sides if side.first is not None]
    possible = {
        "constant": True,
        "leaf": True,
        "derived": len(worked_out) < MAX_SIDE_STEPS,
        "shared": bool(worked_out),
    }
    kinds = {kind: weight for kind, weight in _KINDS.items() if possible[kind]}
    (kind,) = rng.choices(list(kinds), weights=list(kinds.values()))
    if kind == "shared":
        step = derive(rng, name, previous, worked_out)
        if step is not None:
            return step
    if kind in ("leaf", "derived"):
        side_name = names.pop()
        step = derive(rng, name, previous, [(side_name, n) for n in range(MAX_VALUE + 1)])
        assert step is not None  # the value 0 always fits
        value = abs(step.value - previous.value)
        sides += _side_step(rng, names, side_name, value) if kind == "derived" else []
        sides += [Fact(side_name, value)] if kind == "leaf" else []
        return step
    step = derive(rng, name, previous, [(n, n) for n in CONSTANTS])
    assert step is not None  # one of +1 and -1 always fits
    return step


def _side_step(rng: random.Random, names: list[str], name: str, value: int) -> list[Fact]:
    """Draw a definition for a side value, and the leaf that it builds on."""
    leaf = names.pop()
    fitting = [
        (Fact(name, value, leaf, sign, n), Fact(leaf, start))
        for n in CONSTANTS
        for sign, start in (("+", value - n), ("-", value + n))
        if 0 <= start <= MAX_VALUE
    ]
    return list(rng.choice(fitting))
