"""Draw the facts of one problem: a chain of definitions, its side facts, and distractors.

A chain ``c0 .. cD`` starts at a leaf fact; every later member is its predecessor plus or minus a
constant, a side leaf, or an earlier member. All values stay between 0 and `MAX_VALUE`.
"""

import random
from collections.abc import Iterable

import attrs

MAX_VALUE = 20
NAMES = [
    "rent",
    "fuel",
    "tea",
    "milk",
    "rice",
    "salt",
    "corn",
    "wool",
    "silk",
    "iron",
    "gold",
    "tin",
    "coal",
    "wood",
    "sand",
    "clay",
    "glass",
    "paper",
    "ink",
    "rope",
    "oil",
    "soap",
    "wax",
    "fish",
    "meat",
    "bread",
    "cake",
    "honey",
    "sugar",
    "plum",
    "pear",
    "fig",
    "oak",
    "pine",
    "birch",
    "rose",
    "lily",
    "moss",
    "fern",
    "hay",
]

CONSTANTS = range(1, 10)


@attrs.frozen
class Difficulty:
    """How deep the chain of a problem may be and how many facts surround it.

    Attributes:
        min_depth: Fewest derivation steps.
        max_depth: Most derivation steps.
        min_facts: Fewest facts in the prompt.
        max_facts: Most facts, unless the chain alone needs more.
    """

    min_depth: int
    max_depth: int
    min_facts: int
    max_facts: int


@attrs.frozen
class Fact:
    """One sentence of the prompt; a leaf when it has no operands.

    Attributes:
        name: What the fact defines.
        value: The number the name stands for.
        first: Name of the first operand; none in a leaf.
        sign: ``+`` or ``-``; none in a leaf.
        second: Name or constant that is the second operand; none in a leaf.
    """

    name: str
    value: int
    first: str | None = None
    sign: str | None = None
    second: str | int | None = None

    @property
    def text(self) -> str:
        """The sentence as it stands in the prompt, with its leading space."""
        if self.first is None:
            return f" {self.name} is {self.value}."
        return f" {self.name} = {self.first} {self.sign} {self.second}."


@attrs.frozen
class FactSheet:
    """The facts of a problem before they are shuffled into a prompt.

    Attributes:
        chain: The facts to derive, from the leaf to the one asked for.
        sides: Leaves that the chain uses as second operands.
        distractors: Facts that the answer does not depend on.
    """

    chain: tuple[Fact, ...]
    sides: tuple[Fact, ...]
    distractors: tuple[Fact, ...]

    @property
    def facts(self) -> list[Fact]:
        """All facts, unshuffled."""
        return [*self.chain, *self.sides, *self.distractors]


def draw_fact_sheet(rng: random.Random, difficulty: Difficulty) -> FactSheet:
    """Draw the facts of one problem.

    Args:
        rng: Source of all randomness.
        difficulty: Ranges of depth and number of facts, both drawn uniformly.

    Returns:
        The chain, its side leaves and the distractors, all with distinct names.
    """
    names = rng.sample(NAMES, len(NAMES))
    depth = rng.randint(difficulty.min_depth, difficulty.max_depth)
    num_facts = rng.randint(difficulty.min_facts, difficulty.max_facts)

    chain = [draw_leaf(rng, names.pop())]
    sides: list[Fact] = []
    for _ in range(depth):
        chain.append(_chain_step(rng, names, chain, sides))

    distractors: list[Fact] = []
    while len(chain) + len(sides) + len(distractors) < num_facts:
        distractors.append(draw_distractor(rng, names.pop(), [*chain, *sides], distractors))
    return FactSheet(tuple(chain), tuple(sides), tuple(distractors))


def draw_leaf(rng: random.Random, name: str) -> Fact:
    """Draw a fact that states a number.

    Args:
        rng: Source of all randomness.
        name: What it defines.

    Returns:
        The fact.
    """
    return Fact(name, rng.randint(0, MAX_VALUE))


def draw_distractor(
    rng: random.Random, name: str, needed: list[Fact], distractors: list[Fact]
) -> Fact:
    """Draw a fact that nothing needs.

    Names the answer depends on appear only as *second* operands. As first operands they would turn
    "find the definition that builds on this name" into a guess between two equal patterns.

    Args:
        rng: Source of all randomness.
        name: What it defines.
        needed: Facts that the answer depends on.
        distractors: Facts drawn before that it does not depend on.

    Returns:
        The fact.
    """
    if not distractors or rng.random() < 0.4:
        return draw_leaf(rng, name)
    first = rng.choice(distractors)
    seconds: list[tuple[str | int, int]] = [(n, n) for n in CONSTANTS]
    if rng.random() >= 0.4:
        others = [fact for fact in [*needed, *distractors] if fact is not first]
        seconds = [(fact.name, fact.value) for fact in others]
    return derive(rng, name, first, seconds) or draw_leaf(rng, name)


def derive(
    rng: random.Random, name: str, first: Fact, seconds: Iterable[tuple[str | int, int]]
) -> Fact | None:
    """Draw sign and second operand evenly among those that keep the value in range.

    Args:
        rng: Source of all randomness.
        name: What is defined.
        first: The first operand.
        seconds: Possible second operands with their values.

    Returns:
        The definition, or none if no operand fits.
    """
    fitting = [
        Fact(name, result, first.name, sign, second)
        for second, value in seconds
        for sign, result in (("+", first.value + value), ("-", first.value - value))
        if 0 <= result <= MAX_VALUE
    ]
    return rng.choice(fitting) if fitting else None


def _chain_step(rng: random.Random, names: list[str], chain: list[Fact], sides: list[Fact]) -> Fact:
    """Draw the next member of the chain; a new side leaf, if any, is added to ``sides``."""
    previous = chain[-1]
    name = names.pop()
    # Two back at least: the value then has to be fetched from far away in the trace.
    earlier = chain[:-2] if len(chain) >= 3 else []
    kinds = {"constant": 40, "side": 35, "earlier": 25 if earlier else 0}
    (kind,) = rng.choices(list(kinds), weights=list(kinds.values()))
    if kind == "earlier":
        derived = derive(rng, name, previous, [(fact.name, fact.value) for fact in earlier])
        if derived is not None:
            return derived
    if kind == "side":
        side_name = names.pop()
        derived = derive(rng, name, previous, [(side_name, n) for n in range(MAX_VALUE + 1)])
        assert derived is not None  # the value 0 always fits
        sides.append(Fact(side_name, abs(derived.value - previous.value)))
        return derived
    derived = derive(rng, name, previous, [(n, n) for n in CONSTANTS])
    assert derived is not None  # one of +1 and -1 always fits
    return derived
