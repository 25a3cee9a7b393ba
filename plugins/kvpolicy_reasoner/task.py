"""The first reasoner's task: follow a chain of sums through shuffled facts.

A chain ``c0 .. cD`` starts at a leaf fact. Each later member is its predecessor plus or minus a
constant, a side leaf, or an earlier member. All values are between 0 and `MAX_VALUE`.

The reference trace consists of a plan, the steps, re-checks, a recapitulation and the boxed answer.
Re-checks never change the answer: they are the redundant sentences that eviction policies for
reasoning models look for. Their probabilities depend on features that the model can see, because
greedy decoding takes the likelier branch: with a constant 30 %, it would never re-check.
"""

import hashlib
import random
from collections.abc import Callable, Iterable

import attrs

from kvpolicy.errors import KVPolicyError
from kvpolicy.lab.tasks.answers import extract_answer
from kvpolicy.lab.tasks.task import Split

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
    """Ranges of the chain depth and the number of facts of a problem.

    Attributes:
        min_depth: Minimum number of derivation steps.
        max_depth: Maximum number of derivation steps.
        min_facts: Minimum number of facts in the prompt.
        max_facts: Maximum number of facts, unless the chain itself needs more.
    """

    min_depth: int
    max_depth: int
    min_facts: int
    max_facts: int


@attrs.frozen
class Fact:
    """One sentence of the prompt: a leaf, which states a number, or a sum of two operands.

    Attributes:
        name: The name that the fact defines.
        value: The value of the name.
        first: Name of the first operand; ``None`` in a leaf.
        sign: ``+`` or ``-``; ``None`` in a leaf.
        second: Second operand, a name or a constant; ``None`` in a leaf.
    """

    name: str
    value: int
    first: str | None = None
    sign: str | None = None
    second: str | int | None = None

    @property
    def text(self) -> str:
        """The sentence in the prompt, with its leading space."""
        if self.first is None:
            return f" {self.name} is {self.value}."
        return f" {self.name} = {self.first} {self.sign} {self.second}."


@attrs.frozen
class FactSheet:
    """The facts of a problem before they are shuffled into a prompt.

    Attributes:
        chain: The facts to derive, from the leaf to the one in the question.
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
    """Generate the facts of one problem.

    Args:
        rng: Random number generator.
        difficulty: Ranges of depth and number of facts, both sampled uniformly.

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
    """Generate a leaf: a fact that states a number.

    Args:
        rng: Random number generator.
        name: The name that it defines.

    Returns:
        The fact.
    """
    return Fact(name, rng.randint(0, MAX_VALUE))


def draw_distractor(
    rng: random.Random, name: str, needed: list[Fact], distractors: list[Fact]
) -> Fact:
    """Generate a fact that the answer does not depend on.

    Names that the answer depends on appear only as *second* operands. As first operands they would
    make "find the definition that builds on this name" ambiguous.

    Args:
        rng: Random number generator.
        name: The name that it defines.
        needed: Facts that the answer depends on.
        distractors: The distractors generated so far.

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
    """Sample sign and second operand uniformly among those that keep the value in range.

    Args:
        rng: Random number generator.
        name: The name that the fact defines.
        first: The first operand.
        seconds: Possible second operands with their values.

    Returns:
        The fact, or ``None`` if no operand fits.
    """
    fitting = [
        Fact(name, result, first.name, sign, second)
        for second, value in seconds
        for sign, result in (("+", first.value + value), ("-", first.value - value))
        if 0 <= result <= MAX_VALUE
    ]
    return rng.choice(fitting) if fitting else None


def _chain_step(rng: random.Random, names: list[str], chain: list[Fact], sides: list[Fact]) -> Fact:
    """Generate the next member of the chain, and append its side leaf, if any, to ``sides``."""
    previous = chain[-1]
    name = names.pop()
    # At least two steps back, so that the value must be retrieved from far back in the trace.
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


EOS = "<|eos|>"
END = ".\n\n"

_LONG_CHAIN = 6


def write_trace(rng: random.Random, sheet: FactSheet) -> str:
    r"""Write one reasoning trace.

    Args:
        rng: Random number generator, which decides on re-checks.
        sheet: The facts; the question is about the last member of the chain.

    Returns:
        The text after ``<think>\\n\\n``, including the end-of-sequence token.
    """
    values = {fact.name: fact.value for fact in sheet.facts}
    derived = {fact.name: fact for fact in sheet.chain[1:]}
    sentences = _plan(sheet.chain)
    for fact in sheet.chain[1:]:
        sentences.append("Now" + _body(fact, values))
        sentences += _rechecks(rng, fact, values, derived)
    sentences += _recap(rng, sheet.chain, values)
    answer = sheet.chain[-1].value
    sentences.append(f"So the answer is {answer}")
    text = "".join(sentence + END for sentence in sentences)
    return f"{text}</think>\n\n\\boxed{{{answer}}}{EOS}"


def _plan(chain: tuple[Fact, ...]) -> list[str]:
    """List the dependencies from the question back to the leaf."""
    needs = [f"And {fact.name} needs {fact.first}" for fact in reversed(chain[1:])]
    needs[0] = needs[0].replace("And", "First", 1)
    return [*needs, f"And {chain[0].name} is {chain[0].value}"]


def _body(fact: Fact, values: dict[str, int]) -> str:
    """State a definition, its operands' values and its result, without the final period."""
    first = f" {fact.name} = {fact.first} {fact.sign} {fact.second}"
    parts = [first, f" {fact.first} is {values[str(fact.first)]}"]
    if isinstance(fact.second, str):
        parts.append(f" {fact.second} is {values[fact.second]}")
    parts.append(f" so {fact.name} is {fact.value}")
    return ",".join(parts)


def _rechecks(
    rng: random.Random, fact: Fact, values: dict[str, int], derived: dict[str, Fact]
) -> list[str]:
    """Sample the redundant sentences that follow one step."""
    body = _body(fact, values)
    sentences = []
    carried = values[str(fact.first)] // 10 != fact.value // 10
    if rng.random() < (0.8 if carried else 0.1):
        sentences.append("Wait, let me double-check:" + body)
        if rng.random() < (0.75 if isinstance(fact.second, str) else 0.1):
            sentences.append("Alternatively, redo it:" + body)
    if fact.second in derived and rng.random() < 0.75:
        sentences.append("Hmm, look back:" + _body(derived[str(fact.second)], values))
    return sentences


def _recap(rng: random.Random, chain: tuple[Fact, ...], values: dict[str, int]) -> list[str]:
    depth = len(chain) - 1
    if rng.random() >= (0.8 if depth >= _LONG_CHAIN else 0.15):
        return []
    steps = ["Again" + _body(fact, values) for fact in chain[1:]]
    return ["Just to be thorough, let me go over it again", *steps]


STANDARD = Difficulty(min_depth=3, max_depth=7, min_facts=6, max_facts=14)

_NUM_BUCKETS = 8
_HELD_OUT: dict[int, Split] = {0: "test", 1: "tune"}


@attrs.frozen
class Problem:
    r"""A question with its reference trace.

    Attributes:
        prompt: The facts and the question, ending with ``<think>\\n\\n``.
        trace: The reference reasoning, with the final box and the end-of-sequence token.
        answer: The number inside the box.
        depth: Derivation steps from the leaf to the answer.
        num_facts: Facts in the prompt.
    """

    prompt: str
    trace: str
    answer: str
    depth: int
    num_facts: int

    @property
    def facets(self) -> dict[str, int | str]:
        """Properties that reports can group by."""
        return {"depth": self.depth, "num_facts": self.num_facts}


Maker = Callable[[random.Random, Difficulty], Problem]


def make_problem(rng: random.Random, difficulty: Difficulty = STANDARD) -> Problem:
    """Generate one problem of any split.

    Args:
        rng: Random number generator.
        difficulty: Ranges of depth and number of facts.

    Returns:
        The problem.
    """
    sheet = draw_fact_sheet(rng, difficulty)
    return Problem(
        prompt=write_prompt(rng, sheet),
        trace=write_trace(rng, sheet),
        answer=str(sheet.chain[-1].value),
        depth=len(sheet.chain) - 1,
        num_facts=len(sheet.facts),
    )


def write_prompt(rng: random.Random, sheet: FactSheet) -> str:
    r"""Shuffle the facts and append a question about the last member of the chain.

    Args:
        rng: Random number generator.
        sheet: The facts.

    Returns:
        The text, ending with ``<think>\\n\\n``.
    """
    facts = sheet.facts
    rng.shuffle(facts)
    question = f" What is {sheet.chain[-1].name}?"
    prompt = "".join(["<|user|>", *(fact.text for fact in facts), question])
    return prompt + "<|assistant|><think>\n\n"


def make_split_problem(
    rng: random.Random,
    split: Split,
    difficulty: Difficulty = STANDARD,
    make: Maker = make_problem,
) -> Problem:
    """Generate one problem of a split.

    Args:
        rng: Random number generator.
        split: The split that the prompt must belong to.
        difficulty: Ranges of depth and number of facts.
        make: Generates one problem of a task.

    Returns:
        The first generated problem whose prompt belongs to the split.
    """
    while True:
        problem = make(rng, difficulty)
        if split_of(problem.prompt) == split:
            return problem


def make_problems(
    n: int,
    *,
    seed: int,
    split: Split = "test",
    difficulty: Difficulty = STANDARD,
    make: Maker = make_problem,
) -> list[Problem]:
    """Generate distinct problems of a split; equal arguments give equal problems.

    Args:
        n: Number of problems.
        seed: Random seed for the problems.
        split: ``"test"`` for reported results, ``"tune"`` for choosing settings, ``"train"`` for
            training.
        difficulty: Ranges of depth and number of facts.
        make: Generates one problem of a task.

    Returns:
        ``n`` problems with ``n`` different prompts. The first ``k`` of them equal those returned
        for ``n=k``.

    Raises:
        KVPolicyError: ``n`` is negative, or the split does not exist.
    """
    if n < 0:
        msg = f"make_problems got n={n}; expected 0 or more"
        raise KVPolicyError(msg)
    if split not in ("train", "tune", "test"):
        msg = f"there is no split {split!r}; choose 'train', 'tune' or 'test'"
        raise KVPolicyError(msg)
    rng = random.Random(f"{split} {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < n:
        problem = make_split_problem(rng, split, difficulty, make)
        problems.setdefault(problem.prompt, problem)
    return list(problems.values())


def split_of(prompt: str) -> Split:
    """The split that a prompt belongs to.

    All facts except the first are sorted before hashing, so that reordering these facts does not
    change the split.

    Args:
        prompt: A prompt of this task.

    Returns:
        ``"test"`` or ``"tune"`` for an eighth of all prompts each, else ``"train"``.
    """
    facts = ".".join(sorted(prompt.split(".")))
    digest = hashlib.blake2b(facts.encode(), digest_size=8).digest()
    return _HELD_OUT.get(int.from_bytes(digest) % _NUM_BUCKETS, "train")


def grade(text: str, problem: Problem) -> bool:
    """Whether the last balanced box of a generated trace contains the answer.

    Args:
        text: The text that the model generated after the prompt.
        problem: The problem.
    """
    return extract_answer(text) == problem.answer
