"""The second reasoner's task: the same questions, with longer traces and more re-checks.

Facts: a chain ``c0 .. cD`` starts at a leaf fact. Each later member is its predecessor plus or
minus a constant, a side leaf, or a side value, which another step derives. A derived name is
either in the chain or a side value, never both, so that the definition of a step shows all its
dependencies.

Traces: a plan, steps, re-checks and a validation of all steps. Re-checks never change a value; only
the correction of a wrong result does. The number of re-checks depends on the verbosity of the
trace, on features of the step, and on the share of earlier steps that were re-checked. No
probability is constant: with constant ones, greedy decoding would re-check always or never.
"""

import math
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import attrs

from kvpolicy_reasoner.task import (
    CONSTANTS,
    END,
    EOS,
    MAX_VALUE,
    NAMES,
    Difficulty,
    Fact,
    FactSheet,
    Problem,
    derive,
    draw_distractor,
    draw_leaf,
    write_prompt,
)

# Loss weight of randomly chosen words, which no model can predict: openers and kinds of sentences.
DRAWN = 0.25
# Loss weight of deliberately wrong numbers, which the model should not learn to generate.
WRONG = 0.0


@attrs.frozen
class Piece:
    """Text that starts and ends at token boundaries.

    Attributes:
        text: The text.
        weight: Loss weight of each of its tokens.
    """

    text: str
    weight: float = 1.0


def marked(text: str) -> list[Piece]:
    """Split a text at its randomly chosen words.

    Args:
        text: The text, with ``~`` before each such word: ``"~Wait, let me~ verify:"``.

    Returns:
        The pieces, without the marks.
    """
    parts = re.split(r"~( ?[A-Za-z]+)", text)  # plain and marked parts alternate
    weights = (DRAWN if number % 2 else 1.0 for number in range(len(parts)))
    return [Piece(part, weight) for part, weight in zip(parts, weights, strict=True) if part]


def join(pieces: Iterable[Piece]) -> str:
    """Join the texts of pieces.

    Args:
        pieces: The pieces in order.

    Returns:
        The complete text.
    """
    return "".join(piece.text for piece in pieces)


def weigh_tokens(pieces: Sequence[Piece], starts: Sequence[int]) -> list[float]:
    """Loss weights of tokens, from the weights of pieces.

    Args:
        pieces: The pieces in order.
        starts: Start of each token in the complete text; each piece must start at one of them.

    Returns:
        One weight per token.
    """
    of_piece: dict[int, float] = {}
    position = 0
    for piece in pieces:
        of_piece[position] = piece.weight
        position += len(piece.text)
    weights: list[float] = []
    for start in starts:
        weights.append(of_piece.pop(start) if start in of_piece else weights[-1])
    assert not of_piece, "a piece starts inside a token"
    return weights


Verbosity = Literal["terse", "normal", "verbose"]

VERBOSITIES: tuple[Verbosity, ...] = ("terse", "normal", "verbose")

_BASE: dict[Verbosity, float] = {"terse": -1.2, "normal": 0.1, "verbose": 1.1}
_FEEDBACK = 2.0
_FEW_FACTS, _MANY_FACTS = 10, 13
_SHARES = {"few": (70, 25, 5), "some": (15, 70, 15), "many": (5, 25, 70)}


def draw_verbosity(rng: random.Random, num_facts: int) -> Verbosity:
    """Sample the verbosity of a problem; more facts make a higher verbosity likelier.

    Args:
        rng: Random number generator.
        num_facts: Facts in the prompt.

    Returns:
        The verbosity.
    """
    size = "few" if num_facts < _FEW_FACTS else "some" if num_facts < _MANY_FACTS else "many"
    (verbosity,) = rng.choices(VERBOSITIES, weights=_SHARES[size])
    return verbosity


class Mood:
    """Decides on re-checks, from the verbosity and the share of steps re-checked so far."""

    def __init__(self, rng: random.Random, verbosity: Verbosity) -> None:
        """Start a trace.

        Args:
            rng: Random number generator.
            verbosity: Verbosity of the trace.
        """
        self._rng = rng
        self._base = _BASE[verbosity]
        self._steps = 0
        self._checked = 0

    def note(self, *, checked: bool) -> None:
        """Record a finished step.

        Args:
            checked: Whether the step was re-checked.
        """
        self._steps += 1
        self._checked += checked

    def wants(self, evidence: float) -> bool:
        """Sample whether to re-check.

        Args:
            evidence: Contribution of visible features to the logit.
        """
        share = self._checked / self._steps if self._steps else 0.5
        logit = self._base + evidence + _FEEDBACK * (share - 0.5)
        return self._rng.random() < 1 / (1 + math.exp(-logit))


MAX_SIDE_STEPS = 2

_KINDS = {"constant": 40, "leaf": 25, "derived": 25, "shared": 10}


def draw_sheet_with_side_steps(rng: random.Random, difficulty: Difficulty) -> FactSheet:
    """Generate the facts of one problem.

    Args:
        rng: Random number generator.
        difficulty: Ranges of depth and number of facts, both sampled uniformly.

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
    """Generate the next member of the chain, and append the facts it needs to ``sides``."""
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
    """Generate the definition of a side value and the leaf that it depends on."""
    leaf = names.pop()
    fitting = [
        (Fact(name, value, leaf, sign, n), Fact(leaf, start))
        for n in CONSTANTS
        for sign, start in (("+", value - n), ("-", value + n))
        if 0 <= start <= MAX_VALUE
    ]
    return list(rng.choice(fitting))


NUM_FORMS = 3
STEP_OPENERS = ("Now", "So", "Next", "Then", "OK")
# A ~ marks randomly chosen words: the first word, and the word that distinguishes a sentence from
# the alternatives.
RECHECKS = ("~Wait,~ let me~ verify:", "~Wait,~ let me~ make sure:", "~Wait,~ hold on:")
LOOK_BACK = "~Wait,~ look back:"
ONCE_MORE = "~Let me think again:"
OTHER_WORDS = "~Alternatively, another way:"
# No marks: a wrong result is always corrected immediately.
CORRECTION = "Wait, that is not right:"
VALIDATION = "~Wait, let me verify all the steps again"
VALIDATION_STEPS = ("Let me think again:", "Wait, once again:")

_OPENINGS: dict[Verbosity, str] = {
    "terse": "short, so be quick",
    "normal": "fair, so go on",
    "verbose": "long, so be careful",
}


class Cycle:
    """Random options: the one after the last is the likeliest, all others are possible."""

    def __init__(self, rng: random.Random, size: int) -> None:
        """Set the first option as the likeliest.

        Args:
            rng: Random number generator.
            size: Number of options.
        """
        self._rng = rng
        self._size = size
        self._last = size - 1

    def draw(self) -> int:
        """Sample the next option: the one after the last with a probability of 0.7."""
        turn = (self._last + 1) % self._size
        others = [option for option in range(self._size) if option != turn]
        self._last = turn if self._rng.random() < 0.7 else self._rng.choice(others)
        return self._last


def write_opening(verbosity: Verbosity) -> list[Piece]:
    """Describe the list of facts, which makes the verbosity visible to the model."""
    return marked(f"OK, the list is~ {_OPENINGS[verbosity]}")


def write_plan(chain: Sequence[Fact], derived_sides: Mapping[str, Fact]) -> list[Piece]:
    """List the dependencies from the question back to the leaf, including derived sides."""
    entries = []
    listed: set[str] = set()
    for fact in reversed(chain[1:]):
        entries.append(f" {fact.name} needs {fact.first} and {fact.second}")
        side = derived_sides.get(str(fact.second))
        if side is not None and side.name not in listed:
            listed.add(side.name)
            entries.append(f" {side.name} needs {side.first} and {side.second}")
    return [Piece("First" + ",".join(entries) + f", and {chain[0].name} is {chain[0].value}")]


def write_order(steps: Sequence[tuple[Fact, bool]]) -> list[Piece]:
    """List the steps in order; names that were chosen among several are marked."""
    names = [f"{'~' if chosen else ''} {fact.name}" for fact, chosen in steps]
    return marked("So the order is" + ",".join(names))


def write_body(
    fact: Fact,
    values: Mapping[str, int],
    form: int,
    *,
    shown: int | None = None,
    form_is_known: bool = True,
) -> list[Piece]:
    """State a definition, its operands' values and its result, in one of three forms.

    Args:
        fact: The fact.
        values: The value of each name.
        form: Index of the form.
        shown: A wrong result to state instead of the correct one.
        form_is_known: Whether the form can be predicted from earlier sentences.

    Returns:
        The pieces; the last one is the result.
    """
    formula = f" {fact.first} {fact.sign} {fact.second}"
    rule = f" {fact.name} ={formula}"
    value = values[str(fact.first)]
    named = isinstance(fact.second, str)
    second = values[str(fact.second)] if named else fact.second
    operand, other = f" {fact.first} is {value}", f" {fact.second} is {second}"
    texts = (
        f"{rule},{operand},{other},",
        f" find {fact.name} from{operand} and{other},{rule},",
        f" to find {fact.name} take{formula}, that is {value} {fact.sign} {second},",
    )
    plain = (f"{rule},{operand},", f" find {fact.name} from{operand},{rule},", texts[2])
    text = (texts if named else plain)[form]
    result = Piece(f" {fact.value}") if shown is None else Piece(f" {shown}", WRONG)
    return [*marked(("" if form_is_known else "~") + f"{text} so {fact.name} is"), result]


SLIP_CHANCE = 0.15

_EARLY_CHANCE = {"+": 0.7, "-": 0.15}
_LONG_CHAIN = 5


def write_pieces(rng: random.Random, sheet: FactSheet, verbosity: Verbosity) -> list[Piece]:
    r"""Write one reasoning trace.

    Args:
        rng: Random number generator for order, wording, wrong results and re-checks.
        sheet: The facts; the question is about the last member of the chain.
        verbosity: Verbosity of the trace.

    Returns:
        The text after ``<think>\\n\\n``, including the end-of-sequence token.
    """
    writer = _Writer(rng, sheet, verbosity)
    writer.write()
    return writer.pieces


def order_steps(rng: random.Random, sheet: FactSheet) -> list[tuple[Fact, bool]]:
    """Sample the order of the steps: the chain forwards, each side value before it is needed.

    Args:
        rng: Random number generator.
        sheet: The facts.

    Returns:
        The facts to derive in order, each with whether another could have come instead.
    """
    sides = {fact.name: fact for fact in sheet.sides if fact.first is not None}
    needs = [str(fact.second) for fact in sheet.chain[1:]]
    waiting = [sides[name] for name in dict.fromkeys(needs) if name in sides]
    order: list[tuple[Fact, bool]] = []
    for step in sheet.chain[1:]:
        while waiting:
            side = waiting[0]
            is_needed = side.name == step.second
            if not is_needed and rng.random() >= _EARLY_CHANCE[str(side.sign)]:
                break
            order.append((waiting.pop(0), not is_needed))
        order.append((step, bool(waiting)))
    return order


class _Writer:
    """Writes a trace sentence by sentence, and keeps the state that later sentences need."""

    def __init__(self, rng: random.Random, sheet: FactSheet, verbosity: Verbosity) -> None:
        self.pieces: list[Piece] = []
        self._rng = rng
        self._sheet = sheet
        self._verbosity = verbosity
        self._mood = Mood(rng, verbosity)
        self._values = {fact.name: fact.value for fact in sheet.facts}
        self._sides = {fact.name: fact for fact in sheet.sides if fact.first is not None}
        self._forms: dict[str, int] = {}
        self._next_form = Cycle(rng, NUM_FORMS)
        self._next_opener = Cycle(rng, len(STEP_OPENERS))
        self._next_recheck = Cycle(rng, len(RECHECKS))

    def write(self) -> None:
        """Write the trace."""
        answer = self._sheet.chain[-1].value
        order = order_steps(self._rng, self._sheet)
        self._append(write_opening(self._verbosity))
        self._append(write_plan(self._sheet.chain, self._sides))
        self._append(write_order(order))
        previous = None
        for fact, _ in order:
            self._work_out(fact)
            self._mood.note(checked=self._recheck(fact, previous))
            previous = fact
        self._append(marked(f"~So the answer should be {answer}"))
        if self._mood.wants(-0.9):
            self._validate([fact for fact, _ in order])
        self.pieces += [Piece("</think>", DRAWN), Piece(f"\n\n\\boxed{{{answer}}}{EOS}")]

    def _append(self, sentence: Sequence[Piece]) -> None:
        self.pieces += [*sentence, Piece(END)]

    def _work_out(self, fact: Fact) -> None:
        """Write a step; the next sentence corrects a wrong result."""
        form = self._forms[fact.name] = self._next_form.draw()
        opener = STEP_OPENERS[self._next_opener.draw()]
        slip = _near(self._rng, fact.value) if self._rng.random() < SLIP_CHANCE else None
        statement = write_body(fact, self._values, form, shown=slip, form_is_known=False)
        self._append([*marked(f"~{opener}"), *statement])
        if slip is not None:
            self._repeat(CORRECTION, fact)

    def _recheck(self, fact: Fact, previous: Fact | None) -> bool:
        """Write the re-checks that follow a step; returns whether there are any."""
        carried = self._values[str(fact.first)] // 10 != fact.value // 10
        if not self._mood.wants(1.5 if carried else -0.3):
            return False
        # Before the re-check, so that the last stated value is always that of the last step.
        side = self._sides.get(str(fact.second))
        if side is not None and side is not previous and self._mood.wants(0.5):
            self._repeat(LOOK_BACK, side)
        self._repeat(RECHECKS[self._next_recheck.draw()], fact)
        if self._mood.wants(-1.3 if carried else -3.5):
            self._repeat(ONCE_MORE, fact)
        if self._mood.wants(-0.5 if isinstance(fact.second, str) else -3.0):
            self._paraphrase(fact)
        if self._mood.wants(0.3 if fact.value < 10 else -2.5):
            self._confirm(fact)
        return True

    def _validate(self, order: Sequence[Fact]) -> None:
        """Repeat every step after the answer."""
        answer = self._sheet.chain[-1]
        self._append(marked(VALIDATION))
        for number, fact in enumerate(order):
            self._repeat(VALIDATION_STEPS[number % 2], fact, form_is_known=False)
        if self._mood.wants(0.0 if len(order) >= _LONG_CHAIN else -2.5):
            self._paraphrase(answer)
        self._confirm(answer)
        self._append([Piece(f"So the answer is {answer.value}")])

    def _repeat(self, opener: str, fact: Fact, *, form_is_known: bool = True) -> None:
        """Repeat a step in the same form."""
        form = self._forms[fact.name]
        statement = write_body(fact, self._values, form, form_is_known=form_is_known)
        self._append([*marked(opener), *statement])

    def _paraphrase(self, fact: Fact) -> None:
        """Repeat a step in the next form."""
        form = (self._forms[fact.name] + 1) % NUM_FORMS
        self._append([*marked(OTHER_WORDS), *write_body(fact, self._values, form)])

    def _confirm(self, fact: Fact) -> None:
        self._append(marked(f"~Yes, that's correct again, {fact.name} is {fact.value}"))


def _near(rng: random.Random, value: int) -> int:
    """A plausible wrong result."""
    near = [value + off for off in (-10, -2, -1, 1, 2, 10) if 0 <= value + off <= MAX_VALUE]
    return rng.choice(near)


STANDARD = Difficulty(min_depth=3, max_depth=6, min_facts=6, max_facts=14)


@attrs.frozen
class VerboseProblem(Problem):
    """A question with its reference trace.

    Attributes:
        verbosity: Verbosity of the reference trace.
        pieces: The trace in pieces with loss weights.
    """

    verbosity: Verbosity
    pieces: tuple[Piece, ...] = attrs.field(repr=False)

    @property
    def facets(self) -> dict[str, int | str]:
        """Properties that reports can group by."""
        return {**super().facets, "verbosity": self.verbosity}


def make_verbose_problem(rng: random.Random, difficulty: Difficulty = STANDARD) -> VerboseProblem:
    """Generate one problem of any split.

    Args:
        rng: Random number generator.
        difficulty: Ranges of depth and number of facts.

    Returns:
        The problem.
    """
    sheet = draw_sheet_with_side_steps(rng, difficulty)
    prompt = write_prompt(rng, sheet)
    verbosity = draw_verbosity(rng, len(sheet.facts))
    pieces = write_pieces(rng, sheet, verbosity)
    return VerboseProblem(
        prompt=prompt,
        trace=join(pieces),
        answer=str(sheet.chain[-1].value),
        depth=len(sheet.chain) - 1,
        num_facts=len(sheet.facts),
        verbosity=verbosity,
        pieces=tuple(pieces),
    )
